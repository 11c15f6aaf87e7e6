"""The generator's head at the chosen positions: plain torch, the same compiled, and the Triton kernels, side by side.

    python bench/masked_head.py [--rows 19456] [--vocab 30522] [--embedding 128] [--temperature 1.0] [--sweep]

Needs a CUDA device. bfloat16; 19 chosen positions of each of 1,024 rows by default (2432 is the paper's batch). First the
kernels are checked against the reference in float64; then forward alone (loss, draw) and forward with the gradients of
states, words and bias are timed in turn, median of repeats, and the peak of memory above the inputs is read.
`--sweep` times other tiles of rows, warps and stages for the kernels: the plan in kernels/masked_head is fixed from it.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import machine
from electra.kernels import masked_head as kernels
from electra.kernels import reference_only
from electra.model.heads import Filled, can_fuse, masked_head

Head = Callable[..., Filled]
CHECKED_ROWS = 2048


def plain(*inputs: Any) -> Filled:
    with reference_only():
        return masked_head(*inputs)


def inputs(arguments: argparse.Namespace) -> tuple[list[Tensor], tuple[Any, ...], Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    rows, vocab, embedding = arguments.rows, arguments.vocab, arguments.embedding

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, device="cuda") * scale
        return drawn.bfloat16().requires_grad_()

    parts = [normal(rows, embedding), normal(vocab, embedding, scale=2 / embedding**0.5), normal(vocab)]
    targets = torch.randint(vocab, (rows,), generator=generator, device="cuda")
    noise = torch.rand(rows, 2, generator=generator, device="cuda")
    upstream = torch.full((rows,), -1 / rows, device="cuda")
    return parts, (targets, noise, arguments.temperature, arguments.forbid_target), upstream


def check(parts: list[Tensor], options: tuple[Any, ...], upstream: Tensor) -> dict[str, float]:
    """Stops with a line where the kernels and float64 do not agree."""
    few = slice(0, CHECKED_ROWS)
    targets, noise, *rest = options
    some = [parts[0].detach()[few], parts[1].detach(), parts[2].detach()]
    results = []
    for head, dtype in ((masked_head, torch.bfloat16), (plain, torch.float64)):
        states, words, bias = leaves = [part.to(dtype).requires_grad_() for part in some]
        found = head(states, words, bias, targets[few], noise[few], *rest)
        gradients = torch.autograd.grad(found.log_likelihood, leaves, upstream[few].to(found.log_likelihood.dtype))
        results.append((found, gradients))
    (mine, slopes), (theirs, expected) = results
    names = "states", "words", "bias"
    errors = {
        name: ((one.double() - other).abs().max() / other.abs().max()).item()
        for name, one, other in zip(names, slopes, expected, strict=True)
    }
    errors["loss"] = (mine.log_likelihood - theirs.log_likelihood).abs().max().item()
    errors["other tokens"] = (mine.sampled != theirs.sampled).double().mean().item()
    limits = {"states": 1e-2, "words": 1e-2, "bias": 1e-2, "loss": 1e-3, "other tokens": 5e-3}
    print("against float64:  " + "   ".join(f"{name} {value:.1e}" for name, value in errors.items()))
    wrong = [name for name, limit in limits.items() if not errors[name] <= limit]
    if wrong:
        sys.exit(f"the kernels are wrong: {', '.join(wrong)}")
    return errors


def forward_only(head: Head, parts: list[Tensor], options: tuple[Any, ...], upstream: Tensor) -> None:
    with torch.no_grad():
        head(*parts, *options)


def with_gradients(head: Head, parts: list[Tensor], options: tuple[Any, ...], upstream: Tensor) -> None:
    torch.autograd.grad(head(*parts, *options).log_likelihood, parts, upstream)


PARTS = {"forward": forward_only, "forward + backward": with_gradients}


def peak(run: Callable[[], None]) -> float:
    """MiB above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def milliseconds(run: Callable[[], None]) -> float:
    from triton.testing import do_bench

    return do_bench(run, warmup=200, rep=600, return_mode="median")


def compare(arguments: argparse.Namespace, given: tuple[Any, ...]) -> dict[str, dict[str, float]]:
    """Measured twice in turn; the second time is kept, so that no variant has the cold device."""
    heads: dict[str, Head] = {
        "torch": plain,
        "torch compiled": torch.compile(plain, fullgraph=True),
        "kernels": masked_head,
    }
    table: dict[str, dict[str, float]] = {name: {} for name in heads}
    for _, (name, head), (part, body) in itertools.product(range(2), heads.items(), PARTS.items()):

        def run(head: Head = head, body: Callable[..., None] = body) -> None:
            body(head, *given)

        table[name][part] = milliseconds(run)
        table[name][f"{part} MiB"] = peak(run)
    product = 2 * arguments.rows * arguments.vocab * arguments.embedding
    print(f"{'':16}" + "".join(f"{part + ' ms':>22}{'MiB':>9}{'TFLOP/s':>9}" for part in PARTS))
    for name, row in table.items():
        figures = (
            f"{row[part]:22.3f}{row[f'{part} MiB']:9.0f}{times * product / row[part] / 1e9:9.0f}"
            for part, times in zip(PARTS, (1, 3), strict=True)
        )
        print(f"{name:16}" + "".join(figures))
    print("TFLOP/s counts the products that are needed, one forward and two backward, not those done again.")
    return table


def sweep(given: tuple[Any, ...]) -> None:
    """One kernel's tiles at a time; what does not fit into the device is left out."""
    usual = kernels.plan(torch.device("cuda"))
    finish = {"ROWS": (1, 2, 4), "num_warps": (1, 2, 4, 8), "num_stages": (1,)}
    product = {"ROWS": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}
    choices = {"forward": product, "finish": finish, "backward": product}
    for kernel, options in choices.items():
        times = []
        for values in itertools.product(*options.values()):
            tile = dict(zip(options, values, strict=True))
            kernels.plan = lambda device, tile=tile, kernel=kernel: usual._replace(**{kernel: tile})
            try:
                times.append((milliseconds(lambda: with_gradients(masked_head, *given)), tile))
            except Exception as error:
                print(f"{kernel} {tile}: {type(error).__name__}")
        for taken, tile in sorted(times, key=lambda pair: pair[0])[:6]:
            print(f"{kernel:10}{taken:9.3f} ms  {tile}{'  (the plan)' if tile == getattr(usual, kernel) else ''}")
    kernels.plan = lambda device: usual


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=19 * 1024)
    parser.add_argument("--vocab", type=int, default=30_522)
    parser.add_argument("--embedding", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--forbid-target", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/masked_head.py needs a CUDA device, and torch sees none.")
    given = inputs(arguments)
    if not can_fuse(given[0][0]):
        sys.exit("the kernels do not run here (see can_fuse() in model/heads.py).")
    errors = check(*given)
    if arguments.sweep:
        sweep(given)
        return
    table = compare(arguments, given)
    ratios = {part: table["torch compiled"][part] / table["kernels"][part] for part in PARTS}
    print("kernels against torch compiled: " + ", ".join(f"{part} {r:.2f} x" for part, r in ratios.items()))
    machine.write("masked_head", {"shape": vars(arguments), "errors": errors, "table": table, "ratios": ratios})


if __name__ == "__main__":
    main()
