"""Questions whose answer is a span of a given context, as in SQuAD 1.1 and 2.0: their files, windows and scores.

Scores are exact match and F1 as SQuAD's evaluators 1.1 and 2.0 define them, from 0 to 1, not in percent.

Answers are compared after lowering their case, dropping the 32 ASCII punctuation marks (and no others: “ and 。 stay), the
words a, an and the, and superfluous whitespace, in this order. F1 is that of the two bags of words that remain. A
question gets the best score over its true answers, a set of questions the mean.

The evaluators disagree about answers of which nothing remains. In 1.1 two such answers match exactly but share no word, so
F1 is 0. In 2.0 the empty answer means "there is none": F1 is 1 if both are empty, and a true answer of which nothing
remains is ignored.
"""

import math
import re
import statistics
import string
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.errors import DataError, SettingsError
from electra.base.files import MOST_JSON, parse_json
from electra.data.files import json_lines
from electra.data.tables import Row, is_missing, open_table
from electra.data.tokenizer import encode_texts
from electra.finetuning import (
    Answering,
    Example,
    Examples,
    Layout,
    Mistake,
    Outputs,
    Prediction,
    Problem,
    Rows,
    Splits,
    Task,
    TaskSettings,
    in_chunks,
    question_heads,
    text_problem,
    wording,
)
from electra.finetuning.question_heads import ContextWindow, JointHead, PlainHead, span_loss
from electra.model import EncoderSettings, question_head

_AT_ONCE = 1024
"""Texts per call of the tokenizer, whose full encodings are large."""
ACCEPTED = "accepted"
"""The column with all texts that MRQA accepts as an answer, for scoring."""
_CANDIDATES = 10
"""Spans kept per window for each entry of the n-best list, because many spans have the same text."""


class TrueAnswer(NamedTuple):
    text: str
    start: int  # of its first character in the context


Tokens = tuple[list[int], Int[np.ndarray, "tokens 2"]]
"""Ids, and where each token begins and ends in its text, in characters."""
Answers = list[TrueAnswer] | None
"""Empty if the question has no answer, None if the answers are unknown."""


class SpanSettings(TaskSettings):
    """`head`: "plain" is transformers' (two logits per token), "joint" the paper's (the end given the start, found by a beam;
    with `has_unanswerable`, also a classifier whose loss is weighted by `answerability`). Each window begins `doc_stride` tokens
    after the one before it. An answer is "" if the null score difference exceeds `null_threshold`; "dev" is the best threshold
    for the dev set's headline, found after training and saved with the model."""

    kind: Literal["span"] = "span"
    metric: Literal["f1", "exact"] = "f1"
    epochs: int = Field(2, ge=1, le=1_000_000)
    length: int = Field(512, ge=8, le=1_000_000)
    doc_stride: int = Field(128, ge=1)
    max_query_length: int = Field(64, ge=1)
    n_best: int = Field(20, ge=1)
    max_answer_length: int = Field(30, ge=1)
    head: Literal["plain", "joint"] = "plain"
    beam: int = Field(20, ge=1)
    has_unanswerable: bool = False
    answerability: float = Field(0.5, gt=0)
    null_threshold: float | Literal["dev"] = 0.0

    @model_validator(mode="after")
    def parts_fit(self) -> "SpanSettings":
        if self.null_threshold == "dev" and not self.has_unanswerable:
            raise ValueError("null_threshold=dev needs has_unanswerable=true")
        return self

    def build(self, tokenizer: Tokenizer, length: int, splits: Splits) -> "SpanTask":
        return SpanTask(self, tokenizer, length)

    @property
    def input_columns(self) -> tuple[str, ...]:
        return ("question", "context")

    @classmethod
    def named_columns(cls, overrides: Mapping[str, Any]) -> dict[str, Any]:
        if overrides.keys() & {"text", "label"}:
            raise SettingsError("text and label do not fit questions. Their columns: id, question, context, answers.")
        return dict(overrides)

    def layout(self, path: Path) -> Layout:
        return nested_layout(path) or "table"

    def read(self, path: Path) -> tuple[list[Row], dict[int, str]]:
        match nested_layout(path):
            case "squad":
                return read_squad(path), {}
            case "mrqa":
                return read_mrqa(path), {}
        return super().read(path)

    @property
    def notes(self) -> tuple[str, ...]:
        note = "dev scores use the null_threshold that is best for dev: they are optimistic"
        return (note,) if self.null_threshold == "dev" else ()

    def row_key(self, row: Row) -> str:
        """The context: questions about one paragraph stay together, because their answers are in the same text."""
        return str(row.get("context"))

    def family(self, row: Row) -> Hashable:
        return wording(self.row_key(row))

    def identity(self, row: Row, split: str) -> Hashable | None:
        question, context = row.get("question"), row.get("context")
        return wording(question, context) if isinstance(question, str) and isinstance(context, str) else None

    def cut_words(self, length: int) -> str:
        return f"with a question of more than {self.max_query_length} tokens, of which the rest is not read"


