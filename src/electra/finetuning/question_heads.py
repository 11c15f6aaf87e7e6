"""Two heads that point at an answer: transformers' (start and end independently) and the paper's (end given the start); windows
over a context that is too long for the network; and decoding from outputs to text.

A target is a pair of positions; (0, 0), the [CLS], says that the window has no answer. Only the context and
position 0 can be pointed at. In the original, and so here, "context" includes its closing [SEP], because that is
in segment 1 too; decoding never ends an answer there. Answers are always cut from the original context by character
offsets, never joined again from tokens.
"""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.finetuning import Outputs, Prediction, softmax
from electra.model.heads import in_float32
from electra.model.linear import Linear

WIDTH = 512
"""The width of the joint head's hidden layers, whatever the size of the encoder."""
NOTHING_FOUND = 1e6
"""The null score difference if no window has any possible answer."""
Hidden = Float[Tensor, "batch seq hidden"]
Allowed = Bool[Tensor, "batch seq"]
"""Which positions can be pointed at."""


def pointable(batch: Batch) -> Allowed:
    """The context (segment 1, no padding) and position 0."""
    allowed = (batch.segments == 1) & batch.is_real
    allowed[:, 0] = True
    return allowed


class PlainHead(nn.Module):
    """Two logits per token, as in transformers' question answering classes, and unmasked as there. Positions that cannot be
    pointed at are masked in the loss, as in the original (transformers does not), and in decoding."""

    reads_first_only = False

    def __init__(self, label: nn.Module):
        super().__init__()
        self.label = label

    def forward(self, hidden: Hidden, batch: Batch) -> dict[str, Tensor]:
        start, end = self.label(hidden).unbind(-1)
        return {"start_logits": start, "end_logits": end, "allowed": pointable(batch)}


class JointHead(nn.Module):
    """p(start) from one dense layer; p(end | start) from dense(gelu(dense([h_start ; h]))), with the true start during
    training and with each of the `beam` most probable ones otherwise. If questions may have no answer, a third
    output is the logit of "there is none": dense(gelu(dense([h_0 ; Σ_t p(start = t) h_t]))).

    Every matrix has Glorot initialisation, as in the original. [h_start ; h] is never built: the halves of the layer are
    applied to h_start and to h, so that each of the beam × positions vectors costs one sum."""

    reads_first_only = False

    def __init__(self, hidden: int, beam: int, answerability: bool):
        super().__init__()
        self.beam = beam
        self.start = Linear(hidden, 1, start="glorot")
        self.end_hidden = Linear(2 * hidden, WIDTH, start="glorot")
        self.end = Linear(WIDTH, 1, start="glorot")
        if answerability:
            self.null_hidden = Linear(2 * hidden, WIDTH, start="glorot")
            self.null = Linear(WIDTH, 1, start="glorot")
        self.answerability = answerability

    def forward(self, hidden: Hidden, batch: Batch) -> dict[str, Tensor]:
        """With targets: masked logits of the start, and of the end given the true start. Without: the beam. `null` in both cases."""
        allowed = pointable(batch)
        start = in_float32(self.start, hidden).squeeze(-1).masked_fill(~allowed, -torch.inf)
        if batch.targets:
            end = self.ends(hidden, batch.targets["start"][:, None], allowed).squeeze(1)
            outputs = {"start_logits": start, "end_logits": end}
        else:
            outputs = self.search(hidden, start, allowed)
        if self.answerability:
            expected = torch.einsum("bs,bsh->bh", start.softmax(-1).to(hidden.dtype), hidden)
            features = self.null_hidden(torch.cat([hidden[:, 0], expected], -1))
            outputs["null"] = in_float32(self.null, F.gelu(features)).squeeze(-1)
        return outputs

    def ends(self, hidden: Hidden, starts: Int[Tensor, "batch n"], allowed: Allowed) -> Float[Tensor, "batch n seq"]:
        """Masked logits of the end, for each start."""
        of_start, of_end = self.end_hidden.weight.chunk(2, dim=1)
        by_position = F.linear(hidden, of_end, self.end_hidden.bias)
        by_start = F.linear(hidden.gather(1, starts[..., None].expand(-1, -1, hidden.shape[-1])), of_start)
        logits = [in_float32(self.end, F.gelu(by_position + one[:, None])).squeeze(-1) for one in by_start.unbind(1)]
        return torch.stack(logits, 1).masked_fill(~allowed[:, None], -torch.inf)

    def search(self, hidden: Hidden, start: Float[Tensor, "batch seq"], allowed: Allowed) -> dict[str, Tensor]:
        """The `beam` best starts and for each the `beam` best ends, with log p(start) + log p(end | start). If fewer
        than `beam` positions can be pointed at, the rest of the beam has end 0 and score 0: no span ends there."""
        width = min(self.beam, start.shape[1])
        start_scores, starts = start.log_softmax(-1).topk(width)
        end_scores, ends = self.ends(hidden, starts, allowed).log_softmax(-1).topk(width)
        scores = start_scores[..., None] + end_scores
        possible = scores > -torch.inf
        return {"starts": starts, "ends": ends.where(possible, 0), "scores": scores.where(possible, 0)}


