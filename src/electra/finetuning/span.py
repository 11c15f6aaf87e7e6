"""Questions whose answer is a span of a given context, as in SQuAD 1.1 and 2.0."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.config import Settings
from electra.base.errors import SettingsError
from electra.data.tables import Row
from electra.data.tokenizer import special_ids
from electra.finetuning import span_decode, squad_metrics, squad_rows
from electra.finetuning.span_decode import Window
from electra.finetuning.span_heads import JointHead, ModernBertPlainHead, PlainHead, span_loss
from electra.finetuning.squad_rows import Answer
from electra.finetuning.task import Example, Outputs
from electra.model.encoders import AnySettings
from electra.model.modern import ModernBertSettings

_AT_ONCE = 1024
"""Texts handed to the tokenizer in one go: its full encodings are large."""
_CANDIDATES = 10
"""Spans kept of each window for one place in the n-best list: many spans have the same text."""


class SpanSettings(Settings):
    """One kind of task in one TOML file. `head`: "plain" is transformers' (two logits a token), "joint" the paper's (the
    end given the start, found by a beam; where `has_unanswerable`, with a classifier weighted by `answerability`).
    `doc_stride` is how many tokens a window begins after the one before it. An answer is "" where the null score
    difference exceeds `null_threshold`; "dev" is the best one for the dev set's headline, found after training and saved
    with the model."""

    kind: Literal["span"] = "span"
    name: str = ""
    metric: Literal["f1", "exact"] = "f1"
    epochs: int = Field(2, ge=1)
    length: int = Field(512, ge=8)
    doc_stride: int = Field(128, ge=1)
    max_query_length: int = Field(64, ge=1)
    n_best: int = Field(20, ge=1)
    max_answer_length: int = Field(30, ge=1)
    head: Literal["plain", "joint"] = "plain"
    beam: int = Field(20, ge=1)
    has_unanswerable: bool = False
    answerability: float = Field(0.5, gt=0)
    null_threshold: float | Literal["dev"] = 0.0
    files: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def parts_fit(self) -> "SpanSettings":
        if self.null_threshold == "dev" and not self.has_unanswerable:
            raise ValueError("null_threshold=dev needs has_unanswerable=true")
        return self


class SpanTask:
    """A `Task`: [CLS] question [SEP] window of the context [SEP], in as many windows as the context needs. `length` is
    the settings' one or the model's positions, whichever is less."""

    def __init__(self, settings: SpanSettings, tokenizer: Tokenizer, length: int):
        if length < settings.max_query_length + 4:
            raise SettingsError(
                f"length {length} leaves no room for the context beside max_query_length {settings.max_query_length}. "
                f"Set max_query_length to {max(1, length // 4)} or less, or length higher."
            )
        tokenizer.encode_special_tokens = True  # a context that says "[SEP]" means the word
        self.settings = settings
        self.tokenizer = tokenizer
        self.length = length
        self.special = special_ids(tokenizer)
        self.labels: Sequence[str] = ()
        self.architecture = "ForQuestionAnswering" if settings.head == "plain" else ""

    def problems(self, splits: Mapping[str, Sequence[Row]]) -> list[str]:
        return squad_rows.problems(splits, self.settings.has_unanswerable)

    def encode(self, rows: Sequence[Row]) -> tuple[list[Example], int]:
        """Windows of all rows, and of how many rows the question was cut. Contexts are never cut."""
        places = {
            context: place for place, context in enumerate(dict.fromkeys(row["context"] for row in rows))
        }
        contexts = list(self._tokens(list(places)))
        examples: list[Example] = []
        cut = 0
        for number, (row, question) in enumerate(zip(rows, self._questions(rows), strict=True)):
            cut += len(question) > self.settings.max_query_length
            question = question[: self.settings.max_query_length]
            ids, offsets = contexts[places[row["context"]]]
            examples += self._windows(number, question, ids, offsets, squad_rows.answers_of(row))
        return examples, cut

    def _tokens(self, texts: Sequence[str]) -> Iterator[tuple[list[int], Int[np.ndarray, "tokens 2"]]]:
        for first in range(0, len(texts), _AT_ONCE):
            batch = texts[first : first + _AT_ONCE]
            for encoding in self.tokenizer.encode_batch(batch, add_special_tokens=False):
                yield encoding.ids, np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def _questions(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        for first in range(0, len(rows), _AT_ONCE):
            batch = [row["question"] for row in rows[first : first + _AT_ONCE]]
            for encoding in self.tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield encoding.ids

    def _windows(
        self,
        row: int,
        question: list[int],
        ids: list[int],
        offsets: Int[np.ndarray, "tokens 2"],
        answers: list[Answer] | None,
    ) -> Iterator[Example]:
        before = [self.special.cls, *question, self.special.sep]
        room = self.length - len(before) - 1
        places = span_decode.window_places(len(ids), room, self.settings.doc_stride)
        owner = span_decode.owners(len(ids), places)
        spans = None if answers is None else [token_span(offsets, answer) for answer in answers]
        for number, (first, size) in enumerate(places):
            here = slice(first, first + size)
            window = Window(len(before), offsets[here], owner[here] == number)
            target = None if spans is None else target_in(spans, first, size, len(before))
            yield Example([*before, *ids[here], self.special.sep], len(before), row, target, window)

    def head(self, encoder: AnySettings) -> nn.Module:
        match self.settings.head, encoder:
            case "plain", ModernBertSettings():
                return ModernBertPlainHead(encoder)
            case "plain", _:
                return PlainHead(encoder.hidden)
            case "joint", _:
                return JointHead(encoder.hidden, self.settings.beam, self.settings.has_unanswerable)

    def targets(self, examples: Sequence[Example], length: int) -> dict[str, Tensor]:
        start, end = torch.tensor([example.target for example in examples]).unbind(1)
        return {"start": start, "end": end}

    def loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        return span_loss(outputs, targets, self.settings.answerability)

    def predict(
        self, rows: Sequence[Row], examples: Sequence[Example], outputs: Sequence[Outputs]
    ) -> list[dict[str, Any]]:
        """prediction, score (its probability among the n-best), null_score_difference where there may be no answer. A
        context without tokens has no window, and so no answer."""
        windows: list[list[tuple[Window, Outputs]]] = [[] for _ in rows]
        for example, output in zip(examples, outputs, strict=True):
            windows[example.row].append((example.notes, output))
        return [self._predict(row, mine) for row, mine in zip(rows, windows, strict=True)]

    def _predict(self, row: Row, windows: Sequence[tuple[Window, Outputs]]) -> dict[str, Any]:
        found = [self._candidates(window, outputs) for window, outputs in windows]
        answers = span_decode.n_best(row["context"], found, self.settings.n_best) if found else []
        difference = None
        if self.settings.has_unanswerable:
            difference = self._null_difference(answers, [outputs for _, outputs in windows])
        return span_decode.prediction(answers, difference, self.threshold)

    def _candidates(self, window: Window, outputs: Outputs) -> span_decode.Candidates:
        longest = self.settings.max_answer_length
        match self.settings.head:
            case "plain":
                most = _CANDIDATES * self.settings.n_best
                return span_decode.independent_spans(window, outputs, longest, most)
            case "joint":
                return span_decode.beam_spans(window, outputs, longest)

    def _null_difference(self, answers: Sequence[Mapping[str, Any]], outputs: Sequence[Outputs]) -> float:
        """The window that is least sure of "no answer" decides: one that has the answer is enough. Joint: its logit.
        Plain: the score of [CLS] as start and end, less that of the best answer."""
        if not answers:
            return span_decode.NOTHING_FOUND
        match self.settings.head:
            case "plain":
                null = min(float(output["start_logits"][0] + output["end_logits"][0]) for output in outputs)
                return null - answers[0]["logit"]
            case "joint":
                return min(float(output["null"]) for output in outputs)

    def ensemble(self, members: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """The predictions of several models for the same rows as one. With a plain head the mean of their outputs may
        be decoded instead; beams have no mean."""
        return span_decode.average(members, self.settings.n_best, self.threshold)

    def scores(self, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        truths = [[answer.text for answer in squad_rows.answers_of(row) or []] for row in rows]
        if self.settings.has_unanswerable:
            nulls = [told["null_score_difference"] for told in predictions]
            spans = [told["_span"] for told in predictions]
            scores = squad_metrics.squad2(spans, truths, nulls, self.threshold)
            if self.settings.null_threshold == "dev":
                fitted = scores[f"best_{self.settings.metric}_threshold"]
                scores = squad_metrics.squad2(spans, truths, nulls, fitted)
        else:
            scores = squad_metrics.squad1([told["prediction"] for told in predictions], truths)
        return {self.settings.metric: scores[self.settings.metric], **scores}

    @property
    def threshold(self) -> float:
        """0 until it is fitted."""
        return 0.0 if self.settings.null_threshold == "dev" else self.settings.null_threshold

    def fitted(self, scores: Mapping[str, float]) -> "SpanTask":
        """The same task with the threshold that was best on dev, where the settings ask for that."""
        if self.settings.null_threshold != "dev":
            return self
        best = scores[f"best_{self.settings.metric}_threshold"]
        settings = self.settings.model_copy(update={"null_threshold": best})
        return SpanTask(settings, self.tokenizer, self.length)


def token_span(offsets: Int[np.ndarray, "tokens 2"], answer: Answer) -> tuple[int, int] | None:
    """First and last of the tokens that share a character with the answer, or None. Where an answer begins or ends
    inside a token, "Japan" in "japanese", the whole token is taken."""
    first = int(np.searchsorted(offsets[:, 1], answer.start, "right"))
    last = int(np.searchsorted(offsets[:, 0], answer.end, "left")) - 1
    return (first, last) if first <= last else None


def target_in(
    spans: Sequence[tuple[int, int] | None], first: int, size: int, position: int
) -> tuple[int, int]:
    """Where the first answer that is wholly in the window starts and ends in the sequence; (0, 0) if none is."""
    for span in spans:
        if span is not None and first <= span[0] and span[1] < first + size:
            return span[0] - first + position, span[1] - first + position
    return 0, 0
