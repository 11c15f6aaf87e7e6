"""model.heads.masked_head on the GPU: tiles, launches, and the two operators that autograd and torch.compile see."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from electra.kernels import has_shared_memory, processors
from electra.kernels.masked_head.triton import backward_kernel, finish_kernel, forward_kernel

TILE = 128  # tokens of the vocabulary: a block of the reference's sampling, so that both draw the same
MOST_SPLITS = 16


class LaunchPlan(NamedTuple):
    """The device's multiprocessors, and for each kernel its tile of rows, warps, and stages (tiles of words in flight)."""

    processors: int
    forward: dict[str, int]
    finish: dict[str, int]
    backward: dict[str, int]


def plan(device: torch.device) -> LaunchPlan:
    """Three stages if the shared memory holds them (A100, H100 and above), else two. `finish` takes single rows, since each
    row has a block of its own; Triton's interpreter, on the CPU, runs programs one by one, so they are larger there."""
    stages, rows = (3 if has_shared_memory(device) else 2, 1) if device.type == "cuda" else (1, 64)
    forward, finish = ({"ROWS": tile, "num_warps": 4, "num_stages": 1} for tile in (64, rows))
    return LaunchPlan(processors(device), forward, finish, {"ROWS": 64, "num_warps": 8, "num_stages": stages})


def splits_of(row_tiles: int, processors: int, blocks: int) -> int:
    """The number of parts of the vocabulary with which the programs fill the device in whole rounds: the fewest that keep
    nine tenths of it busy, or else the best."""
    most = min(MOST_SPLITS, blocks)

    def busy(splits: int) -> float:
        programs = row_tiles * splits
        return programs / (-(-programs // processors) * processors)

    return next((n for n in range(1, most) if busy(n) >= 0.9), max(range(1, most + 1), key=busy))


def padded(embedding: int) -> int:
    return max(16, next_power_of_2(embedding))


def forward(
    states: Tensor, words: Tensor, bias: Tensor, targets: Tensor, noise: Tensor, temperature: Tensor | None,
    forbid_target: bool, needs_grad: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """log_likelihood, sampled, is_best, log_total, and grad_states: d log_likelihood / d states."""
    (rows, embedding), vocab = states.shape, len(words)
    states, words, bias = states.to(dtype).contiguous(), words.to(dtype).contiguous(), bias.contiguous()
    targets, noise = targets.contiguous(), noise.contiguous()
    chosen, blocks = plan(states.device), cdiv(vocab, TILE)
    row_tiles = cdiv(rows, chosen.forward["ROWS"])
    splits = splits_of(row_tiles, chosen.processors, blocks)

    new = partial(torch.empty, dtype=torch.float32, device=states.device)
    largest, total, block_mass = new(splits, rows), new(splits, rows), new(blocks, rows)
    log_likelihood, log_total = new(rows), new(rows)
    sampled, is_best = torch.empty_like(targets), torch.empty_like(targets, dtype=torch.bool)
    split_words, grad_states = (new(splits, rows, embedding), new(rows, embedding)) if needs_grad else (new(0), new(0))
    common = {
        "TILE": TILE,
        "EMBEDDING": padded(embedding),
        "TEMPERED": temperature is not None,
        "NEEDS_GRAD": needs_grad,
    }
    forward_kernel[(row_tiles, splits)](
        states, words, bias, targets, temperature, largest, total, block_mass, split_words,
        rows, vocab, embedding, blocks, cdiv(blocks, splits),
        **common, **chosen.forward,
    )  # fmt: skip
    finish_kernel[(cdiv(rows, chosen.finish["ROWS"]),)](
        states, words, bias, targets, noise, temperature, largest, total, block_mass, split_words,
        log_likelihood, sampled, is_best, log_total, grad_states,
        rows, vocab, embedding, blocks, splits,
        BLOCKS=next_power_of_2(blocks), SPLITS=next_power_of_2(splits), FORBID_TARGET=forbid_target,
        **common, **chosen.finish,
    )  # fmt: skip
    return log_likelihood, sampled, is_best, log_total, grad_states


def backward(
    states: Tensor, words: Tensor, bias: Tensor, targets: Tensor, log_total: Tensor, grad_output: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of words and bias."""
    (rows, embedding), vocab = states.shape, len(words)
    grad_words, grad_bias = words.new_empty(words.shape), bias.new_empty(bias.shape)
    backward_kernel[(cdiv(vocab, TILE),)](
        states.to(dtype).contiguous(), words.to(dtype).contiguous(), bias.contiguous(), targets.contiguous(),
        log_total, grad_output.contiguous(), grad_words, grad_bias,
        rows, vocab, embedding,
        TILE=TILE, EMBEDDING=padded(embedding), **plan(states.device).backward,
    )  # fmt: skip
    return grad_words, grad_bias


def forward_shapes(
    states: Tensor, words: Any, bias: Any, targets: Tensor, noise: Any, temperature: Any, forbid_target: Any,
    needs_grad: bool, dtype: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    new = partial(states.new_empty, dtype=torch.float32)
    rows = len(states)
    sampled, is_best = targets.new_empty(rows), targets.new_empty(rows, dtype=torch.bool)
    return new(rows), sampled, is_best, new(rows), new(states.shape if needs_grad else 0)


def backward_shapes(states: Any, words: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return words.new_empty(words.shape), bias.new_empty(bias.shape)


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    states, words, bias, targets, *_, dtype = inputs
    *_, log_total, grad_states = output
    ctx.save_for_backward(states, words, bias, targets, log_total, grad_states)
    ctx.dtype = dtype


def differentiate(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    states, words, bias, targets, log_total, state_gradients = ctx.saved_tensors
    grad_states = grad_words = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_states = (grad_output[:, None] * state_gradients).to(states.dtype)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        grad_words, grad_bias = _backward_op(states, words, bias, targets, log_total, grad_output, ctx.dtype)
    return grad_states, grad_words, grad_bias, None, None, None, None, None, None


# Custom operators: torch.compile takes them as they are and does not trace into them.
_forward_op = torch.library.custom_op("electra::masked_head", forward, mutates_args=())
_forward_op.register_fake(forward_shapes)
_forward_op.register_autograd(differentiate, setup_context=remember)
_backward_op = torch.library.custom_op("electra::masked_head_backward", backward, mutates_args=())
_backward_op.register_fake(backward_shapes)


def fused_head(
    states: Tensor, words: Tensor, bias: Tensor, targets: Tensor, noise: Tensor, temperature: float | Tensor,
    forbid_target: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Log-likelihood, sampled token and `is_best` of each row. Products are of `dtype`; sums, exponentials and the log-likelihood are
    float32; gradients have their input's type."""
    if isinstance(temperature, Tensor):
        scalar: Tensor | None = temperature.float()
    else:
        scalar = None if temperature == 1 else torch.full((), float(temperature), device=states.device)
    needs_grad = torch.is_grad_enabled() and states.requires_grad
    outputs = _forward_op(states, words, bias, targets, noise, scalar, forbid_target, needs_grad, dtype)
    return outputs[0], outputs[1], outputs[2]
