"""What stands between the matrix products of a layer, in Triton: attention, residual + LayerNorm, GELU, GeGLU.

At width 256 a layer is bound by memory, not by arithmetic, so each kernel reads what it needs once and writes what is
needed later once. Sums and exponentials are float32. Column sums (the gradients of biases and of LayerNorm's weights) are
by-products of the backward kernels: each program adds up its rows and writes one line of `partial`, which is summed once per
layer. No atomics: a run repeats bit for bit on the same device.

Dropout stores no mask. Whether an element is dropped is a hash of (seed, stream, row, column), which backward computes again.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SQRT_HALF = tl.constexpr(0.7071067811865476)
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
# Not specialised, because fine-tuning has batches of every size, and one kernel serves them all. (Numbers in a mask along a row
# must be specialised: Triton loads vectors only where it knows that the mask does not cut through them.)
ANY_NUMBER = ("rows", "batch", "seq", "threshold", "stream", "reach")


@triton.jit
def _hash_bits(x):
    """A bijection of 32 bits in which every input bit flips every output bit about half of the time."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _is_kept(seed, stream, row, column, threshold):
    """Whether dropout keeps each pair of a row and a column. Both get a key, and the product of the keys is the random number:
    one multiplication per element, whose upper bits, which decide the comparison, depend on all bits of both.
    `threshold` is the fraction to drop, times 2^32, as a signed number that stands for an unsigned one."""
    number = tl.load(seed)
    low, high = number.to(tl.uint32), (number >> 32).to(tl.uint32)
    of_row = _hash_bits(_hash_bits(_hash_bits(row.to(tl.uint32)) + low) ^ (high + stream))
    of_column = _hash_bits(column.to(tl.uint32) * 0x9E3779B9 + low) | 1
    return of_row[:, None] * of_column[None, :] >= threshold.to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=ANY_NUMBER)
