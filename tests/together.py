"""Several processes that train together, forked from the test's own: starting one with torchrun costs seconds."""

import multiprocessing
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

from electra.train.log import read_metrics
from helpers import run_command


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Together:
    """`world` processes of one command; `changes` are words that only some of them have, by rank."""

    def __init__(
        self,
        world: int,
        folder: Path,
        *words: object,
        changes: Mapping[int, Sequence[str]] | None = None,
        missing: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
    ):
        import transformers.models.electra.modeling_electra  # noqa: F401  (once here, not in every process)

        self.folder, port, self.outputs = folder, free_port(), {}
        folder.mkdir(parents=True, exist_ok=True)
        self.processes: dict[int, ForkProcess] = {}
        for rank in set(range(world)) - set(missing):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(variables or {})}
            output = folder / f"{time.monotonic_ns()}-{rank}.txt"
            output.touch()
            said = [str(word) for word in (*words, *(changes or {}).get(rank, ()))]
            process = multiprocessing.get_context("fork").Process(target=run_command, args=(said, place, output))
            process.start()
            self.processes[rank], self.outputs[rank] = process, output

    def codes(self, timeout: float = 120) -> list[int | None]:
        """The exit codes of all, by rank. Nobody is left behind."""
        until = time.monotonic() + timeout
        for process in self.processes.values():
            process.join(max(0.0, until - time.monotonic()))
        late = [rank for rank, process in self.processes.items() if process.is_alive()]
        for process in self.processes.values():
            process.kill()
            process.join()
        assert not late, f"processes {late} still ran after {timeout} s"
        return [process.exitcode for process in self.processes.values()]

    def said(self, rank: int) -> str:
        return self.outputs[rank].read_text("utf-8")

    def lines(self) -> list[str]:
        """What all of them said, but for progress."""
        lines = [line for rank in self.outputs for line in self.said(rank).splitlines()]
        return [line for line in lines if line.startswith("electra")]


def wait_for_step(run: Path, step: int, timeout: float = 90) -> None:
    wait_until(lambda: any(record["step"] >= step for record in read_metrics(run)), timeout)


def wait_until(happens: Callable[[], bool], timeout: float = 90) -> None:
    until = time.monotonic() + timeout
    while not happens():
        assert time.monotonic() < until, f"not within {timeout} s"
        time.sleep(0.005)
