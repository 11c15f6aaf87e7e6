"""What docs/evidence.md still wants from a GPU, the most important first, in one command on a machine that may be taken away:

    python bench/one_gpu.py --data SHARDS --glue GLUE --out FOLDER [--keep FOLDER] [--seconds 1500] [--only STAGE …] [--plan]

A stage is a command of the README or of this folder. One is begun only if the time left is enough for it, stopped by SIGTERM when it takes
half as long again, and not repeated once it has succeeded: the same command goes on, at the next stage or within one that saves as it goes.
OUT/log has what each said, OUT/stages.json what became of it. Stages that run many processes have CUDA's MPS meanwhile.

--keep is what to copy away from the machine: after every half minute logs, results and reports are in KEEP/small.tar.gz, and models, as exported,
in KEEP/models.tar.0, .1, … of 15 MB each (`cat models.tar.* | tar x`).
"""

import argparse
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import machine
from electra.base.files import read_or_set_aside, write_atomically, write_json

BENCH = Path(__file__).parent.absolute()
FIVE, REDUCED = "cola,sst2,mrpc,stsb,rte", "mnli qnli qqp"
SMALL, PIECE = 2_000_000, 15_000_000  # bytes
KEPT = (".json", ".jsonl", ".log", ".md", ".png", ".toml", ".txt", ".xml")
BULKY = ("tokenizer.json", "wrong.jsonl")  # in each of hundreds of folders
MPS = "nvidia-cuda-mps-control"


class Stage(NamedTuple):
    """`seconds`: what it takes on an H200. `shares`: with many processes on the GPU at a time."""

    name: str
    seconds: float
    command: str
    shares: bool = False


def stages(given: argparse.Namespace) -> list[Stage]:
    python, bench, out, data, glue = (
        shlex.quote(str(path)) for path in (sys.executable, BENCH, given.out, given.data, given.glue)
    )
    seeds, jobs = f"--seeds {given.seeds}", f"--jobs {given.jobs}"
    speedrun = (
        f"{python} -m electra speedrun {given.recipe} data={data} glue={glue} tasks={given.tasks} seed={given.seed}"
    )
    protocol = "method=paper pooling=mean"  # that of the seeds which are stored
    finetune = f"{python} -m electra finetune {out}/speed/run {REDUCED} data={glue} evaluations=1 {protocol}"
    of_run = " ".join(f"finetune.{word}" for word in protocol.split())
    memory = "--case modern-small:1024x128 --variants electra 'transformers compiled' 'transformers gathered'"
    claim = f"{python} {bench}/claim.py table5,compute,training,after,generators,sharing --data {data} --glue {glue} --out {out}/claim"
    rates = "--rate BERT=0.003 'BERT 30 %=0.003' --more-tasks"
    screens = f"{python} {bench}/screens.py {bench}/arms.json --data {data} --glue {glue} --out {out}/screens"
    overhead = f"{python} -m torch.distributed.run --standalone --nproc-per-node 1 {bench}/torchrun_overhead.py"
    minutes = f"--minutes {given.minutes:g}"
    tests = f"{python} -m pytest -m gpu -n 12 --maxschedchunk 1 -v --junitxml={out}/tests.xml"
    return [
        Stage("claim", 1000, f"{claim} {rates} --jobs 7 --task-jobs 5", True),  # a training takes 12.5 GiB
        Stage("tests", 260, f"{tests} tests/train/test_distributed_gpu.py tests"),  # the slow ones first
        Stage("screens", 500, f"{screens} --at-once 4 --seconds 350 --name screens_more", True),
        Stage("overhead", 100, f"{overhead} --out torchrun_overhead"),
        Stage(
            "speedrun",
            190 + 60 * given.minutes,
            f"{speedrun} {of_run} {minutes} {seeds} {jobs} --out {out}/speed",
            True,
        ),
        Stage("export", 30, f"{python} -m electra export {out}/speed/run {out}/models/speed"),
        Stage("reduced", 60, f"{finetune} --seeds 1 {jobs} --out {out}/reduced", True),
        Stage(
            "memory",
            150,
            f"{python} {bench}/throughput.py {memory} --dropout 0 --block 10 --repeats 5 --out modern_1024",
        ),
    ]