def add_norm_forward_kernel(
    product, residual, gamma, beta, seed, total, kept, result,
    rows, hidden, eps, scale, threshold, stream,
    DROPS: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """total = residual + dropout(product);  result = LayerNorm(total), whose `beta` may be None. `kept`, if any, is the total
    in another precision."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HIDDEN)
    is_column = column < hidden
    here = (row < rows)[:, None] & is_column
    place = row[:, None].to(tl.int64) * hidden + column
    value = tl.load(product + place, here, 0.0).to(tl.float32)
    if DROPS:
        value = tl.where(_is_kept(seed, stream, row, column, threshold), value * scale, 0.0)
    value += tl.load(residual + place, here, 0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + place, rounded, here)
    if kept is not None:
        tl.store(kept + place, rounded, here)
    normal, _ = _normalise(rounded.to(tl.float32), is_column, hidden, eps)
    normal *= tl.load(gamma + column, is_column, 0.0)[None, :]
    if beta is not None:
        normal += tl.load(beta + column, is_column, 0.0)[None, :]
    tl.store(result + place, normal, here)


@triton.jit
def _normalise(value, is_column, hidden, eps):
    centred = tl.where(is_column[None, :], value - tl.sum(value, 1)[:, None] / hidden, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / hidden + eps)[:, None]
    return centred * inverse, inverse


@triton.jit(do_not_specialize=ANY_NUMBER)
def add_norm_backward_kernel(
    grad_output, total, past, gamma, seed, grad_residual, grad_product, partial,
    rows, hidden, columns, eps, scale, threshold, stream,
    BIASES: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of residual and product (one tensor if nothing is dropped), and the sums over rows for gamma and, with BIASES,
    for beta and the bias of the product, side by side in `partial`. `past`: the gradient that reaches the sum past the norm,
    in a pre-norm layer; None in a post-norm one."""
    column = tl.arange(0, HIDDEN)
    is_column = column < hidden
    weight = tl.load(gamma + column, is_column, 0.0)[None, :]
    gamma_sum = tl.zeros([ROWS, HIDDEN], tl.float32)
    beta_sum = tl.zeros([ROWS, HIDDEN], tl.float32)
    bias_sum = tl.zeros([ROWS, HIDDEN], tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & is_column
        place = row[:, None].to(tl.int64) * hidden + column
        gradient = tl.load(grad_output + place, here, 0.0).to(tl.float32)
        normal, inverse = _normalise(tl.load(total + place, here, 0.0).to(tl.float32), is_column, hidden, eps)
        gamma_sum += gradient * normal
        if BIASES:
            beta_sum += gradient
        # through the norm, which removes what would change the mean or the length of a row
        gradient *= weight
        along = tl.sum(gradient * normal, 1)[:, None] / hidden
        gradient = (gradient - tl.sum(gradient, 1)[:, None] / hidden - normal * along) * inverse
        if past is not None:
            gradient += tl.load(past + place, here, 0.0).to(tl.float32)
        tl.store(grad_residual + place, gradient, here)
        if DROPS:
            gradient = tl.where(_is_kept(seed, stream, row, column, threshold), gradient * scale, 0.0)
            tl.store(grad_product + place, gradient, here)
        if BIASES:
            bias_sum += tl.where(here, gradient, 0.0)
    line = partial + program * columns + column
    tl.store(line, tl.sum(gamma_sum, 0), is_column)
    if BIASES:
        tl.store(line + hidden, tl.sum(beta_sum, 0), is_column)
        tl.store(line + 2 * hidden, tl.sum(bias_sum, 0), is_column)


@triton.jit
def _gelu(x):
    """x Φ(x) and its derivative Φ(x) + x φ(x). `tail` is P(a standard normal number > |x|) by Abramowitz and Stegun 7.1.26, whose
    error is 1e-7."""
    bell = tl.exp2(x * x * (-0.5 * LOG2E))
    rise = 1.0 + (0.3275911 * SQRT_HALF) * tl.abs(x)
    t = tl.rsqrt(rise * rise)  # 1 / rise: a division takes five times the instructions
    tail = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
    tail = tail * t * bell
    return tl.maximum(x, 0.0) - tl.abs(x) * tail, tl.where(x < 0, tail, 1.0 - tail) + x * (bell * DENSITY)


@triton.jit(do_not_specialize=ANY_NUMBER)
def gelu_forward_kernel(before, after, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < count
    x = tl.load(before + place, here, 0.0).to(tl.float32)
    activated, _ = _gelu(x)
    tl.store(after + place, activated, here)


@triton.jit(do_not_specialize=ANY_NUMBER)
def gelu_backward_kernel(
    grad_output, before, grad_before, after, partial, rows, width, columns,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient and its sum over rows, and GELU itself once more, because it was not kept."""
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < width
    bias_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & is_column
        place = row[:, None].to(tl.int64) * width + column
        x = tl.load(before + place, here, 0.0).to(tl.float32)
        activated, derivative = _gelu(x)
        gradient = tl.load(grad_output + place, here, 0.0).to(tl.float32) * derivative
        bias_sum += gradient
        tl.store(grad_before + place, gradient, here)
        tl.store(after + place, activated, here)
    tl.store(partial + program * columns + column, tl.sum(bias_sum, 0), is_column)


@triton.jit(do_not_specialize=ANY_NUMBER)
def geglu_forward_kernel(wide, after, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """gelu(value) gate, of value and gate side by side."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    here = (row < rows) & (column < width)
    source = wide + row * (2 * width) + column
    value = tl.load(source, here, 0.0).to(tl.float32)
    gate = tl.load(source + width, here, 0.0).to(tl.float32)
    activated, _ = _gelu(value)
    tl.store(after + row * width + column, activated * gate, here)


@triton.jit(do_not_specialize=ANY_NUMBER)
def geglu_backward_kernel(grad_output, wide, grad_wide, after, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The gradients of value and gate, and the output of the forward pass once more, because it was not kept."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    here = (row < rows) & (column < width)
    place, narrow = row * (2 * width) + column, row * width + column
    value = tl.load(wide + place, here, 0.0).to(tl.float32)
    gate = tl.load(wide + place + width, here, 0.0).to(tl.float32)
    gradient = tl.load(grad_output + narrow, here, 0.0).to(tl.float32)
    activated, derivative = _gelu(value)
    tl.store(grad_wide + place, gradient * gate * derivative, here)
    tl.store(grad_wide + place + width, gradient * activated, here)
    tl.store(after + narrow, activated * gate, here)


@triton.jit
def _attention_weights(
    scores, is_real, row, seq, softmax_scale, place, reach,
    MASKED: tl.constexpr, FULL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """exp(scores), not yet divided by their sum, and that sum. FULL: the row fills its tile. LOCAL: tokens see those at most
    `reach` apart. A token that sees no real one has weights of zero."""
    seen = place < seq
    if MASKED:
        seen = seen & (tl.load(is_real + row * seq + place, seen, 0) != 0)
    if MASKED or not FULL:
        scores = tl.where(seen[None, :], scores, -float("inf"))
    if LOCAL:
        scores = tl.where(tl.abs(place[:, None] - place[None, :]) <= reach, scores, -float("inf"))
    softmax_scale *= LOG2E
    highest = tl.maximum(tl.max(scores, 1), -1e30)
    weights = tl.exp2(scores * softmax_scale - (highest * softmax_scale)[:, None])
    return weights, tl.maximum(tl.sum(weights, 1), 1e-30)


@triton.jit(do_not_specialize=ANY_NUMBER)
def attention_forward_kernel(
    projected, is_real, seed, attention_out,
    seq, softmax_scale, scale, threshold,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SEQ: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """softmax(query keyᵀ softmax_scale) value for one row and one head: the row is one tile, so nothing is computed twice."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, unit = tl.arange(0, SEQ), tl.arange(0, SIZE)
    inside = (place < seq)[:, None]
    hidden = HEADS * SIZE
    token = row * seq + place[:, None]
    source = projected + token * (3 * hidden) + head * SIZE + unit
    query, key = tl.load(source, inside, 0.0), tl.load(source + hidden, inside, 0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    weights, total = _attention_weights(scores, is_real, row, seq, softmax_scale, place, 0, MASKED, FULL, False)
    value = tl.load(source + 2 * hidden, inside, 0.0)
    weights = weights.to(value.dtype)
    if DROPS:
        kept = _is_kept(seed, 0, (row * HEADS + head) * seq + place, place, threshold)
        weights = tl.where(kept, weights, 0.0)
    result = tl.dot(weights, value, input_precision="ieee") * (scale / total)[:, None]
    tl.store(attention_out + token * hidden + head * SIZE + unit, result, inside)


@triton.jit
def _pairs_of_rows(x, SEQ: tl.constexpr, SIZE: tl.constexpr):
    """The sums of rows eight apart. In a tensor core's layout one thread holds both, so threads exchange nothing."""
    return tl.sum(tl.reshape(x, [SEQ // 16, 2, 8, SIZE]), 1)


@triton.jit(do_not_specialize=ANY_NUMBER)
def attention_backward_kernel(
    projected, is_real, seed, grad_output, grad_projected, partial,
    batch, seq, columns, softmax_scale, scale, threshold,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SEQ: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """The gradients of query, key and value, and the sums over all tokens of those of query and value (that of the keys is
    zero: what is added to all keys of a row changes no weight). The weights are computed again, so only the input of the
    forward pass is needed."""
    program, programs, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    place, unit = tl.arange(0, SEQ), tl.arange(0, SIZE)
    inside = (place < seq)[:, None]
    hidden = HEADS * SIZE
    query_sum = tl.zeros([SEQ // 16, 8, SIZE], tl.float32)
    value_sum = tl.zeros([SEQ // 16, 8, SIZE], tl.float32)
    for number in range(program, batch, programs):
        row = tl.cast(number, tl.int64)
        token = row * seq + place[:, None]
        source = projected + token * (3 * hidden) + head * SIZE + unit
        query, key = tl.load(source, inside, 0.0), tl.load(source + hidden, inside, 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        weights, total = _attention_weights(scores, is_real, row, seq, softmax_scale, place, 0, MASKED, FULL, False)
        weights *= (1.0 / total)[:, None]
        value = tl.load(source + 2 * hidden, inside, 0.0)
        grad_out = tl.load(grad_output + token * hidden + head * SIZE + unit, inside, 0.0)
        used = weights.to(value.dtype)
        if DROPS:
            kept = _is_kept(seed, 0, (row * HEADS + head) * seq + place, place, threshold)
            used = tl.where(kept, used, 0.0)
        # values: mixed by the same weights, transposed
        target = grad_projected + token * (3 * hidden) + head * SIZE + unit
        grad_value = tl.dot(tl.trans(used), grad_out, input_precision="ieee") * scale
        tl.store(target + 2 * hidden, grad_value, inside)
        value_sum += _pairs_of_rows(grad_value, SEQ, SIZE)
        # through the softmax to the scores, and from them to queries and keys
        grad_scores = tl.dot(grad_out, tl.trans(value), input_precision="ieee")
        if DROPS:
            grad_scores = tl.where(kept, grad_scores, 0.0)
        mean = tl.sum(weights * grad_scores, 1) * (softmax_scale * scale)
        grad_scores = (weights * (grad_scores * (softmax_scale * scale) - mean[:, None])).to(key.dtype)
        grad_query = tl.dot(grad_scores, key, input_precision="ieee")
        tl.store(target, grad_query, inside)
        query_sum += _pairs_of_rows(grad_query, SEQ, SIZE)
        grad_key = tl.dot(tl.trans(grad_scores), query, input_precision="ieee")
        tl.store(target + hidden, grad_key, inside)
    line = partial + program * columns + head * SIZE + unit
    tl.store(line, tl.sum(tl.sum(query_sum, 1), 0))
    tl.store(line + 2 * hidden, tl.sum(tl.sum(value_sum, 1), 0))


@triton.jit(do_not_specialize=ANY_NUMBER)
def sum_columns_kernel(partial, total, rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of each column."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < columns
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        sums += tl.load(partial + row[:, None] * columns + column, (row < rows)[:, None] & is_column, 0.0)
    tl.store(total + column, tl.sum(sums, 0), is_column)


@triton.jit
def _rotated(source, inside, cos, sin, HALF: tl.constexpr):
    """Queries or keys, rotated by their positions, in two halves: a unit is rotated with the one half a head further."""
    first = tl.load(source, inside, 0.0)
    second = tl.load(source + HALF, inside, 0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(first.dtype)


@triton.jit
def _store_rotated_back(target, x, y, cos, sin, inside, HALF: tl.constexpr):
    """Gradients of both halves of a head, before the rotation."""
    half = tl.arange(0, HALF)
    tl.store(target + half, x * cos + y * sin, inside)
    tl.store(target + HALF + half, y * cos - x * sin, inside)


@triton.jit
def _rotated_scores(source, hidden, inside, cos, sin, HALF: tl.constexpr):
    """Queries and keys in halves, and the scores of every query with every key: the sums of two products."""
    query1, query2 = _rotated(source, inside, cos, sin, HALF)
    key1, key2 = _rotated(source + hidden, inside, cos, sin, HALF)
    scores = tl.dot(query1, tl.trans(key1), input_precision="ieee")
    return query1, query2, key1, key2, tl.dot(query2, tl.trans(key2), scores, input_precision="ieee")


@triton.jit
def _angles(angles, place, inside, seq, HALF: tl.constexpr):
    at = angles + place[:, None] * HALF + tl.arange(0, HALF)
    return tl.load(at, inside, 0.0), tl.load(at + seq * HALF, inside, 0.0)


@triton.jit(do_not_specialize=ANY_NUMBER)
def rotary_attention_forward_kernel(
    projected, is_real, angles, attention_out, batch, seq, softmax_scale, reach,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, SEQ: tl.constexpr, MASKED: tl.constexpr,
    FULL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """As attention_forward_kernel, with rotary positions. Queries and keys come in halves, so that rotating them moves nothing
    between threads. A program handles many rows, for which it loads the angles once."""
    program, programs, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    place, unit, half = tl.arange(0, SEQ), tl.arange(0, SIZE), tl.arange(0, HALF)
    inside = (place < seq)[:, None]
    hidden = HEADS * SIZE
    cos, sin = _angles(angles, place, inside, seq, HALF)
    for number in range(program, batch, programs):
        row = tl.cast(number, tl.int64)
        token = row * seq + place[:, None]
        source = projected + token * (3 * hidden) + head * SIZE
        _, _, _, _, scores = _rotated_scores(source + half, hidden, inside, cos, sin, HALF)
        weights, total = _attention_weights(scores, is_real, row, seq, softmax_scale, place, reach, MASKED, FULL, LOCAL)
        value = tl.load(source + 2 * hidden + unit, inside, 0.0)
        result = tl.dot(weights.to(value.dtype), value, input_precision="ieee") * (1.0 / total)[:, None]
        tl.store(attention_out + token * hidden + head * SIZE + unit, result, inside)


@triton.jit(do_not_specialize=ANY_NUMBER)
def rotary_attention_backward_kernel(
    projected, is_real, angles, grad_output, grad_projected, batch, seq, softmax_scale, reach,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, SEQ: tl.constexpr, MASKED: tl.constexpr,
    FULL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """The gradients of query, key and value before they were rotated. The weights are computed again."""
    program, programs, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    place, unit, half = tl.arange(0, SEQ), tl.arange(0, SIZE), tl.arange(0, HALF)
    inside = (place < seq)[:, None]
    hidden = HEADS * SIZE
    cos, sin = _angles(angles, place, inside, seq, HALF)
    for number in range(program, batch, programs):
        row = tl.cast(number, tl.int64)
        token = row * seq + place[:, None]
        source = projected + token * (3 * hidden) + head * SIZE
        query1, query2, key1, key2, scores = _rotated_scores(source + half, hidden, inside, cos, sin, HALF)
        weights, total = _attention_weights(scores, is_real, row, seq, softmax_scale, place, reach, MASKED, FULL, LOCAL)
        weights *= (1.0 / total)[:, None]
        value = tl.load(source + 2 * hidden + unit, inside, 0.0)
        grad_out = tl.load(grad_output + token * hidden + head * SIZE + unit, inside, 0.0)
        target = grad_projected + token * (3 * hidden) + head * SIZE
        grad_value = tl.dot(tl.trans(weights.to(value.dtype)), grad_out, input_precision="ieee")
        tl.store(target + 2 * hidden + unit, grad_value, inside)
        # through the softmax to the scores, and from them to queries and keys, which are rotated back
        grad_scores = tl.dot(grad_out, tl.trans(value), input_precision="ieee")
        mean = tl.sum(weights * grad_scores, 1) * softmax_scale
        grad_scores = (weights * (grad_scores * softmax_scale - mean[:, None])).to(value.dtype)
        x = tl.dot(grad_scores, key1, input_precision="ieee")
        y = tl.dot(grad_scores, key2, input_precision="ieee")
        _store_rotated_back(target, x, y, cos, sin, inside, HALF)
        grad_scores = tl.trans(grad_scores)
        x = tl.dot(grad_scores, query1, input_precision="ieee")
        y = tl.dot(grad_scores, query2, input_precision="ieee")
        _store_rotated_back(target + hidden, x, y, cos, sin, inside, HALF)


@triton.jit
def _long_scores(query1, query2, key1, key2, is_real, row, seq, place, other, reach, MASKED: tl.constexpr, LOCAL: tl.constexpr):  # fmt: skip
    """Scores of a tile of queries at `place` with a tile of keys at `other`; those that are not seen are minus infinity."""
    scores = tl.dot(query1, tl.trans(key1), input_precision="ieee")
    scores = tl.dot(query2, tl.trans(key2), scores, input_precision="ieee")
    seen = other < seq
    if MASKED:
        seen = seen & (tl.load(is_real + row * seq + other, seen, 0) != 0)
    seen = seen[None, :] & (place < seq)[:, None]
    if LOCAL:
        seen = seen & (tl.abs(place[:, None] - other[None, :]) <= reach)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _tiles_in_reach(start, seq, reach, TILE: tl.constexpr, LOCAL: tl.constexpr):
    """The range of the tiles that the tile at `start` sees, and that see it."""
    first, last = 0, seq
    if LOCAL:
        first = tl.maximum(start - reach, 0) // TILE * TILE
        last = tl.minimum(start + TILE + reach, seq)
    return first, last


@triton.jit(do_not_specialize=ANY_NUMBER)
def long_attention_forward_kernel(
    projected, is_real, angles, attention_out, log_sums, seq, softmax_scale, reach,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """As rotary_attention_forward_kernel, for rows of any length: a tile of queries meets the keys tile by tile, with the sum of
    weights so far and the highest score so far. `log_sums`: the logarithm (to base 2) of each token's sum, for backward."""
    start, head, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    place, unit, half = start + tl.arange(0, TILE), tl.arange(0, SIZE), tl.arange(0, HALF)
    inside = (place < seq)[:, None]
    hidden = HEADS * SIZE
    rows = projected + row * seq * (3 * hidden) + head * SIZE
    cos, sin = _angles(angles, place, inside, seq, HALF)
    query1, query2 = _rotated(rows + place[:, None] * (3 * hidden) + half, inside, cos, sin, HALF)
    softmax_scale *= LOG2E
    highest = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    result = tl.zeros([TILE, SIZE], tl.float32)
    first, last = _tiles_in_reach(start, seq, reach, TILE, LOCAL)
    for at in range(first, last, TILE):
        other = at + tl.arange(0, TILE)
        there = (other < seq)[:, None]
        source = rows + other[:, None] * (3 * hidden)
        cos, sin = _angles(angles, other, there, seq, HALF)
        key1, key2 = _rotated(source + hidden + half, there, cos, sin, HALF)
        scores = _long_scores(query1, query2, key1, key2, is_real, row, seq, place, other, reach, MASKED, LOCAL)
        higher = tl.maximum(highest, tl.max(scores, 1) * softmax_scale)
        weights = tl.exp2(scores * softmax_scale - higher[:, None])
        fade = tl.exp2(highest - higher)
        value = tl.load(source + 2 * hidden + unit, there, 0.0)
        total = total * fade + tl.sum(weights, 1)
        result = tl.dot(weights.to(value.dtype), value, result * fade[:, None], input_precision="ieee")
        highest = higher
    total = tl.maximum(total, 1e-30)
    tl.store(log_sums + (row * HEADS + head) * seq + place, highest + tl.log2(total), place < seq)
    target = attention_out + (row * seq + place[:, None]) * hidden + head * SIZE + unit
    tl.store(target, result * (1.0 / total)[:, None], inside)


@triton.jit
def _long_gradient(scores, log_sum, grad_out, out, value, softmax_scale):
    """The weights of a tile, and the gradient of its scores."""
    weights = tl.exp2(scores * (softmax_scale * LOG2E) - log_sum[:, None])
    mean = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    grad_weights = tl.dot(grad_out, tl.trans(value), input_precision="ieee")
    return weights.to(value.dtype), (weights * (grad_weights - mean[:, None]) * softmax_scale).to(value.dtype)


@triton.jit(do_not_specialize=ANY_NUMBER)
def long_attention_backward_kernel(
    projected, is_real, angles, attention_out, log_sums, grad_output, grad_projected, seq, softmax_scale, reach,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, from all queries that see them; then those of its queries, from all keys
    that they see. Every weight is computed twice, so that no two programs add to the same gradient."""
    start, head, row = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    place, unit, half = start + tl.arange(0, TILE), tl.arange(0, SIZE), tl.arange(0, HALF)
    inside = (place < seq)[:, None]
    hidden = HEADS * SIZE
    rows = projected + row * seq * (3 * hidden) + head * SIZE
    outs = row * seq * hidden + head * SIZE + unit
    log_sums += (row * HEADS + head) * seq
    source = rows + place[:, None] * (3 * hidden)
    target = grad_projected + (row * seq + place[:, None]) * (3 * hidden) + head * SIZE
    own_cos, own_sin = _angles(angles, place, inside, seq, HALF)
    key1, key2 = _rotated(source + hidden + half, inside, own_cos, own_sin, HALF)
    value = tl.load(source + 2 * hidden + unit, inside, 0.0)
    first, last = _tiles_in_reach(start, seq, reach, TILE, LOCAL)
    # keys and values
    grad_value = tl.zeros([TILE, SIZE], tl.float32)
    x, y = tl.zeros([TILE, HALF], tl.float32), tl.zeros([TILE, HALF], tl.float32)
    for at in range(first, last, TILE):
        other = at + tl.arange(0, TILE)
        there = (other < seq)[:, None]
        cos, sin = _angles(angles, other, there, seq, HALF)
        query1, query2 = _rotated(rows + other[:, None] * (3 * hidden) + half, there, cos, sin, HALF)
        scores = _long_scores(query1, query2, key1, key2, is_real, row, seq, other, place, reach, MASKED, LOCAL)
        grad_out = tl.load(grad_output + outs + other[:, None] * hidden, there, 0.0)
        out = tl.load(attention_out + outs + other[:, None] * hidden, there, 0.0)
        log_sum = tl.load(log_sums + other, other < seq, 0.0)
        weights, grad_scores = _long_gradient(scores, log_sum, grad_out, out, value, softmax_scale)
        grad_value = tl.dot(tl.trans(weights), grad_out, grad_value, input_precision="ieee")
        grad_scores = tl.trans(grad_scores)
        x = tl.dot(grad_scores, query1, x, input_precision="ieee")
        y = tl.dot(grad_scores, query2, y, input_precision="ieee")
    tl.store(target + 2 * hidden + unit, grad_value, inside)
    _store_rotated_back(target + hidden, x, y, own_cos, own_sin, inside, HALF)
    # queries
    query1, query2 = _rotated(source + half, inside, own_cos, own_sin, HALF)
    grad_out = tl.load(grad_output + outs + place[:, None] * hidden, inside, 0.0)
    out = tl.load(attention_out + outs + place[:, None] * hidden, inside, 0.0)
    log_sum = tl.load(log_sums + place, place < seq, 0.0)
    x, y = tl.zeros([TILE, HALF], tl.float32), tl.zeros([TILE, HALF], tl.float32)
    for at in range(first, last, TILE):
        other = at + tl.arange(0, TILE)
        there = (other < seq)[:, None]
        cos, sin = _angles(angles, other, there, seq, HALF)
        key1, key2 = _rotated(rows + other[:, None] * (3 * hidden) + hidden + half, there, cos, sin, HALF)
        value = tl.load(rows + other[:, None] * (3 * hidden) + 2 * hidden + unit, there, 0.0)
        scores = _long_scores(query1, query2, key1, key2, is_real, row, seq, place, other, reach, MASKED, LOCAL)
        _, grad_scores = _long_gradient(scores, log_sum, grad_out, out, value, softmax_scale)
        x = tl.dot(grad_scores, key1, x, input_precision="ieee")
        y = tl.dot(grad_scores, key2, y, input_precision="ieee")
    _store_rotated_back(target, x, y, own_cos, own_sin, inside, HALF)
