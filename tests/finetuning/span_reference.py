"""The joint head once more, in numpy and float64, one question at a time, written from the equations: [h_start ; h] is
really put together here."""

import numpy as np
from scipy.special import erf, log_softmax, softmax


def dense(w, name, x):
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def gelu(x):
    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


def masked(logits, allowed):
    return np.where(allowed, logits, -np.inf)


def start_logits(w, hidden, allowed):
    return masked([dense(w, "start", h)[0] for h in hidden], allowed)


def end_logits(w, hidden, allowed, start):
    logits = [dense(w, "end", gelu(dense(w, "end_hidden", np.concatenate([hidden[start], h]))))[0] for h in hidden]
    return masked(logits, allowed)


def null_logit(w, hidden, allowed):
    probabilities = softmax(start_logits(w, hidden, allowed))
    expected = sum(p * h for p, h in zip(probabilities, hidden, strict=True))
    return dense(w, "null", gelu(dense(w, "null_hidden", np.concatenate([hidden[0], expected]))))[0]


def loss(w, hidden, allowed, start, end, weight):
    spans = -log_softmax(start_logits(w, hidden, allowed))[start]
    spans -= log_softmax(end_logits(w, hidden, allowed, start))[end]
    probability = 1 / (1 + np.exp(-null_logit(w, hidden, allowed)))
    return spans / 2 - weight * np.log(probability if start == 0 else 1 - probability)


def beam(w, hidden, allowed, width):
    """{(start, end): log p(start) + log p(end | start)}"""
    starts = log_softmax(start_logits(w, hidden, allowed))
    found = {}
    for start in np.argsort(-starts)[:width]:
        ends = log_softmax(end_logits(w, hidden, allowed, start))
        for end in np.argsort(-ends)[:width]:
            found[int(start), int(end)] = starts[start] + ends[end]
    return found