def span_loss(outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor], answerability: float) -> Float[Tensor, ""]:
    """(CE(start) + CE(end)) / 2, plus `answerability` times the BCE of "no answer in this window" if there is such an
    output. Means over the batch; the original sums. For a window without the answer of an answerable question, the original's
    label is "has an answer"; ours is "none", because the window least sure of "none" decides for the question."""

    def cross_entropy(which: str) -> Tensor:
        logits = outputs[f"{which}_logits"]
        if "allowed" in outputs:
            logits = logits.masked_fill(~outputs["allowed"], -torch.inf)
        return F.cross_entropy(logits, targets[which])

    loss = (cross_entropy("start") + cross_entropy("end")) / 2
    if "null" in outputs:
        none = (targets["start"] == 0).to(outputs["null"].dtype)
        loss = loss + answerability * F.binary_cross_entropy_with_logits(outputs["null"], none)
    return loss


# Windows; from outputs to text


@dataclass(frozen=True)
class ContextWindow:
    """Part of a context in one sequence: the position of its first token there, where each token begins and ends in the context, in
    characters, and which tokens it owns: those it sees most around. Answers that start at one are taken from this window only."""

    position: int
    offsets: Int[np.ndarray, "tokens 2"]
    owned: Bool[np.ndarray, "tokens"]


class Candidates(NamedTuple):
    """Possible answers of a window: their scores, and where they begin and end in the context, in characters."""

    scores: Float[np.ndarray, "spans"]
    begins: Int[np.ndarray, "spans"]
    ends: Int[np.ndarray, "spans"]


