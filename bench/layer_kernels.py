"""The kernels of a fused layer, one by one, beside the time that their bytes take: what is left to gain, and where.

    python bench/layer_kernels.py [--tokens 131072] [--hidden 256] [--dropout 0.1] [--sweep]

Needs a CUDA device. bfloat16, rows of 128. "floor" is every input read once and every output written once at the
bandwidth that the device reaches in the simplest of kernels (measured here), for matrix products also their arithmetic
at the peak that trial.py knows as measured. Launches are captured, so the host is not in the numbers. First one layer is checked
against float64. `--sweep` times other tiles and warps: LAUNCH in kernels/layer/launch.py is fixed from it.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import machine
from electra.kernels.layer import fused_layers, launch, weight_gradient
from electra.model.electra import ElectraEncoderSettings, ElectraLayer
from electra.pretraining.trial import MEASURED, known_device

SEQ = 128
HALF = torch.bfloat16
CHOICES: dict[str, list[tuple[int, ...]]] = {
    "norm_forward": [(2, 2), (4, 4), (8, 4), (8, 8), (16, 8)],
    "norm_backward": [(2, 2, 4), (4, 2, 2), (4, 2, 3), (4, 2, 4), (4, 4, 4), (8, 4, 3)],
    "gelu_forward": [(1024, 4), (2048, 4), (2048, 8), (4096, 8)],
    "gelu_backward": [(4, 256, 4, 2), (4, 256, 4, 3), (8, 256, 4, 3), (16, 256, 8, 1), (16, 256, 8, 3)],
    "attention_forward": [(4, 1), (8, 1), (8, 2)],
    "attention_backward": [(4, 1), (4, 2), (8, 1), (8, 2), (8, 3)],
    "sum_columns": [(16, 4), (32, 4), (32, 8), (64, 4)],
}


def milliseconds(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(run, rep=20)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=HALF)


def bandwidth() -> float:
    """Bytes a second, read and written, of a large sign change: the driver's copies are a third slower than kernels."""
    source = torch.empty(2**29, dtype=HALF, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: torch.neg(source, out=target)) * 1000