class SpanTask(Task):
    """[CLS] question [SEP] window of the context [SEP], in as many windows as the context needs."""

    settings: SpanSettings
    columns_written = ("prediction", "score", "null_score_difference")

    def __init__(self, settings: SpanSettings, tokenizer: Tokenizer, length: int):
        if length < settings.max_query_length + 4:
            raise SettingsError(
                f"length {length} leaves no room for the context beside max_query_length {settings.max_query_length}. "
                f"Set max_query_length to {max(1, length // 4)} or less, or length higher."
            )
        super().__init__(settings, tokenizer, length)
        self.architecture = "ForQuestionAnswering" if settings.head == "plain" else ""

    def row_problems(self, row: Row, answered: bool) -> Iterator[str]:
        texts = [text_problem(name, row.get(name)) for name in self.settings.input_columns]
        no_id = "has no id. Give every question one." if is_missing(row.get("id")) else ""
        yield from list(filter(None, [*texts, no_id])) or self._answer_problems(row, answered)

    def _answer_problems(self, row: Row, answered: bool) -> Iterator[str]:
        try:
            answers = true_answers(row)
        except (KeyError, TypeError, ValueError, AttributeError):
            yield f"answers is {row['answers']!r}, not a list of {{text, answer_start}}. Correct it."
            return
        if answers is None and answered:
            yield "has no answers. Give them, or is_impossible = true where there is none."
        if row.get("is_impossible") and row.get("answers"):
            yield "is_impossible is true, but there are answers. Remove one of the two."
        if answers == [] and not self.settings.has_unanswerable:
            yield "has no answer. Set has_unanswerable = true, or remove the row."
        for text, start in answers or ():
            if not isinstance(text, str) or not text.strip():
                yield f"an answer is {text!r}. Remove it."
            elif isinstance(start, bool) or not isinstance(start, int):
                yield f"answer {text!r} has answer_start {start!r}, not a number of characters. Correct it."
            elif start < 0 or not row["context"].startswith(text, start):
                there = repr(row["context"][start : start + len(text)]) if start >= 0 else "nothing"
                places = [str(place.start()) for place in re.finditer(f"(?={re.escape(text)})", row["context"])]
                remedy = (
                    f"Set answer_start to {' or '.join(places[:3])}." if places else "The context lacks it: remove it."
                )
                yield f"answer {text!r} is not at answer_start {start}, where the context has {there}. {remedy}"

    def overall_problems(self, splits: Splits, clean: bool) -> Iterator[Problem]:
        for split, rows in splits.items():
            first: dict[str, int] = {}
            for number, row in enumerate(rows, 1):
                name = str(row.get("id"))
                if first.setdefault(name, number) != number and row.get("id") is not None:
                    yield Problem(split, number, f"has the id {name!r} of", (split, first[name]))

    def encode(self, rows: Rows) -> tuple[list[Example], int]:
        """Returns the windows of all rows, and how many rows had their question cut. Contexts are never cut."""
        different = list(dict.fromkeys(row["context"] for row in rows))
        contexts = dict(zip(different, self._tokens(different), strict=True))
        examples: list[Example] = []
        cut = 0
        questions = (ids for ids, _ in self._tokens([row["question"] for row in rows]))
        for number, (row, question) in enumerate(zip(rows, questions, strict=True)):
            most = self.settings.max_query_length
            cut += len(question) > most
            examples += self._windows(number, question[:most], contexts[row["context"]], true_answers(row))
        return examples, cut

    def _tokens(self, texts: Sequence[str]) -> Iterator[Tokens]:
        for batch in in_chunks(texts, _AT_ONCE):
            for encoding in encode_texts(self.tokenizer, batch):
                yield encoding.ids, np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def _windows(self, row: int, question: list[int], context: Tokens, answers: Answers) -> Iterator[Example]:
        ids, offsets = context
        before = [self.special.cls, *question, self.special.sep]
        room = self.length - len(before) - 1
        places = question_heads.window_places(len(ids), room, self.settings.doc_stride)
        owner = question_heads.owners(len(ids), places)
        spans = None if answers is None else [token_span(offsets, answer) for answer in answers]
        for number, (first, size) in enumerate(places):
            here = slice(first, first + size)
            window = ContextWindow(len(before), offsets[here], owner[here] == number)
            target = None if spans is None else target_in(spans, first, size, len(before))
            yield Example([*before, *ids[here], self.special.sep], len(before), row, target, window)

    def head(self, encoder: EncoderSettings) -> nn.Module:
        if self.settings.head == "plain":
            return PlainHead(question_head(encoder))
        return JointHead(encoder.hidden, self.settings.beam, self.settings.has_unanswerable)

    def targets(self, examples: Examples, length: int) -> dict[str, Tensor]:
        start, end = torch.tensor([example.target for example in examples]).unbind(1)
        return {"start": start, "end": end}

    def loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        return span_loss(outputs, targets, self.settings.answerability)

    def predict(self, rows: Rows, examples: Examples, outputs: Sequence[Outputs]) -> list[Prediction]:
        """Columns: prediction, score (its probability among the n-best), null_score_difference if there may be no answer, span,
        n_best. A context without tokens has no window, and so no answer."""
        windows: list[list[tuple[ContextWindow, Outputs]]] = [[] for _ in rows]
        for example, output in zip(examples, outputs, strict=True):
            windows[example.row].append((example.notes, output))
        return [self._predict(row, its_windows) for row, its_windows in zip(rows, windows, strict=True)]

    def _predict(self, row: Row, windows: Sequence[tuple[ContextWindow, Outputs]]) -> dict[str, Any]:
        longest, most = self.settings.max_answer_length, _CANDIDATES * self.settings.n_best
        if self.settings.head == "plain":
            candidates = [question_heads.independent_spans(window, it, longest, most) for window, it in windows]
        else:
            candidates = [question_heads.beam_spans(window, it, longest) for window, it in windows]
        answers = question_heads.n_best(row["context"], candidates, self.settings.n_best) if candidates else []
        nulls = self._null_difference(answers, [it for _, it in windows]) if self.settings.has_unanswerable else None
        return question_heads.prediction(answers, nulls, self.threshold)

    def _null_difference(self, answers: Sequence[Mapping[str, Any]], outputs: Sequence[Outputs]) -> float:
        """How much "no answer" is preferred. The window that is least sure of it decides: one window with the answer is enough.
        Joint head: its logit. Plain head: the score of [CLS] as start and end, minus that of the best answer."""
        if not answers:
            return question_heads.NOTHING_FOUND
        if self.settings.head == "plain":
            null = min(float(output["start_logits"][0] + output["end_logits"][0]) for output in outputs)
            return null - float(answers[0]["logit"])
        return min(float(output["null"]) for output in outputs)

    def ensemble(self, rows: Rows, examples: Examples, runs: Sequence[Sequence[Outputs]]) -> list[Prediction]:
        """The beams of joint heads have different spans, so their outputs have no mean: each answer gets its mean probability instead."""
        if self.settings.head == "plain":
            return super().ensemble(rows, examples, runs)
        members = [self.predict(rows, examples, outputs) for outputs in runs]
        return question_heads.average(members, self.settings.n_best, self.threshold)

    def submission(self, rows: Rows, predictions: Sequence[Prediction]) -> Mapping[str, Any]:
        return by_id(rows, predictions)

    def scores(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        truths = [row.get(ACCEPTED) or [answer.text for answer in true_answers(row) or []] for row in rows]
        if not self.settings.has_unanswerable:
            scores = squad1([it["prediction"] for it in predictions], truths)
        else:
            answers = [it["span"] for it in predictions], truths, [it["null_score_difference"] for it in predictions]
            scores = squad2(*answers, self.threshold)
            if self.settings.null_threshold == "dev":
                scores = squad2(*answers, self.fitted(scores).threshold)
        return {self.settings.metric: scores[self.settings.metric], **scores}

    def mistakes(self, rows: Rows, predictions: Sequence[Prediction]) -> list[Mistake]:
        wrong = []
        for number, (row, it) in enumerate(zip(rows, predictions, strict=True)):
            truths = [answer.text for answer in true_answers(row) or []]
            if normalise(it["prediction"]) not in list(map(normalise, truths or [""])):
                wrong.append(Mistake(number, truths, it["prediction"], float(it.get("score", 0.0))))
        return wrong

    def majority(self, rows: Rows) -> Answering | None:
        """Says "no answer" to every question, if that can be right."""
        nothing = {"prediction": "", "span": "", "null_score_difference": question_heads.NOTHING_FOUND}
        return (lambda asked: [nothing for _ in asked]) if self.settings.has_unanswerable else None

    def baselines(self, train: Rows) -> dict[str, Answering]:
        """The majority, and the sentence most like the question; the less it shares with it, the surer is "no answer"."""
        from electra.finetuning.baselines import MAJORITY, WORDS, LikestSentence

        likest = LikestSentence(row["context"] for row in train)

        def sentence(row: Row) -> Prediction:
            text, share = likest.answer(row["question"], row["context"])
            return {"prediction": text, "span": text, "null_score_difference": -share}

        majority = self.majority(train)
        return ({MAJORITY: majority} if majority else {}) | {WORDS: lambda rows: [sentence(row) for row in rows]}

    @property
    def threshold(self) -> float:
        """The null threshold: 0 until it is fitted."""
        return 0.0 if self.settings.null_threshold == "dev" else self.settings.null_threshold

    def fitted(self, scores: Mapping[str, float]) -> "SpanTask":
        """The same task with the threshold that was best on dev, if the settings ask for that."""
        if self.settings.null_threshold != "dev":
            return self
        return self.with_threshold(scores[f"best_{self.settings.metric}_threshold"])

    def of_seeds(self, settings: Sequence[TaskSettings]) -> "SpanTask":
        chosen = [it.null_threshold for it in settings if isinstance(it, SpanSettings) and it.null_threshold != "dev"]
        return self.with_threshold(statistics.fmean(chosen)) if chosen else self

    def with_threshold(self, threshold: float) -> "SpanTask":
        return SpanTask(self.settings.model_copy(update={"null_threshold": threshold}), self.tokenizer, self.length)


def token_span(offsets: Int[np.ndarray, "tokens 2"], answer: TrueAnswer) -> tuple[int, int] | None:
    """The first and the last token that share a character with the answer, or None. If an answer begins or ends
    inside a token ("Japan" in "japanese"), the whole token is taken."""
    first = int(np.searchsorted(offsets[:, 1], answer.start, "right"))
    last = int(np.searchsorted(offsets[:, 0], answer.start + len(answer.text), "left")) - 1
    return (first, last) if first <= last else None


def target_in(spans: Sequence[tuple[int, int] | None], first: int, size: int, position: int) -> tuple[int, int]:
    """Where the first answer that is entirely in the window starts and ends in the sequence; (0, 0) if there is none."""
    for span in spans:
        if span is not None and first <= span[0] and span[1] < first + size:
            return span[0] - first + position, span[1] - first + position
    return 0, 0


# Rows


def nested_layout(path: Path) -> Literal["squad", "mrqa"] | None:
    """Whether a file has articles of paragraphs of questions (squad) or contexts with their questions (mrqa); None for one question
    per row. Text cannot be mistaken for the key `"data"`, since quotes in it are written as \\"."""
    with open_table(path) as source:
        head = source.stream.peek(1 << 16)[: 1 << 16].lstrip()
    if head.startswith(b"{") and re.search(rb'"data"\s*:\s*\[', head):
        return "squad"
    begins = re.match(rb'\{\s*"header"\s*:', head) or re.search(rb'\A\{.*"qas"\s*:\s*\[', head.partition(b"\n")[0])
    return "mrqa" if begins else None


def read_mrqa(path: Path) -> list[Row]:
    """The questions of a file of the MRQA shared task: a header line, then one line per context. An answer is at every place where
    it was detected; scores compare with all accepted texts, which need not be in the context."""
    rows: list[Row] = []
    with open_table(path) as source:
        for number, content, problem in json_lines(source, "strict", "Convert it"):
            if problem:
                raise DataError(f"{path}: line {number} {problem}. Correct it.")
            try:
                rows += () if "header" in content else _mrqa_questions(content)
            except KeyError as error:
                raise DataError(f"{path}: line {number} has no {error.args[0]!r}. Give it as MRQA does.") from None
            except (TypeError, AttributeError, IndexError):
                raise DataError(f"{path}: line {number} is not laid out as MRQA's files are. Correct it.") from None
    if not rows:
        raise DataError(f"{path} has no questions. Check that it is the right file.")
    return rows


def _mrqa_questions(content: Mapping[str, Any]) -> Iterator[Row]:
    context = content["context"]
    for question in content["qas"]:
        row = {"id": question.get("qid") or question["id"], "question": question["question"], "context": context}
        if "detected_answers" in question:
            row["answers"] = [
                {"text": spanned(context, answer["text"], *span), "answer_start": span[0]}
                for answer in question["detected_answers"]
                for span in answer["char_spans"]
            ]
        if accepted := question.get("answers"):
            row[ACCEPTED] = [str(answer) for answer in accepted]
        yield row


def spanned(context: str, text: str, first: int, last: int) -> str:
    """The text of the answer, or what the context has from `first` to `last` inclusive if that is written differently."""
    return text if context.startswith(text, first) else context[first : last + 1]


def read_squad(path: Path) -> list[Row]:
    """The questions of SQuAD's own JSON (1.1 or 2.0), plain or compressed."""
    with open_table(path) as source:
        text = source.stream.read(MOST_JSON + 1)
    if len(text) > MOST_JSON:
        raise DataError(f"{path} is longer than {MOST_JSON >> 20} MiB. Give one question a row instead.")
    try:
        content = parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}). Correct it.") from None
    rows = list(_questions(path, content))
    if not rows:
        raise DataError(f"{path} has no questions. Check that it is the right file.")
    return rows