class Keeper(threading.Thread):
    """Copies what may be lost with the machine, until `over`."""

    def __init__(self, out: Path, keep: Path | None):
        super().__init__(daemon=True)
        self.out, self.folder, self.over, self.begun = out, keep, threading.Event(), time.time()

    def run(self) -> None:
        while not self.over.wait(30):
            self.copy()

    def copy(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        results = [path for path in machine.RESULTS.glob("*") if path.stat().st_mtime > self.begun]
        found = [path for path in self.out.rglob("*") if path.suffix in KEPT and path.name not in BULKY]
        found = [path for path in found if "models" not in path.parts]
        small = [path for path in found if path.is_file() and path.stat().st_size < SMALL]
        named = [(path, f"results/{path.name}") for path in results] + [
            (it, f"{it.relative_to(self.out)}") for it in small
        ]
        write_atomically(self.folder / "small.tar.gz", packed(named, compress=True))

    def copy_models(self) -> None:
        """Once they are whole."""
        if self.folder is None or (self.folder / "models.tar.0").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = packed([(self.out / "models", "models")], compress=False)
        for number, start in reversed(list(enumerate(range(0, len(whole), PIECE)))):
            write_atomically(self.folder / f"models.tar.{number}", whole[start : start + PIECE])


def packed(named: list[tuple[Path, str]], compress: bool) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w:gz" if compress else "w") as archive:
        for path, name in named:
            archive.add(path, name)
    return memory.getvalue()


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[dict[str, str]]:
    """MPS, where there is one; and few threads for each of many processes."""
    if not wanted:
        yield {}
        return
    has_one = shutil.which(MPS) is not None
    if has_one:
        subprocess.run([MPS, "-d"], check=False, capture_output=True)
    try:
        yield {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    finally:
        if has_one:
            subprocess.run([MPS], input=b"quit\n", check=False, capture_output=True)


def perform(stage: Stage, out: Path, left: float) -> dict[str, object]:
    """As a user would run it, and stop it."""
    started = time.monotonic()
    with shared_gpu(stage.shares) as variables, (out / "log" / f"{stage.name}.log").open("a") as log:
        log.write(f"$ {stage.command}\n")
        log.flush()
        process = subprocess.Popen(
            shlex.split(stage.command),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=BENCH.parent,
            env=os.environ | variables,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(1.5 * stage.seconds, left))
        finally:
            code = stopped(process)
    return {"code": code, "seconds": round(time.monotonic() - started, 1), "command": stage.command}


def stopped(process: subprocess.Popen[bytes]) -> int:
    for send in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, send)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
    return process.wait()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prepared shards")
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--seconds", type=float, default=1500, help="in all")
    parser.add_argument("--only", nargs="*", metavar="STAGE")
    parser.add_argument("--plan", action="store_true", help="show the stages, run none")
    parser.add_argument("--recipe", default="modern-small")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", default=FIVE)
    parser.add_argument("--seeds", type=int, default=5, help="of fine-tuning")
    parser.add_argument("--jobs", type=int, default=13, help="of fine-tuning, at a time")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    given.out, given.data, given.glue = (path.absolute() for path in (given.out, given.data, given.glue))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    until = time.monotonic() + given.seconds
    planned = [stage for stage in stages(given) if given.only is None or stage.name in given.only]
    if given.plan:
        for stage in planned:
            print(f"{stage.name}, {stage.seconds:.0f} s: {stage.command}")
        return
    (given.out / "log").mkdir(parents=True, exist_ok=True)
    done = read_or_set_aside(given.out / "stages.json") or {}
    keeper = Keeper(given.out, given.keep)
    keeper.start()
    for stage in planned:
        left = until - time.monotonic()
        if done.get(stage.name, {}).get("code") == 0:
            print(f"{stage.name}: done before", flush=True)
        elif left < stage.seconds:
            print(f"{stage.name}: needs {stage.seconds:.0f} s, {left:.0f} are left", flush=True)
        else:
            done[stage.name] = perform(stage, given.out, left)
            write_json(given.out / "stages.json", done)
            print(f"{stage.name}: {json.dumps(done[stage.name])}", flush=True)
            keeper.copy()
        if stage.name == "export" and done.get("export", {}).get("code") == 0:
            keeper.copy_models()
    keeper.over.set()


if __name__ == "__main__":
    main()
