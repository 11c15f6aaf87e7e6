"""What processes say that do not meet. Faults of those that have met: tests/faults/test_processes.py."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed as dist

from electra.base.errors import MachineError
from electra.base.ranks import Meeting, Ranks, join, meeting_place
from together import Together, free_port


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_nobody_knows_is_one_line_with_the_reason_in_every_process(
    rank, recipe, prepared, tmp_path, monkeypatch
):
    """Also in process 0, whose store would say it in pages."""

    def unknown(*_):  # by a name server that answers at once
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    words = ["pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", "train.timeout=1"]
    variables = {"MASTER_ADDR": "nobody.invalid"}
    process = Together(2, tmp_path / "said", *words, missing=[1 - rank], variables=variables)
    assert process.codes(60) == [5]
    (line,) = process.lines()
    assert "nobody.invalid" in line and "within 1 s (train.timeout): Name or service not known." in line
    assert "frame #" not in process.said(rank) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("worlds", [(2, 3), (3, 2)])
def test_processes_that_were_started_for_another_number_are_named_in_one_line(worlds, recipe, prepared, tmp_path):
    words = ["pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", "train.timeout=20"]
    port = str(free_port())
    processes = [
        Together(
            *(2, tmp_path / str(rank), *words),
            missing=[1 - rank],
            variables={"MASTER_PORT": port, "WORLD_SIZE": str(world)},
        )
        for rank, world in enumerate(worlds)
    ]
    assert [process.codes(60) for process in processes] == [[5], [5]]
    (line,) = [line for process in processes for line in process.lines()]
    assert f"process 1 was started with WORLD_SIZE={worlds[1]}, process 0 with WORLD_SIZE={worlds[0]}." in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("worlds", "reasons"),
    [
        ((3, 4, 3), ["process 1 was started with WORLD_SIZE=4", "process 1 was", "did not connect"]),
        ((2, 2, 3), ["", "", "one has WORLD_SIZE=2"]),
        ((2, 2), ["", ""]),
    ],
)
def test_whom_a_process_of_another_number_keeps_from_meeting(worlds, reasons, monkeypatch):
    """Of the store names of processes that are gone, of another number, say nothing."""
    monkeypatch.setattr("electra.base.ranks.SETTLING", 0.1)
    store = dist.HashStore()
    store.set("names", "old/7 old/7 gone/7")
    store.set("name/1", "gone/7")
    meetings = [Meeting(rank, world, "host", 1, seconds=2) for rank, world in enumerate(worlds)]
    with ThreadPoolExecutor(len(worlds)) as pool:
        ends = [pool.submit(meeting_place, store, meeting).exception for meeting in meetings]
        errors = [str(end() or "") for end in ends]
    for reason, error in zip(reasons, errors, strict=True):
        assert reason in error and bool(reason) == bool(error), errors


def test_a_port_of_somebody_else_has_a_remedy_in_every_process(recipe, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("electra.base.ranks.QUIET", 0.2)
    words = ["pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", "train.timeout=1"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        processes = Together(2, tmp_path / "said", *words, variables={"MASTER_PORT": port})
        assert processes.codes(60) == [5, 5]
    assert len(processes.lines()) == 2 and all(f"127.0.0.1:{port}" in line for line in processes.lines())
    assert all("another MASTER_PORT" in line for line in processes.lines())


def test_a_variable_that_was_left_over_is_one_to_unset(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    message = "^WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set with RANK. Start with torchrun, or unset RANK.$"
    with pytest.raises(MachineError, match=message), join():
        pass


def launcher(monkeypatch, world: int, **variables: str) -> str:
    for name, value in ({"MASTER_ADDR": "head", "MASTER_PORT": "3456", "LOCAL_WORLD_SIZE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    return " ".join(Ranks(0, world, 0, together=True).launcher(1))


def test_what_goes_on_names_the_port_and_the_restarts_that_are_known(monkeypatch):
    plain = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:3456 --nproc-per-node 2 -m electra"
    assert launcher(monkeypatch, 4) == plain
    by_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"}
    assert launcher(monkeypatch, 4, **by_torchrun) == plain.replace("3456", "PORT")
    alone = "torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m electra"
    assert launcher(monkeypatch, 2, TORCHELASTIC_MAX_RESTARTS="3") == alone