def _questions(path: Path, content: Any) -> Iterator[Row]:
    where = "the file"
    try:
        for a, article in enumerate(content["data"]):
            where = f"data[{a}]"
            for p, paragraph in enumerate(article["paragraphs"]):
                where = f"data[{a}].paragraphs[{p}]"
                context = paragraph["context"]
                for q, question in enumerate(paragraph["qas"]):
                    where = f"data[{a}].paragraphs[{p}].qas[{q}]"
                    row = {"id": question["id"], "question": question["question"], "context": context}
                    yield row | {key: question[key] for key in ("answers", "is_impossible") if key in question}
    except KeyError as error:
        raise DataError(f"{path}: {where} has no {error.args[0]!r}. Give it as SQuAD does.") from None
    except TypeError:
        raise DataError(f"{path}: {where} is not laid out as SQuAD's files are. Correct it.") from None


def true_answers(row: Row) -> Answers:
    """Reads a list of {text, answer_start} as in SQuAD's files, or {text: […], answer_start: […]} as in `datasets`."""
    if row.get("is_impossible"):
        return []
    match row.get("answers"):
        case None:
            return None
        case {"text": texts, "answer_start": starts}:
            return [TrueAnswer(text, start) for text, start in zip(texts, starts, strict=True)]
        case answers:
            return [TrueAnswer(answer["text"], answer["answer_start"]) for answer in answers]


