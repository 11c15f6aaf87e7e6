"""The whole step of ELECTRA once more, in numpy and float64, written from the paper and sharing no code with ours.

Weights come as a dictionary of arrays under our names; randomness comes as the arrays of uniform numbers.
"""

import numpy as np
from scipy.special import erf


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12) * weight + bias


def gelu(x):
    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def encode(w, prefix, embeddings, layers, heads, ids, segments, is_real, direction="both"):
    e = lambda name: w[f"{embeddings}.{name}"]  # noqa: E731
    x = e("words.weight")[ids] + e("positions.weight")[: ids.shape[1]] + e("types.weight")[segments]
    x = layer_norm(x, e("norm.weight"), e("norm.bias"))
    if f"{prefix}.project.weight" in w:
        x = x @ w[f"{prefix}.project.weight"].T + w[f"{prefix}.project.bias"]
    for n in range(layers):
        g = lambda name, n=n: w[f"{prefix}.layers.{n}.{name}"]  # noqa: E731
        batch, _, hidden = x.shape
        size = hidden // heads
        qkv = x @ g("query_key_value.weight").T + g("query_key_value.bias")
        out = np.zeros_like(x)
        for b in range(batch):
            for h in range(heads):
                q, k, v = (qkv[b, :, i * hidden + h * size : i * hidden + (h + 1) * size] for i in range(3))
                scores = q @ k.T / np.sqrt(size)
                scores[:, ~is_real[b]] = -np.inf
                for t in range(len(scores)):
                    if direction == "left":
                        scores[t, t + 1 :] = -np.inf
                    if direction == "right":
                        scores[t, :t] = -np.inf
                    if direction != "both" and not is_real[b, t]:
                        scores[t, t] = 0.0  # padding that looks at itself alone: its weight is one
                out[b, :, h * size : (h + 1) * size] = softmax(scores) @ v
        x = layer_norm(
            x + out @ g("attention_output.weight").T + g("attention_output.bias"),
            g("attention_norm.weight"),
            g("attention_norm.bias"),
        )
        inner = gelu(x @ g("expand.weight").T + g("expand.bias"))
        x = layer_norm(
            x + inner @ g("contract.weight").T + g("contract.bias"), g("output_norm.weight"), g("output_norm.bias")
        )
    return x


def token_logits(w, head, table, hidden):
    h = gelu(hidden @ w[f"{head}.dense.weight"].T + w[f"{head}.dense.bias"])
    return layer_norm(h, w[f"{head}.norm.weight"], w[f"{head}.norm.bias"]) @ table.T + w[f"{head}.bias"]


def detection_logits(w, head, hidden):
    h = gelu(hidden @ w[f"{head}.dense.weight"].T + w[f"{head}.dense.bias"])
    return (h @ w[f"{head}.output.weight"].T + w[f"{head}.output.bias"])[..., 0]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def step(w, sizes, special, ids, segments, is_real, noise, share, mask_share, weights, temperature, disallow_correct):
    """Losses, labels, corrupted ids and detection logits. `sizes`: (generator layers, heads, embeddings), the same for
    the discriminator. `noise`: the three arrays of uniform numbers, for choosing, masking and sampling."""
    (g_layers, g_heads, g_embeddings), (d_layers, d_heads, d_embeddings) = sizes
    masked, chosen = ids.copy(), []
    for row in range(len(ids)):
        candidates = [t for t in range(ids.shape[1]) if is_real[row, t] and ids[row, t] not in special[2:]]
        wanted = max(1, int(np.rint(share * is_real[row].sum())))
        best = sorted(candidates, key=lambda t, r=row: -noise["choose"][r, t])[:wanted]
        for slot, t in enumerate(best):
            chosen.append((row, slot, t))
            if noise["mask"][row, slot] < mask_share:
                masked[row, t] = special[4]

    hidden = encode(w, "generator", g_embeddings, g_layers, g_heads, masked, segments, is_real)
    corrupted, nll = ids.copy(), []
    for row, slot, t in chosen:
        h = gelu(hidden[row, t] @ w["token_head.dense.weight"].T + w["token_head.dense.bias"])
        h = layer_norm(h, w["token_head.norm.weight"], w["token_head.norm.bias"])
        logits = w[f"{g_embeddings}.words.weight"] @ h + w["token_head.bias"]
        nll.append(-np.log(softmax(logits)[ids[row, t]]))
        scaled = logits / temperature
        if disallow_correct:
            scaled[ids[row, t]] = -np.inf
        corrupted[row, t] = draw(softmax(scaled), *noise["sample"][row, 2 * slot : 2 * slot + 2])

    is_replaced = corrupted != ids
    hidden = encode(w, "discriminator", d_embeddings, d_layers, d_heads, corrupted, segments, is_real)
    h = gelu(hidden @ w["detection_head.dense.weight"].T + w["detection_head.dense.bias"])
    logits = (h @ w["detection_head.output.weight"].T + w["detection_head.output.bias"])[..., 0]
    probability = 1 / (1 + np.exp(-logits))
    losses = -np.where(is_replaced, np.log(probability), np.log(1 - probability))
    mlm, rtd = np.mean(nll), losses[is_real].mean()
    return {
        "total": weights[0] * mlm + weights[1] * rtd,
        "mlm": mlm,
        "rtd": rtd,
        "masked": masked,
        "corrupted": corrupted,
        "is_replaced": is_replaced,
        "logits": logits,
    }


def draw(probabilities, first, second):
    """Two-stage inversion: a block of 128 tokens, then a token in it."""
    blocks = [probabilities[i : i + 128] for i in range(0, len(probabilities), 128)]
    sums = np.cumsum([block.sum() for block in blocks])
    block = int(np.searchsorted(sums, first * sums[-1], side="right"))
    inner = np.cumsum(blocks[block])
    return 128 * block + int(np.searchsorted(inner, second * inner[-1], side="right"))
