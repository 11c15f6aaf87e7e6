"""A whole layer forward in one Triton kernel, for widths up to 64: generators.

Sixty-four wide, a row of 128 tokens fits the registers of one program, and eight kernels that each read and write it would
wait for memory, or for each other, most of the time. What the way back needs is written as it passes by. The way back
itself, with its sums over columns at nine places, is faster in one kernel for small batches only (experiments/LOG.md).
"""

import triton
import triton.language as tl

from electra.kernels.layer_triton import (
    ANY_NUMBER,
    _attention_weights,
    _gelu,
    _is_kept,
    _normal_tail,
    _normalise,
)


@triton.jit
def _product(x, weight, bias):
    """x weightᵀ + bias, rounded like x."""
    shift = tl.load(bias)[None, :].to(tl.float32)
    return (tl.dot(x, tl.trans(tl.load(weight)), input_precision="ieee") + shift).to(x.dtype)


@triton.jit
def _add_norm(
    value, bias, residual, gamma, beta, seed, stream, token, column, scale, threshold, eps, HIDDEN: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """residual + dropout(value + bias), rounded, and its LayerNorm."""
    value += tl.load(bias + column)[None, :].to(tl.float32)
    if DROPS:
        value = tl.where(_is_kept(seed, stream, token, column, threshold), value * scale, 0.0)
    total = (value + residual.to(tl.float32)).to(residual.dtype)
    normal, _ = _normalise(total.to(tl.float32), column < HIDDEN, HIDDEN, eps)
    result = normal * tl.load(gamma + column)[None, :] + tl.load(beta + column)[None, :]
    return total, result.to(residual.dtype)


@triton.jit(do_not_specialize=ANY_NUMBER)
def layer_forward(
    x, is_real, seed, into_qkv, qkv_bias, into_output, output_bias, into_wide, wide_bias, into_narrow, narrow_bias,
    gamma, beta, last_gamma, last_beta, result, projected, mixed, first, middle, wide, second,
    seq, sharpness, eps, scale, threshold, attention_scale, attention_threshold,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SEQ: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr,
    DROPS: tl.constexpr, RESIDUAL_DROPS: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row. Names are those of layer_fused.layer and end_forward."""
    place, unit = tl.arange(0, SEQ), tl.arange(0, SIZE)
    column, part = tl.arange(0, HIDDEN), tl.arange(0, TILE)
    row = tl.program_id(0).to(tl.int64)
    token = row * seq + place
    inside = (place < seq)[:, None]
    here = token[:, None] * HIDDEN + column
    rows = tl.load(x + here, inside, 0.0)
    product = tl.zeros([SEQ, HIDDEN], tl.float32)
    for head in tl.static_range(HEADS):
        mine = head * SIZE + unit
        into_head = into_qkv + mine[:, None] * HIDDEN + column
        target = projected + token[:, None] * (3 * HIDDEN) + mine
        queries = _product(rows, into_head, qkv_bias + mine)
        tl.store(target, queries, inside)
        keys = _product(rows, into_head + HIDDEN * HIDDEN, qkv_bias + HIDDEN + mine)
        tl.store(target + HIDDEN, keys, inside)
        weights, row_total = _attention_weights(
            queries, keys, is_real, row, seq, sharpness, place, MASKED, FULL
        )
        values = _product(rows, into_head + 2 * HIDDEN * HIDDEN, qkv_bias + 2 * HIDDEN + mine)
        tl.store(target + 2 * HIDDEN, values, inside)
        weights = weights.to(rows.dtype)
        if DROPS:
            kept = _is_kept(seed, 0, (row * HEADS + head) * seq + place, place, attention_threshold)
            weights = tl.where(kept, weights, 0.0)
        mix = tl.dot(weights, values, input_precision="ieee") * (attention_scale / row_total)[:, None]
        mix = mix.to(rows.dtype)
        tl.store(mixed + token[:, None] * HIDDEN + mine, mix, inside)
        outward = tl.load(into_output + column[:, None] * HIDDEN + mine)
        product += tl.dot(mix, tl.trans(outward), input_precision="ieee")
    total, centre = _add_norm(
        product, output_bias, rows, gamma, beta, seed, 1, token, column, scale, threshold, eps, HIDDEN, RESIDUAL_DROPS
    )  # fmt: skip
    tl.store(first + here, total, inside)
    tl.store(middle + here, centre, inside)
    product = tl.zeros([SEQ, HIDDEN], tl.float32)
    for start in range(0, WIDE, TILE):
        some = start + part
        expanded = _product(centre, into_wide + some[:, None] * HIDDEN + column, wide_bias + some)
        tl.store(wide + token[:, None] * WIDE + some, expanded, inside)
        before = expanded.to(tl.float32)
        tail, _ = _normal_tail(before)
        back = tl.load(into_narrow + column[:, None] * WIDE + some)
        product += tl.dot(_gelu(before, tail).to(rows.dtype), tl.trans(back), input_precision="ieee")
    total, last = _add_norm(
        product, narrow_bias, centre, last_gamma, last_beta, seed, 2, token, column, scale, threshold, eps, HIDDEN,
        RESIDUAL_DROPS,
    )  # fmt: skip
    tl.store(second + here, total, inside)
    tl.store(result + here, last, inside)
