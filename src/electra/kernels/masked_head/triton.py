"""masked_head in Triton: the logits exist one tile at a time, in registers, and are never stored.

**Forward** is attention with the states as queries and the word table as both keys and values. One pass over tiles of
128 tokens keeps, for each row, the largest logit and the sum of exponentials *of all tokens but the target*, and

    word_sum = sum over v != target of p_v words_v,

which is all that the gradient in the states needs besides the target's own word:

    d log p(target) / d state = (1 - p(target)) words_target - word_sum.

So the states' gradient costs no second pass over the vocabulary. Leaving the target out keeps both terms exact where a
confident row would otherwise subtract nearly equal numbers, and makes log p = -softplus(log-sum of the others - own logit),
which cannot exceed zero. It also gives `is_best` and `forbid_target` for free.

**Sampling** is exactly the reference's: two uniform numbers per row, a block of 128 tokens by the blocks' sums,
then a token within the block. A tile is a block: the pass stores the logarithm of each tile's sum (1/64 of the memory of
bfloat16 logits), `finish_kernel` inverts the distribution over blocks and recomputes the one block that it chose. Not used:
  - Gumbel noise for each logit: a counter-based random number and two logarithms for each of half a billion logits, by
    count of operations several times what the product takes on tensor cores; and 24-bit uniform numbers get the
    probability of rare tokens wrong (at p = 1e-8 by a factor of three), since the winner sits where -log(-log u) is
    coarsest.
  - A reservoir over tiles (keep tile t with probability s_t / (s_1 + … + s_t)): exact, but needs fresh numbers for each
    tile, and its draws depend on the order of the tiles and on how the vocabulary is split among programs.
Our method draws the same as the reference from the same noise, whatever the tiles of rows and the splits are.

**Backward** recomputes the logits once, for the gradients of words and bias: one program per tile of tokens walks over all
rows. No atomics anywhere; sums are in float32 and in a fixed order, so a run repeats bit for bit on the same device.
Tiles are fixed rather than tuned at run time for the same reason.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # below any logit, and unlike -inf it can be subtracted from itself


@triton.jit
def forward_kernel(
    states, words, bias, targets, temperature, largest, total, block_mass, split_words,
    rows, vocab, embedding, blocks, blocks_per_split,
    ROWS: tl.constexpr, TILE: tl.constexpr, EMBEDDING: tl.constexpr,
    TEMPERED: tl.constexpr, NEEDS_GRAD: tl.constexpr,
):  # fmt: skip
    """One tile of rows against one split of the vocabulary."""
    split = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EMBEDDING)
    is_row, is_column = row < rows, column < embedding
    state = tl.load(states + row[:, None] * embedding + column, is_row[:, None] & is_column, 0.0)
    target = tl.load(targets + row, is_row, -1).to(tl.int32)
    if TEMPERED:
        inverse_temperature = 1.0 / tl.load(temperature)
    high = tl.full([ROWS], LOWEST, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    word_sum = tl.zeros([ROWS, EMBEDDING], tl.float32)
    first = split * blocks_per_split
    for block in range(first, tl.minimum(first + blocks_per_split, blocks)):
        token = block * TILE + tl.arange(0, TILE)
        is_token = token < vocab
        word = tl.load(words + token[:, None] * embedding + column, is_token[:, None] & is_column, 0.0)
        shift = tl.load(bias + token, is_token, -float("inf")).to(tl.float32)
        logits = tl.dot(state, word.T, input_precision="ieee") + shift
        logits = tl.where(token == target[:, None], -float("inf"), logits)
        # online softmax: the sums so far are rescaled to the new largest logit
        higher = tl.maximum(high, tl.max(logits, 1))
        weights = tl.exp(logits - higher[:, None])
        weight = tl.sum(weights, 1)
        shrink = tl.exp(high - higher)
        mass = mass * shrink + weight
        if NEEDS_GRAD:
            word_sum = tl.dot(weights.to(word.dtype), word, word_sum * shrink[:, None], input_precision="ieee")
        # the block's mass at the temperature of sampling
        if TEMPERED:
            weight = tl.sum(tl.exp((logits - higher[:, None]) * inverse_temperature), 1)
            tl.store(block_mass + block * rows + row, tl.log(weight) + higher * inverse_temperature, is_row)
        else:
            tl.store(block_mass + block * rows + row, tl.log(weight) + higher, is_row)
        high = higher
    tl.store(largest + split * rows + row, high, is_row)
    tl.store(total + split * rows + row, mass, is_row)
    if NEEDS_GRAD:
        place = split_words + (split * rows + row[:, None]) * embedding + column
        tl.store(place, word_sum, is_row[:, None] & is_column)


@triton.jit
def _first_above(weights, noise):
    """The reference's inverse_cdf. Sums of a parallel scan may shrink in the last bit, so zero weights are ruled out."""
    index = tl.arange(0, weights.shape[1])
    cumulative = tl.cumsum(weights.to(tl.float64), 1)
    goal = noise.to(tl.float64) * tl.max(cumulative, 1)
    above = (cumulative > goal[:, None]) & (weights > 0)
    first = tl.min(tl.where(above, index, weights.shape[1]), 1)
    return tl.minimum(first, tl.max(tl.where(weights > 0, index, 0), 1))