def window_places(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """(first token, number of tokens) of each window. Every token is in one, even if the stride exceeds the room."""
    step = min(room, stride)
    firsts = range(0, max(1, tokens - room + step), step) if tokens else ()
    return [(first, min(room, tokens - first)) for first in firsts]


def owners(tokens: int, places: Sequence[tuple[int, int]]) -> Int[np.ndarray, "tokens"]:
    """For each token the window in which the smaller of its left and right context, plus a hundredth of the window's size,
    is largest, as in BERT; the first if several are equal."""
    best = np.full(tokens, -1.0)
    owner = np.zeros(tokens, np.int64)
    for number, (first, size) in enumerate(places):
        left = np.arange(size)
        context = np.minimum(left, size - 1 - left) + 0.01 * size
        better = context > best[first : first + size]
        owner[first : first + size][better] = number
        best[first : first + size][better] = context[better]
    return owner


def independent_spans(window: ContextWindow, outputs: Outputs, longest: int, most: int) -> Candidates:
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


def beam_spans(window: ContextWindow, outputs: Outputs, longest: int) -> Candidates:
    """The spans of the beam that are inside the window and not too long. As in the original, starts and ends outside the
    context, and ends before their start, are dropped only here."""
    beam = np.broadcast_to(outputs["starts"][:, None], outputs["ends"].shape)
    assert (beam % 1 == 0).all(), "beams hold positions: combine several models by average(), not by mean outputs"
    starts, ends = (part.astype(np.int64).ravel() - window.position for part in (beam, outputs["ends"]))
    scores = outputs["scores"].ravel()
    fits = (starts >= 0) & (starts <= ends) & (ends < len(window.offsets)) & (ends - starts < longest)
    fits[fits] = window.owned[starts[fits]]
    return candidates(window, scores[fits], starts[fits], ends[fits])


def candidates(window: ContextWindow, scores: np.ndarray, first: np.ndarray, last: np.ndarray) -> Candidates:
    real = np.isfinite(scores)
    return Candidates(scores[real], window.offsets[first[real], 0], window.offsets[last[real], 1])


def n_best(context: str, windows: Iterable[Candidates], most: int) -> list[dict[str, Any]]:
    """The best answers over all windows, each text once, with probabilities: a softmax over the scores of those kept.
    Some tokenizers count the space before a word to the word: whitespace at the ends is cut off. An accent that they composed
    with its letter, or dropped, is no part of their last token: it goes with the letter."""
    scores, begins, ends = (np.concatenate(part) for part in zip(*windows, strict=True))
    kept: dict[str, tuple[float, int]] = {}
    for at in np.lexsort((ends, begins, -scores)):
        end = int(ends[at])
        while unicodedata.category(context[end : end + 1] or " ") == "Mn":  # composed or dropped
            end += 1
        raw = context[begins[at] : end]
        text = raw.strip()
        if text and text not in kept:
            kept[text] = float(scores[at]), int(begins[at]) + len(raw) - len(raw.lstrip())
            if len(kept) == most:
                break
    if not kept:
        return []
    weights = softmax(np.array([score for score, _ in kept.values()]))
    return [
        {"text": text, "probability": float(weight), "start": start, "end": start + len(text), "logit": score}
        for (text, (score, start)), weight in zip(kept.items(), weights, strict=True)
    ]


def prediction(answers: list[dict[str, Any]], null_difference: float | None, threshold: float) -> Prediction:
    """The columns of one question. `null_difference` is None if every question has an answer; otherwise the prediction
    is "" if it exceeds the threshold. `span` is the best answer whatever the threshold."""
    best = answers[0] if answers else {"text": "", "probability": 0.0}
    refused = null_difference is not None and null_difference > threshold
    columns = {"prediction": "" if refused else best["text"], "score": best["probability"]}
    nulls = {} if null_difference is None else {"null_score_difference": null_difference}
    return {**columns, **nulls, "span": best["text"], "n_best": answers}


def average(members: Sequence[Sequence[Prediction]], most: int, threshold: float) -> list[Prediction]:
    """Averages the predictions of several models for the same rows. A text gets the mean of its probabilities (0 for a member
    that does not have it among its n-best), the null score difference is the mean of the members'."""
    together = []
    for predictions in zip(*members, strict=True):
        sums: dict[str, dict[str, Any]] = {}
        for member in predictions:
            for answer in member["n_best"]:
                entry = sums.setdefault(answer["text"], {**answer, "probability": 0.0})
                entry["probability"] += answer["probability"] / len(predictions)
        answers = sorted(sums.values(), key=lambda answer: -answer["probability"])[:most]
        answers = [{**answer, "logit": float(np.log(answer["probability"]))} for answer in answers]
        nulls = [member["null_score_difference"] for member in predictions if "null_score_difference" in member]
        together.append(prediction(answers, sum(nulls) / len(nulls) if nulls else None, threshold))
    return together