def by_id(rows: Rows, predictions: Sequence[Prediction], column: str = "prediction") -> dict[str, Any]:
    """{id: answer}, as the official evaluators and the submission site read it; "" is "no answer"."""
    return {str(row["id"]): it[column] for row, it in zip(rows, predictions, strict=True)}


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:an?|the)\b")


class Pair(NamedTuple):
    """The scores of one question, or the means of many."""

    exact: float
    f1: float


def normalise(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def overlap(prediction: str, truth: str) -> float:
    """F1 = 2 |P ∩ T| / (|P| + |T|) of two normalised answers as bags of words; 0 if one is empty."""
    words, true_words = prediction.split(), truth.split()
    shared = (Counter(words) & Counter(true_words)).total()
    return 2 * shared / (len(words) + len(true_words)) if shared else 0.0


def score1(prediction: str, truths: Sequence[str]) -> Pair:
    """The score of one question by evaluator 1.1, where every question has a true answer."""
    answer, accepted = normalise(prediction), [normalise(truth) for truth in truths]
    return Pair(float(answer in accepted), max(overlap(answer, truth) for truth in accepted))


def score2(prediction: str, truths: Sequence[str]) -> Pair:
    """The score of one question by evaluator 2.0. Without a true answer only the empty one is right."""
    answer = normalise(prediction)
    accepted = [words for truth in truths if (words := normalise(truth))] or [""]
    exact = float(answer in accepted)
    return Pair(exact, max(exact, *(overlap(answer, truth) for truth in accepted)))


def mean(pairs: Sequence[Pair]) -> Pair:
    exact, f1 = zip(*pairs, strict=True)
    return Pair(math.fsum(exact) / len(pairs), math.fsum(f1) / len(pairs))


def squad1(predictions: Sequence[str], truths: Sequence[Sequence[str]]) -> dict[str, float]:
    return mean(list(map(score1, predictions, truths)))._asdict()


def squad2(
    predictions: Sequence[str], truths: Sequence[Sequence[str]], null_scores: Sequence[float], threshold: float
) -> dict[str, float]:
    """All scores of evaluator 2.0. `predictions` are the best answers found; if a null score exceeds the threshold, "no answer"
    is predicted instead. `best_…` is the score with the best threshold for these very questions: an upper bound, unless the
    threshold is then used for other questions."""
    raw, has_answer = list(map(score2, predictions, truths)), list(map(bool, truths))
    final = [
        Pair(float(not has), float(not has)) if null > threshold else pair
        for pair, has, null in zip(raw, has_answer, null_scores, strict=True)
    ]
    scores = dict(mean(final)._asdict())
    for name, value in (("has_answer", True), ("no_answer", False)):
        if group := [pair for pair, has in zip(final, has_answer, strict=True) if has is value]:
            scores |= {f"{name}_{key}": score for key, score in mean(group)._asdict().items()}
    for key in Pair._fields:
        best, at = best_threshold([getattr(pair, key) for pair in raw], has_answer, null_scores)
        scores |= {f"best_{key}": best, f"best_{key}_threshold": at}
    return scores


def best_threshold(
    scores: Sequence[float], has_answer: Sequence[bool], null_scores: Sequence[float]
) -> tuple[float, float]:
    """The best mean score that a threshold can give, and the lowest such threshold among the null scores.

    Starting from "no answer" everywhere, questions are answered in the order of their null scores. We differ from the official
    evaluator in two ways, both because no threshold reaches its number: questions with equal null scores are answered together,
    and one whose prediction is only an article (right, as it says nothing) costs nothing. The threshold that answers no
    question is 0 there, which assumes null scores above 0; here it is below all of them."""
    total = float(len(scores) - sum(has_answer))
    best, at = total, min(0.0, math.nextafter(min(null_scores), -math.inf))
    order = sorted(range(len(scores)), key=lambda question: null_scores[question])
    for question, following in zip_longest(order, order[1:]):
        total += scores[question] - (not has_answer[question])
        if total > best and (following is None or null_scores[following] > null_scores[question]):
            best, at = total, null_scores[question]
    return best / len(scores), at
