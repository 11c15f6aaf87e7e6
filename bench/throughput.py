"""A pre-training step, ours and the same on transformers' modules, side by side in one process on one machine.

    python bench/throughput.py [--case small:128x128 --case base:64x512 …] [--dropout 0.1 0.0] [--only ours|theirs]
                               [--variants …] [--repeats 9] [--profile] [--out throughput]
    python bench/throughput.py --ablation --case small:128x128 --case small:1024x128 --case modern:128x128 --out ablation
    python bench/throughput.py --loss-curves SHARDS [--size small] [--steps 200]

A case is size:rows x length; `--size` alone takes that size's usual one. Both sides: the same networks, embeddings tied,
bfloat16 where there is a GPU, fused AdamW, clipping, random rows that lie on the device, a different batch each step.
Warm-up and compiling are not timed. Variants take turns in blocks of steps; the median of the blocks is what is compared.
What does not fit into memory beside the others has the device alone ("alone"). The share of the peak counts the matrix
products that the step needs (electra.pretraining.trial), the same number for every variant, though transformers' computes more.
Memory is the peak that torch allocated above what lay there before, from building to the last step, capture included.

Variants: "electra" is what `electra pretrain` does, "electra plain" the same with train.fast=off. Between them, rung by rung
(`--ablation` measures all four): "electra compiled" has torch.compile alone, "electra captured" the CUDA graph too but none of
our kernels. "transformers" is not compiled, "transformers compiled" is the one to compare with; "transformers graphs" is compiled for
CUDA graphs as well;
"transformers gathered" is compiled and computes the loss at the chosen positions alone, "transformers chosen" the logits too;
"plain gathered" and "plain chosen" are the same, not compiled.
"""

import argparse
import gc
import logging
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch

import machine
from electra.base.errors import MemoryExhaustedError
from electra.pretraining.trial import MEASURED, PEAKS, known_device
from electra.train.device import is_out_of_memory
from pretraining_steps import MODES, PEER, PLAIN, RUNGS, SIZES, VARIANTS, Case, ours, theirs

Result = TypeVar("Result")
WARM_UP = 4  # the first step compiles, the second is captured


class Variant:
    """Built, compiled and warm; remembers what that took."""

    def __init__(self, name: str, case: Case, device: torch.device):
        self.name, self.number = name, 0
        self.cuda = device.type == "cuda"
        self.seconds: list[float] = []
        before = torch.cuda.memory_allocated() if self.cuda else 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        if name in MODES:
            self.run = theirs(case, device, name)
        else:
            self.run = ours(case, device, RUNGS[name])
        warming = self.time(WARM_UP)
        self.compiling = WARM_UP * max(0.0, warming - self.time(2))
        self.gigabytes = (torch.cuda.max_memory_allocated() - before) / 2**30 if self.cuda else 0.0

    def time(self, steps: int) -> float:
        """Seconds per step."""
        self.wait()
        started = time.perf_counter()
        for _ in range(steps):
            loss = self.run(self.number)
            self.number += 1
        self.wait()
        taken = (time.perf_counter() - started) / steps
        assert torch.isfinite(loss), f"{self.name}: the loss is {loss.item()}"
        return taken

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def measured(self, case: Case, together: bool) -> dict[str, Any]:
        median, tokens = statistics.median(self.seconds), case.rows * case.length
        row = asdict(case) | {"variant": self.name, "together": together}
        return row | {
            "ms": 1000 * median,
            "ms_min": 1000 * min(self.seconds),
            "ms_max": 1000 * max(self.seconds),
            "blocks_ms": [round(1000 * value, 4) for value in self.seconds],
            "tokens_per_second": tokens / median,
            "gflops_per_token": case.flops_per_token() / 1e9,
            "tflops": tokens / median * case.flops_per_token() / 1e12,
            "peak_gib": self.gigabytes,
            "compile_seconds": self.compiling,
        }


def collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def unless_full(action: Callable[[], Result]) -> tuple[Result | None, str]:
    """What the action returns, or why there was not enough memory for it."""
    try:
        return action(), ""
    except (MemoryExhaustedError, RuntimeError) as error:
        if not isinstance(error, MemoryExhaustedError) and not is_out_of_memory(error):
            raise
        problem = str(error).strip().splitlines()[0][:160]
    collect()  # here, where the error no longer holds on to what it interrupted
    return None, problem


def measure(
    names: list[str], case: Case, arguments: argparse.Namespace, device: torch.device
) -> list[tuple[dict[str, Any], str]]:
    """Rows of the table and profiles. What does not fit beside the others is measured alone afterwards; the two that are
    compared come first."""
    torch.compiler.reset()  # compiled code holds on to what it was made for
    collect()
    alive: dict[str, Variant] = {}
    left: dict[str, str] = {}
    for name in sorted(names, key=lambda name: name not in ("electra", PEER)):
        variant, left[name] = unless_full(partial(Variant, name, case, device))
        if variant is not None:
            alive[name] = variant
    for _, name in product(range(arguments.repeats), list(alive)):
        if name in alive:
            seconds, left[name] = unless_full(partial(alive[name].time, arguments.block))
            if seconds is None:
                del alive[name]
            else:
                alive[name].seconds.append(seconds)
    found = []
    for variant in alive.values():
        row, text = variant.measured(case, len(alive) > 1), ""
        if arguments.profile:
            text, row["groups_ms"] = profile_of(variant, case)
        found.append((row, text))
    alive, variant = {}, None
    for name, problem in left.items():
        if problem and len(names) > 1:
            found += measure([name], case, arguments, device)
        elif problem:
            found.append((asdict(case) | {"variant": name, "problem": f"out of memory ({problem})"}, ""))
    return found


