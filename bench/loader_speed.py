"""How many rows a second does the loader make: all rows of a batch at once, beside one row at a time?

    OMP_NUM_THREADS=1 python bench/loader_speed.py [--rows 256] [--length 128] [--repeats 7] [--device cpu]

One thread, tokens in memory, eight shards of documents of about 200 tokens. All ways make the same batches (checked here
too); they alternate, and the medians of their times are compared. `resident`: the tokens are on --device already, where the
batch is then gathered. Time is the processor's, so that others on the machine do not count; with a GPU it is the clock's and
includes the wait for it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import machine
from electra.base.batch import SpecialIds
from electra.data.batches import Loader, place_corpus
from electra.data.rows import RowsSettings, build_rows
from electra.data.shards import Shard, TokenData

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "data"))
from row_reference import RowByRow

SPECIAL = SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)
STEPS = 20


def corpus(shards: int = 8, documents: int = 10_000) -> TokenData:
    rng = np.random.default_rng(0)

    def shard() -> Shard:
        lines = np.cumsum(rng.integers(5, 45, documents * 8))
        return Shard(rng.integers(1000, 30_522, lines[-1], dtype=np.uint16), lines[7::8], lines)

    manifest: Any = SimpleNamespace(vocab_size=30_522)
    return TokenData(tuple(shard() for _ in range(shards)), manifest)


def seconds(make: Callable[[int], object], clock: Callable[[], float]) -> float:
    started = clock()
    for step in range(STEPS):
        make(step)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rows", 256), ("length", 128), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if asked.device == "cpu" else time.perf_counter
    data, result = corpus(), {}
    for kind in ("packed", "segments"):
        rows = build_rows(RowsSettings(kind=kind, length=asked.length), data, SPECIAL, 0)
        loader = Loader(rows, asked.rows, 1_000_000, 0)
        one_by_one = RowByRow(rows)
        resident, note = place_corpus(loader, data.manifest.vocab_size, "device", torch.device(asked.device))
        print(note)
        batches = resident.batches(0)
        ways: dict[str, Callable[[int], object]] = {
            "row by row": lambda step, loader=loader, one=one_by_one: one.batch(loader, step),
            "at once": loader.batch_at,
            "resident": lambda step, batches=batches: next(batches),
        }
        for step in range(3):
            expected = one_by_one.batch(loader, step)
            for found in (loader.batch_at(step), resident.batch_at(step).to("cpu")):
                assert all(map(torch.equal, expected.tensors(), found.tensors()))
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(asked.repeats):
            for name, make in ways.items():
                times[name].append(seconds(make, clock))
        rates = {name: STEPS * asked.rows / statistics.median(taken) for name, taken in times.items()}
        result[kind] = {name: round(rate) for name, rate in rates.items()}
        for name, rate in rates.items():
            print(f"{kind:10}{name:14}{rate:12,.0f} rows/s")
    sizes = {"rows": asked.rows, "length": asked.length, "threads": 1, "device": asked.device}
    machine.write(f"loader_speed_{asked.device}", sizes | {"rows_per_second": result})


if __name__ == "__main__":
    main()
