"""What training in a group costs: a step alone, in a group of one (gradients and counts through NCCL, inside the CUDA graph, and
the hosts' word after each step, as in the loop), and with weights in pieces (FSDP2, uncaptured), in turns in one process.

    torchrun --standalone --nproc-per-node 1 bench/torchrun_overhead.py [--recipe electra-small] [--rows 128] [--steps 30]
    torchrun --standalone --nproc-per-node N bench/torchrun_overhead.py …      # with N GPUs: --rows is the batch of all

Prints a line of JSON for each variant: seconds per step (median of the blocks), its ratio to the first variant, the bytes of
gradients that a step adds up, and the bandwidth of adding up that many bytes by themselves. --out NAME also writes
bench/results/NAME.json.
"""

import argparse
import json
import statistics
import time

import torch
from torch import distributed as dist

import machine
from electra.base.batch import Batch, SpecialIds
from electra.base.ranks import ALONE, Ranks, join
from electra.objectives import build
from electra.pretraining.settings import resolve
from electra.train.device import choose_device
from electra.train.distributed import shard
from electra.train.step import Execution, Step, build_step

VOCABULARY, BLOCKS = 30522, 7


def random_batch(rows: int, length: int, device: torch.device) -> Batch:
    ids = torch.randint(5, VOCABULARY, (rows, length), device=device)
    real, samples = torch.ones_like(ids, dtype=torch.bool), torch.arange(rows, device=device)
    return Batch(ids, torch.zeros_like(ids), real, samples, seed=0, padded=False, progress=0.5)


def build_variant(name: str, recipe: str, ranks: Ranks, device: torch.device) -> Step:
    words = ["data=unused", "run=unused", "train.batch=1"]
    settings, _ = resolve(recipe, [*words, *(["train.parallel=fsdp"] if name == "fsdp" else [])])
    flags = torch.zeros(VOCABULARY, dtype=torch.bool)
    inputs = settings.inputs(SpecialIds(0, 1, 2, 3, 4), flags, flags.float())
    objective = build(settings.objective, inputs).to(device).train()
    execution = Execution.of(settings.train, device, ALONE if name == "alone" else ranks)
    if name == "fsdp":
        shard(objective, ranks, device, execution.reduce)
    return build_step(objective, settings.optimizer_of_run(), execution, settings.seed)


def seconds_of(step: Step, batch: Batch, count: int) -> float:
    started = time.perf_counter()
    for number in range(count):
        sums, _ = step(batch, number, 0.1)
        step.execution.ranks.agree(None, 0.0, 0.0, 0.0, 0.0)
    assert torch.isfinite(sums["total"]).item()
    return (time.perf_counter() - started) / count


def bandwidth(size: int, device: torch.device, ranks: Ranks) -> float:
    """Bytes per second that each process sends while that many bytes are added up: 2 (N - 1) / N of them; all of them with one."""
    tensor = torch.zeros(size // 4, device=device)
    for count in (3, 20):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
    moved = size * (2 * (ranks.world - 1) / ranks.world if ranks.world > 1 else 1)
    return moved * count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="electra-small")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", help="a name in bench/results")
    asked = parser.parse_args()
    with join() as ranks:
        assert ranks.together, "start with torchrun"
        settings, _ = resolve(asked.recipe, ["data=unused", "run=unused"])
        device = ranks.device(choose_device(settings.train))
        batch = random_batch(asked.rows // ranks.world, settings.rows.length, device)
        variants = {name: build_variant(name, asked.recipe, ranks, device) for name in ("alone", "ddp", "fsdp")}
        gradients = sum(parameter.nbytes for parameter in variants["ddp"].objective.parameters())
        for step in variants.values():
            seconds_of(step, batch, 4)  # compiles, captures
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(BLOCKS):
            for name, step in variants.items():
                times[name].append(seconds_of(step, batch, asked.steps))
        speed = bandwidth(gradients, device, ranks)
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows = [
            {
                "variant": name,
                "recipe": asked.recipe,
                "rows": asked.rows,
                "processes": ranks.world,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "torch": torch.__version__,
                "captured": bool(step.captured.graphs),
                "compiled": step.compiled is not None,
                "seconds": round(medians[name], 6),
                "ratio": round(medians[name] / medians["alone"], 4),
                "blocks": [round(value, 6) for value in times[name]],
                "gradient_bytes": gradients,
                "bytes_per_second": round(speed),
            }
            for name, step in variants.items()
        ]
        for step in variants.values():
            step.captured.graphs.clear()  # NCCL ends only after the graphs that hold its kernels
        for row in rows if ranks.is_first else ():
            print(json.dumps(row), flush=True)
        if asked.out and ranks.is_first:
            machine.write(asked.out, {"rows": rows})


if __name__ == "__main__":
    main()