def check(hidden: int) -> float:
    """The largest error of a layer's result and gradients, relative to each one's norm."""
    settings = ElectraEncoderSettings(hidden=hidden, heads=max(1, hidden // 64), intermediate=4 * hidden)
    settings = settings.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
    layer = ElectraLayer(settings).cuda()
    x, upstream = normal(16, SEQ, hidden), normal(16, SEQ, hidden)
    leaves = [p.detach().to(HALF).float().requires_grad_() for p in layer.in_order()]
    mine = x.clone().requires_grad_()
    found = fused_layers(mine, None, [leaves], settings.heads, 0.0, 0.0, 1e-12)
    found.backward(upstream)
    for parameter, leaf in zip(layer.in_order(), leaves, strict=True):
        parameter.data = leaf.detach().double()
    theirs = x.double().requires_grad_()
    expected = layer(theirs, None)
    expected.backward(upstream.double())
    pairs = [(found, expected), (mine.grad, theirs.grad)]
    pairs += [(leaf.grad, p.grad) for leaf, p in zip(leaves, layer.in_order(), strict=True)]
    errors = [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]
    if not max(errors) < 2e-2:
        sys.exit(f"the layer is wrong: relative errors {errors}")
    return max(errors)


def kernels(tokens: int, hidden: int, dropout: float) -> dict[str, tuple[str | None, float, Callable[[], Any]]]:
    """By name: the launch that it has, numbers a token that it must read and write, and a call."""
    wide, heads, batch = 4 * hidden, max(1, hidden // 64), tokens // SEQ
    projected, product, residual, upstream = (normal(tokens, w) for w in (3 * hidden, hidden, hidden, hidden))
    before, above, seed = normal(tokens, wide), normal(tokens, wide), torch.tensor(7, device="cuda")
    gamma, beta = torch.ones(hidden, device="cuda"), torch.zeros(hidden, device="cuda")
    sums = launch.ColumnSums(torch.device("cuda"), 3 * hidden, wide, 3 * hidden, 3 * hidden)
    norms, wides, *_ = sums.parts
    drops = dropout > 0
    attend = batch, heads, dropout
    return {
        "norm forward": (
            "norm_forward",
            4 * hidden,
            lambda: launch.add_norm(product, residual, gamma, beta, seed, 1, dropout, 1e-12),
        ),
        "norm backward": (
            "norm_backward",
            (3 + drops) * hidden,
            lambda: launch.add_norm_backward(upstream, product, gamma, seed, 1, dropout, 1e-12, norms),
        ),
        "gelu forward": ("gelu_forward", 2 * wide, lambda: launch.gelu(before)),
        "gelu backward": ("gelu_backward", 4 * wide, lambda: launch.gelu_backward(above, before, wides)),
        "attention forward": (
            "attention_forward",
            4 * hidden,
            lambda: launch.attention(projected, None, seed, *attend),
        ),
        "attention backward": (
            "attention_backward",
            7 * hidden,
            lambda: launch.attention_backward(projected, None, seed, upstream, *attend, norms),
        ),
        "column sums": ("sum_columns", sums.partial.numel() / tokens, sums.total),
    }


def products(tokens: int, hidden: int) -> dict[str, tuple[float, float, Callable[[], Any]]]:
    """By name: floating-point operations, numbers to read and write, and a call."""
    wide = 4 * hidden
    narrow, other, broad = normal(tokens, hidden), normal(tokens, hidden), normal(tokens, wide)
    into_wide, bias = normal(wide, hidden), normal(wide)
    work, moved = 2 * tokens * hidden * wide, tokens * (hidden + wide)
    return {
        "expand": (work, moved, lambda: torch.addmm(bias, narrow, into_wide.t())),
        "its gradient, added": (work, moved + tokens * hidden, lambda: other.addmm_(broad, into_wide)),
        "its weights' gradient": (work, moved, lambda: weight_gradient(broad, narrow)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/layer_kernels.py needs a CUDA device, and torch sees none.")
    error, speed = check(arguments.hidden), bandwidth()
    peak = 1e12 * MEASURED.get(known_device(torch.cuda.get_device_name()), 0.0)
    print(f"a layer against float64: within {error:.1e}; a kernel moves {speed / 1e12:.2f} TB/s")
    table: dict[str, dict[str, Any]] = {}
    print(f"{'':24}{'us':>9}{'floor':>9}")
    calls = kernels(arguments.tokens, arguments.hidden, arguments.dropout)
    for name, (field, numbers, run) in calls.items():
        each = 4 if name == "column sums" else 2
        table[name] = {"us": 1000 * milliseconds(run), "floor_us": 1e6 * each * numbers * arguments.tokens / speed}
        if arguments.sweep and field:
            usual = launch.LAUNCH
            for choice in CHOICES[field]:
                launch.LAUNCH = usual._replace(**{field: choice})
                table[name][str(choice)] = 1000 * milliseconds(run)
            launch.LAUNCH = usual
    for name, (work, numbers, run) in products(arguments.tokens, arguments.hidden).items():
        taken, least = milliseconds(run), max(2 * numbers / speed, work / peak if peak else 0.0)
        table[name] = {"us": 1000 * taken, "floor_us": 1e6 * least, "tflops": work / taken / 1e9}
    for name, row in table.items():
        others = {key: value for key, value in row.items() if key.startswith("(")}
        best = "   ".join(f"{key} {value:.1f}" for key, value in sorted(others.items(), key=lambda p: p[1])[:4])
        tflops = f"{row['tflops']:7.0f} TFLOP/s" if "tflops" in row else ""
        print(f"{name:24}{row['us']:9.1f}{row['floor_us']:9.1f}{tflops}   {best}")
    machine.write(
        "layer_kernels", {"shape": vars(arguments), "error": error, "bytes_per_second": speed, "table": table}
    )


if __name__ == "__main__":
    main()
