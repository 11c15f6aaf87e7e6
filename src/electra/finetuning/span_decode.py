"""Windows over a context that is too long for the network, and the way back from their outputs to text.

Answers are always cut from the original context by character offsets, never joined again from tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from electra.finetuning.task import Outputs

NOTHING_FOUND = 1e6
"""The null score difference where no answer could be cut at all."""


@dataclass(frozen=True)
class Window:
    """Part of a context in one sequence."""

    position: int
    """Of its first context token in the sequence."""
    offsets: Int[np.ndarray, "tokens 2"]
    """Where each of its tokens begins and ends in the context, in characters."""
    owned: Bool[np.ndarray, "tokens"]
    """Whether this is the window that sees most around the token: an answer that starts there is taken from here."""


class Candidates(NamedTuple):
    """Possible answers: places in the context, in characters, with their scores, the best first."""

    scores: Float[np.ndarray, "spans"]
    begins: Int[np.ndarray, "spans"]
    ends: Int[np.ndarray, "spans"]


def window_places(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """(first token, number of tokens) of each window: every token is in one, also where the stride exceeds the room."""
    places = []
    first = 0
    while first < tokens:
        size = min(room, tokens - first)
        places.append((first, size))
        if first + size == tokens:
            break
        first += min(size, stride)
    return places


def owners(tokens: int, places: Sequence[tuple[int, int]]) -> Int[np.ndarray, "tokens"]:
    """For each token the window in which the smaller of its left and right context is largest, plus a hundredth of the
    window's size, as in BERT; the first of equals."""
    best = np.full(tokens, -1.0)
    owner = np.zeros(tokens, np.int64)
    for number, (first, size) in enumerate(places):
        left = np.arange(size)
        context = np.minimum(left, size - 1 - left) + 0.01 * size
        better = context > best[first : first + size]
        owner[first : first + size][better] = number
        best[first : first + size][better] = context[better]
    return owner


def independent_spans(window: Window, outputs: Outputs, longest: int, most: int) -> Candidates:
    """score(s, e) = start_s + end_e over all spans of at most `longest` tokens. BERT tries the 20 best starts with the
    20 best ends; looking at every pair is as fast and cannot miss the best one."""
    tokens = len(window.offsets)
    here = slice(window.position, window.position + tokens)
    longest = min(longest, tokens)
    beyond = np.full(longest - 1, -np.inf, outputs["end_logits"].dtype)
    ends = np.lib.stride_tricks.sliding_window_view(np.append(outputs["end_logits"][here], beyond), longest)
    scores = np.where(window.owned[:, None], outputs["start_logits"][here, None] + ends, -np.inf).ravel()
    best = np.argpartition(-scores, most - 1)[:most] if most < scores.size else np.arange(scores.size)
    first, extra = np.divmod(best, longest)
    return candidates(window, scores[best], first, first + extra)


def beam_spans(window: Window, outputs: Outputs, longest: int) -> Candidates:
    """The spans of the beam that lie in the window and are not too long; as in the original, starts and ends outside
    the context, and ends before their start, are dropped only here."""
    beam = np.broadcast_to(outputs["starts"][:, None], outputs["ends"].shape)
    assert (beam % 1 == 0).all(), (
        "beams hold positions: combine several models by average(), not by mean outputs"
    )
    starts, ends = (part.astype(np.int64).ravel() - window.position for part in (beam, outputs["ends"]))
    scores = outputs["scores"].ravel()
    fits = (starts >= 0) & (starts <= ends) & (ends < len(window.offsets)) & (ends - starts < longest)
    starts, ends, scores = starts[fits], ends[fits], scores[fits]
    mine = window.owned[starts]
    return candidates(window, scores[mine], starts[mine], ends[mine])


def candidates(window: Window, scores: np.ndarray, first: np.ndarray, last: np.ndarray) -> Candidates:
    real = np.isfinite(scores)
    return Candidates(scores[real], window.offsets[first[real], 0], window.offsets[last[real], 1])


def n_best(context: str, found: Iterable[Candidates], most: int) -> list[dict[str, Any]]:
    """The best answers over all windows, each text once, with probabilities: a softmax over the scores of those kept.
    Some tokenizers count the space before a word to the word: whitespace at the ends is cut off."""
    scores, begins, ends = (np.concatenate(part) for part in zip(*found, strict=True))
    kept: dict[str, tuple[float, int]] = {}
    for at in np.lexsort((ends, begins, -scores)):
        raw = context[begins[at] : ends[at]]
        text = raw.strip()
        if text and text not in kept:
            kept[text] = float(scores[at]), int(begins[at]) + len(raw) - len(raw.lstrip())
            if len(kept) == most:
                break
    if not kept:
        return []
    weights = np.exp(
        np.array([score for score, _ in kept.values()]) - max(score for score, _ in kept.values())
    )
    return [
        {"text": text, "probability": float(weight), "start": start, "end": start + len(text), "logit": score}
        for (text, (score, start)), weight in zip(kept.items(), weights / weights.sum(), strict=True)
    ]


def prediction(
    answers: list[dict[str, Any]], null_difference: float | None, threshold: float
) -> dict[str, Any]:
    """The columns of one question. `null_difference` is None where every question has an answer; otherwise the answer
    is "" if it exceeds the threshold. `_span` is the best answer whatever the threshold."""
    best = answers[0]["text"] if answers else ""
    refused = null_difference is not None and null_difference > threshold
    told: dict[str, Any] = {"prediction": "" if refused else best}
    told["score"] = answers[0]["probability"] if answers else 0.0
    if null_difference is not None:
        told["null_score_difference"] = null_difference
    return {**told, "_span": best, "_n_best": answers}


def average(
    members: Sequence[Sequence[Mapping[str, Any]]], most: int, threshold: float
) -> list[dict[str, Any]]:
    """An ensemble: the predictions of several models about the same rows become one. A text gets the mean of its
    probabilities (0 where it is not among a member's n-best), the null score differences get theirs. Logits cannot be
    averaged here, because the beams of two joint heads hold different spans."""
    together = []
    for told in zip(*members, strict=True):
        sums: dict[str, dict[str, Any]] = {}
        for member in told:
            for answer in member["_n_best"]:
                entry = sums.setdefault(answer["text"], {**answer, "probability": 0.0})
                entry["probability"] += answer["probability"] / len(told)
        answers = sorted(sums.values(), key=lambda answer: -answer["probability"])[:most]
        answers = [{**answer, "logit": float(np.log(answer["probability"]))} for answer in answers]
        nulls = [member["null_score_difference"] for member in told if "null_score_difference" in member]
        difference = sum(nulls) / len(nulls) if nulls else None
        together.append(prediction(answers, difference, threshold))
    return together