@triton.jit
def _softmax_weights(logits):
    return tl.exp(logits - tl.max(logits, 1)[:, None])


@triton.jit
def finish_kernel(
    states, words, bias, targets, noise, temperature, largest, total, block_mass, split_words,
    log_likelihood, sampled, is_best, log_total, grad_states,
    rows, vocab, embedding, blocks, splits,
    ROWS: tl.constexpr, TILE: tl.constexpr, EMBEDDING: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr,
    TEMPERED: tl.constexpr, FORBID_TARGET: tl.constexpr, NEEDS_GRAD: tl.constexpr,
):  # fmt: skip
    """Joins the splits, adds the target, and draws. Rows past the end repeat the last row."""
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1)
    column = tl.arange(0, EMBEDDING)
    is_column = (column < embedding)[None, :]
    target = tl.load(targets + row).to(tl.int32)
    state = tl.load(states + row[:, None] * embedding + column, is_column, 0.0).to(tl.float32)
    word = tl.load(words + target[:, None] * embedding + column, is_column, 0.0).to(tl.float32)
    own = tl.sum(state * word, 1) + tl.load(bias + target).to(tl.float32)

    # join the splits, add the target: the likelihood
    split = tl.arange(0, SPLITS)
    part = split * rows + row[:, None]
    is_part = (split < splits)[None, :]
    highs = tl.load(largest + part, is_part, LOWEST)
    high = tl.max(highs, 1)
    mass = tl.sum(tl.load(total + part, is_part, 0.0) * tl.exp(highs - high[:, None]), 1)
    gap = high + tl.log(mass) - own
    softplus = tl.maximum(gap, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(gap)))
    tl.store(log_likelihood + row, -softplus)
    tl.store(log_total + row, own + softplus)
    tl.store(is_best + row, own >= high)
    if NEEDS_GRAD:
        gradient = word / (1.0 + tl.exp(-gap))[:, None]
        for number in range(splits):
            scale = tl.exp(tl.load(largest + number * rows + row) - own - softplus)
            others = tl.load(split_words + (number * rows + row[:, None]) * embedding + column, is_column, 0.0)
            gradient -= others * scale[:, None]
        tl.store(grad_states + row[:, None] * embedding + column, gradient, is_column)

    # draw a block by its mass
    inverse_temperature = 1.0
    if TEMPERED:
        inverse_temperature = 1.0 / tl.load(temperature)
    block = tl.arange(0, BLOCKS)
    masses = tl.load(block_mass + block * rows + row[:, None], (block < blocks)[None, :], -float("inf"))
    if not FORBID_TARGET:
        own_mass = (own * inverse_temperature)[:, None]
        most = tl.maximum(masses, own_mass)
        joined = most + tl.log(tl.exp(masses - most) + tl.exp(own_mass - most))
        masses = tl.where(block == (target // TILE)[:, None], joined, masses)
    chosen = _first_above(_softmax_weights(masses), tl.load(noise + row * 2))

    # compute that block's logits once more and draw a token of it
    token = chosen[:, None] * TILE + tl.arange(0, TILE)
    is_token = token < vocab
    place = words + token[:, :, None] * embedding + column
    candidates = tl.load(place, is_token[:, :, None] & is_column[:, None, :], 0.0).to(tl.float32)
    logits = tl.sum(candidates * state[:, None, :], 2)
    logits += tl.load(bias + token, is_token, -float("inf")).to(tl.float32)
    if FORBID_TARGET:
        logits = tl.where(token == target[:, None], -float("inf"), logits)
    within = _first_above(_softmax_weights(logits * inverse_temperature), tl.load(noise + row * 2 + 1))
    tl.store(sampled + row, (chosen * TILE + within).to(tl.int64))


@triton.jit
def backward_kernel(
    states, words, bias, targets, log_total, grad_output, grad_words, grad_bias,
    rows, vocab, embedding,
    ROWS: tl.constexpr, TILE: tl.constexpr, EMBEDDING: tl.constexpr,
):  # fmt: skip
    """d log p(target) / d logit_v = [v = target] - p_v, one tile of tokens against all rows."""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, EMBEDDING)
    is_token, is_column = token < vocab, column < embedding
    here = is_token[:, None] & is_column
    word = tl.load(words + token[:, None] * embedding + column, here, 0.0)
    shift = tl.load(bias + token, is_token, 0.0).to(tl.float32)
    words_sum = tl.zeros([TILE, EMBEDDING], tl.float32)
    bias_sum = tl.zeros([TILE], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        is_row = row < rows
        state = tl.load(states + row[:, None] * embedding + column, is_row[:, None] & is_column, 0.0)
        target = tl.load(targets + row, is_row, -1).to(tl.int32)
        logits = tl.dot(word, state.T, input_precision="ieee") + shift[:, None]
        probability = tl.exp(logits - tl.load(log_total + row, is_row, float("inf")))
        grad_logits = tl.where(token[:, None] == target, 1.0 - probability, -probability)
        grad_logits *= tl.load(grad_output + row, is_row, 0.0)
        bias_sum += tl.sum(grad_logits, 1)
        words_sum = tl.dot(grad_logits.to(state.dtype), state, words_sum, input_precision="ieee")
    tl.store(grad_words + token[:, None] * embedding + column, words_sum, here)
    tl.store(grad_bias + token, bias_sum, is_token)