def profile_of(variant: Variant, case: Case) -> tuple[str, dict[str, float]]:
    from kernel_profile import profile

    title = f"{variant.name}, {case.size} {case.rows} x {case.length}, dropout {case.dropout}"
    return profile(title, partial(variant.time, 1), variant.cuda)


HEADER = (
    f"{'variant':28}{'size':>13}{'rows':>6}{'length':>7}{'dropout':>8}{'ms per step':>12}{'min..max':>18}{'tokens/s':>12}"
    "{peer:>25}"
    f"{'measured':>10}{'nominal':>9}{'GiB':>8}{'compile s':>11}"
)


def line(row: dict[str, Any], peer: float | None, peaks: list[float]) -> str:
    start = f"{row['variant']:28}{row['size']:>13}{row['rows']:6}{row['length']:7}{row['dropout']:8}"
    if "problem" in row:
        return f"{start}  {row['problem']}"
    ratio = f"{peer / row['ms']:25.2f}" if peer else f"{'-':>25}"
    spread = f"{row['ms_min']:.2f}..{row['ms_max']:.2f}"
    shares = "".join(
        f"{row['tflops'] / peak:{width}.1%}" if peak else f"{'-':>{width}}"
        for peak, width in zip(peaks, (10, 9), strict=True)
    )
    end = f"{row['peak_gib']:8.2f}{row['compile_seconds']:11.1f}" + ("" if row["together"] else "  alone")
    return f"{start}{row['ms']:12.2f}{spread:>18}{row['tokens_per_second']:12,.0f}{ratio}{shares}{end}"


def throughput(cases: list[Case], names: list[str], arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = known_device(torch.cuda.get_device_name()) if device.type == "cuda" else ""
    peaks = [MEASURED.get(known, 0.0), PEAKS.get(known, 0.0)]
    against = PLAIN if arguments.ablation else PEER if PEER in names else "transformers"
    print(HEADER.format(peer=f"x {against}"), flush=True)
    rows, texts = [], []
    for case in cases:
        found = measure(names, case, arguments, device)
        peer = next((row.get("ms") for row, _ in found if row["variant"] == against), None)
        for row, text in found:
            if peer and "ms" in row:
                row["ratio"] = peer / row["ms"]
            print(line(row, peer, peaks), flush=True)
            rows.append(row)
            texts.append(text)
        result = {"peak_tflops": {"measured": peaks[0], "nominal": peaks[1]}, "peer": against, "rows": rows}
        machine.write(arguments.out, result | {"transformers": version("transformers")})
        if arguments.profile:
            path = machine.RESULTS / f"{arguments.out}_profile.txt"
            path.write_text("\n".join(filter(None, texts)))
            print("\n".join(filter(None, texts[-len(found) :])))


def version(package: str) -> str | None:
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def parse_case(text: str) -> tuple[str, int, int]:
    size, _, shape = text.partition(":")
    rows, _, length = shape.partition("x")
    if size not in SIZES or not (rows.isdigit() and length.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not SIZE:ROWSxLENGTH with a size of {', '.join(SIZES)}")
    return size, int(rows), int(length)


def main() -> None:
    logging.basicConfig(format="    %(message)s")  # what the step does without is said
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", type=parse_case, action="append", help="SIZE:ROWSxLENGTH, again and again")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.1])
    parser.add_argument("--only", choices=("ours", "theirs"))
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["electra", "transformers", PEER], metavar="NAME"
    )
    parser.add_argument("--ablation", action="store_true", help="our step, rung by rung")
    parser.add_argument("--repeats", type=int, default=9, help="blocks of each variant")
    parser.add_argument("--block", type=int, default=10, help="steps of a block")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--loss-curves", metavar="SHARDS")
    parser.add_argument("--steps", type=int, default=200, help="of the loss curves")
    parser.add_argument("--out", help="name of the files under bench/results")
    arguments = parser.parse_args()
    shapes = arguments.case or [parse_case(SIZES[arguments.size].usual)]
    cases = [Case(size, rows, length, dropout) for size, rows, length in shapes for dropout in arguments.dropout]
    if arguments.loss_curves:
        from loss_curves import loss_curves

        loss_curves(arguments.loss_curves, cases[0], arguments.steps, arguments.out or "loss_curves")
        return
    side = {None: "", "ours": "electra", "theirs": "transformers"}[arguments.only]
    arguments.out = arguments.out or "throughput"
    names = list(RUNGS) if arguments.ablation else arguments.variants
    throughput(cases, [name for name in names if name.startswith(side)], arguments)


if __name__ == "__main__":
    main()
