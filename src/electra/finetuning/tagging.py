"""One tag per word: named entities, chunks, parts of speech.

A word is represented by its first token, as in BERT's and the original's tagging. We differ from the original in that there is
dropout before the linear layer (it has none) and the segment is 0 (it has 1), both as in transformers' ElectraForTokenClassification,
which has the same weights; text keeps its case if the tokenizer does; sentences over the limit are split, not cut.

Spans are written as one tag per word in three ways:

    words   Ada   Lovelace  met  Mary   Somerville  London
    iob1    I-PER I-PER     O    I-PER  I-PER       I-LOC     B- only where a span touches one of its own type
    iob2    B-PER I-PER     O    B-PER  I-PER       B-LOC     B- at every start
    bioes   B-PER E-PER     O    B-PER  E-PER       S-LOC     E- at the end, S- for a span of one word

Legal tags and lists of spans are equivalent: `from_spans` and `to_spans` are inverses. Illegal tags, which a network
may well produce, are read by the rule of conlleval, the program of the CoNLL shared tasks: a tag that cannot continue a
span starts one. `legal(tags)`, which reads tags and writes them again, therefore repairs illegal tags, and finds them by
comparison. A B or I without a type belongs to a span whose type is empty.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.config import short
from electra.base.errors import DataError, SettingsError, counted
from electra.data.tables import Row, is_table, read_conll, table_format
from electra.data.tokenizer import encode_texts
from electra.finetuning import (
    SURROGATE,
    Answering,
    Example,
    Examples,
    LabelOutputs,
    Layout,
    Mistake,
    Outputs,
    Prediction,
    Problem,
    Rows,
    Splits,
    Task,
    TaskSettings,
    softmax,
)
from electra.model import EncoderSettings, token_label_head

IGNORED = -100
REMEMBERED_WORDS = 1 << 18
Scheme = Literal["iob1", "iob2", "bioes"]
GUESSED: tuple[Scheme, ...] = ("iob2", "bioes")
MARKS: dict[Scheme, str] = {"iob1": "BI", "iob2": "BI", "bioes": "BIES"}


class TaggingSettings(TaskSettings):
    """`scheme` is how spans are written in the files, and in the answers; "none" is one plain tag per word (parts of
    speech). The network may learn another one, `train_scheme`: the original converts everything to bioes first. `metric` is
    the headline, by default the f1 of spans, or accuracy if there are none. `labels` are the network's classes, in the order
    of its outputs; empty: every tag that the types in train can have. `token_column` and `tag_column` are for column files:
    every file whose name does not end in .jsonl, .json, .parquet or .csv."""

    kind: Literal["tagging"] = "tagging"
    tokens: str = "tokens"
    tags: str = "tags"
    scheme: Literal["iob1", "iob2", "bioes", "none"] = "iob2"
    train_scheme: Literal["as read", "iob1", "iob2", "bioes"] = "as read"
    metric: Literal["f1", "accuracy"] = "f1"
    length: int = Field(256, ge=8, le=1_000_000)
    token_column: int = 0
    tag_column: int = -1
    labels: tuple[str, ...] = ()

    any_file: ClassVar[bool] = True
    input_form: ClassVar[str] = "a list of texts"

    @model_validator(mode="before")
    @classmethod
    def metric_follows_scheme(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and tree.get("scheme") == "none":
            return {"metric": "accuracy", **tree}
        return tree

    @model_validator(mode="after")
    def parts_fit(self) -> "TaggingSettings":
        if self.scheme == "none" and (self.metric == "f1" or self.train_scheme != "as read"):
            raise ValueError('scheme "none" has no spans: metric must be "accuracy" and train_scheme "as read"')
        if len(set(self.labels)) < len(self.labels) or len(self.labels) == 1:
            raise ValueError("labels must be at least two different tags, or none to take those of train")
        learned = self.learned
        if learned and (wrong := [label for label in self.labels if not fits(label, learned)]):
            raise ValueError(f"labels: {wrong[0]!r} is not {described(learned)}")
        return self

    @property
    def spans(self) -> Scheme | None:
        return None if self.scheme == "none" else self.scheme

    @property
    def learned(self) -> Scheme | None:
        """The scheme of the network's labels; None for plain tags."""
        return self.spans if self.train_scheme == "as read" else self.train_scheme

    def learn(self, tags: Sequence[str]) -> list[str]:
        """Tags as read -> tags as the network learns them."""
        return list(tags) if self.train_scheme == "as read" else legal(tags, self.train_scheme)

    def build(self, tokenizer: Tokenizer, length: int, splits: Splits) -> "Tagging":
        labels = self.labels
        if not labels:  # rows may still be wrong in any way here: `problems` says so later
            tags = {tag for tag in self.tags_in(splits.get("train", ())) if isinstance(tag, str)}
            labels = tuple(sorted(tags))
            if self.spans and self.learned:
                types = {tag.partition("-")[2] for tag in tags if tag != "O" and fits(tag, self.spans)}
                labels = tuple(all_tags(types, self.learned))
        # a copy without validation: too few labels is one of those problems
        return Tagging(self.model_copy(update={"labels": labels}), tokenizer, length, labels)

    def tags_in(self, rows: Rows) -> Iterator[Any]:
        return (tag for row in rows if is_list(tags := row.get(self.tags)) for tag in tags)

    @property
    def input_columns(self) -> tuple[str, ...]:
        return (self.tokens,)

    @property
    def answer_columns(self) -> tuple[str, ...]:
        return (self.tags,)

    def is_input(self, value: Any) -> bool:
        return is_texts(value)

    def layout(self, path: Path) -> Layout:
        if not is_table(path) or table_format(path) == "tsv":
            return "columns"
        if table_format(path) == "csv":
            raise DataError(f"{path}: csv has no lists. Give .jsonl, .parquet or a file with one word per line.")
        return "table"

    @property
    def file_columns(self) -> dict[str, int]:
        return {self.tokens: self.token_column, self.tags: self.tag_column}

    def row_of(self, line: str) -> Row:
        """A row from a line of words separated by blanks."""
        return {self.tokens: line.split()}

    def read(self, path: Path) -> tuple[list[Row], dict[int, str]]:
        if self.layout(path) == "columns":
            return list(read_conll(path, self.file_columns)), {}
        return super().read(path)

    @classmethod
    def named_columns(cls, overrides: Mapping[str, Any]) -> dict[str, Any]:
        named = {{"text": "tokens", "label": "tags"}.get(key, key): value for key, value in overrides.items()}
        if isinstance(named.get("tokens"), list):
            named["tokens"], *more = named["tokens"]
            if more:
                raise SettingsError("a second text does not fit tagging: text is the column of words.")
        return named

    def row_key(self, row: Row) -> str:
        return repr(row.get(self.tokens))

    def row_classes(self, row: Row) -> set[str]:
        return set(map(str, self.tags_in([row])))

    def cut_words(self, length: int) -> str:
        return f"with a word of more than {length - 2} tokens, of which the rest is not read"


class Tagging(Task):
    settings: TaggingSettings
    architecture = "ForTokenClassification"
    columns_written = ("prediction", "spans")

    def __init__(self, settings: TaggingSettings, tokenizer: Tokenizer, length: int, labels: Sequence[str]) -> None:
        super().__init__(settings, tokenizer, length, labels)
        self.pieces = lru_cache(REMEMBERED_WORDS)(self._pieces)

    def _pieces(self, word: str) -> list[int]:
        """The ids of a word, tokenized by itself. A word of which the tokenizer leaves nothing (a control character, a lone
        accent if accents are stripped) becomes [UNK], so that every word has a first token to represent it."""
        text = word.encode("utf-8", "replace").decode()  # lone surrogates
        return encode_texts(self.tokenizer, [text], self.length)[0].ids or [self.special.unk]

    def encode(self, rows: Rows) -> tuple[list[Example], int]:
        """Long sentences become several examples and lose nothing. A row counts as cut if a single word has more tokens than
        fit: the rest of its tokens is dropped, never the whole word."""
        room = self.length - 2
        examples: list[Example] = []
        cut = 0
        for place, row in enumerate(rows):
            pieces = [self.pieces(word) for word in row[self.settings.tokens]]
            cut += any(len(ids) > room for ids in pieces)
            examples += self._examples(place, [ids[:room] for ids in pieces], self._targets(row))
        return examples, cut

    def _targets(self, row: Row) -> np.ndarray | None:
        """The label number of every word's tag; a tag without a label is ignored in the loss."""
        tags = row.get(self.settings.tags)
        if not is_texts(tags) or len(tags) != len(row[self.settings.tokens]):
            return None
        return np.array([self.numbers.get(tag, IGNORED) for tag in self.settings.learn(tags)], np.int64)

    def _examples(self, row: int, pieces: list[list[int]], tags: np.ndarray | None) -> Iterator[Example]:
        for start, end, own in split_words([len(ids) for ids in pieces], self.length - 2):
            ids, firsts = [self.special.cls], []
            for word in pieces[start:end]:
                firsts.append(len(ids))
                ids += word
            ids.append(self.special.sep)
            positions = firsts[own.start - start : own.stop - start]
            target = None
            if tags is not None:
                target = np.full(len(ids), IGNORED, np.int64)
                target[positions] = tags[own.start : own.stop]
            yield Example(ids, len(ids), row, target, (own.start, positions))

    def head(self, encoder: EncoderSettings) -> nn.Module:
        return LabelOutputs(token_label_head(encoder, len(self.labels)))

    def targets(self, examples: Examples, length: int) -> dict[str, Tensor]:
        tags = torch.full((len(examples), length), IGNORED)
        for row, example in zip(tags, examples, strict=True):
            if example.target is not None:
                row[: len(example.target)] = torch.from_numpy(example.target)
        return {"tags": tags}

    def loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        """The mean over words; the original's is the sum."""
        return F.cross_entropy(outputs["logits"].float().flatten(0, 1), targets["tags"].flatten(), ignore_index=IGNORED)

    def predict(self, rows: Rows, examples: Examples, outputs: Sequence[Outputs]) -> list[Prediction]:
        shapes = [(len(row[self.settings.tokens]), len(self.labels)) for row in rows]
        logits = [np.full(shape, np.nan, np.float32) for shape in shapes]
        for example, output in zip(examples, outputs, strict=True):
            start, positions = example.notes
            logits[example.row][start : start + len(positions)] = output["logits"][positions]
        return [self._answer(row, its) for row, its in zip(rows, logits, strict=True)]

    def _answer(self, row: Row, logits: np.ndarray) -> dict[str, Any]:
        """The most probable label of each word; where these are not legal spans, a tag that cannot continue a span starts one."""
        assert not np.isnan(logits).any(), "a word without an answer"
        tags = [self.labels[number] for number in logits.argmax(1)]
        answer: dict[str, Any] = {"prediction": tags}
        if self.settings.spans:
            answer["prediction"] = legal(tags, self.settings.spans)
            answer["spans"] = [
                {**span._asdict(), "text": " ".join(row[self.settings.tokens][span.start : span.end])}
                for span in to_spans(tags)
            ]
        by_label = [dict(zip(self.labels, share, strict=True)) for share in softmax(logits).tolist()]
        return answer | {"probabilities": by_label}

    def scores(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        """Scores between 0 and 1. Accuracy is per word; f1, precision and recall are per span, over all sentences
        together; f1 also per type (`f1 PER`), for every type that the network knows."""
        gold, predicted = self._tags(rows, predictions)
        words = zip(chain(*gold), chain(*predicted), strict=True)
        right = [one == other for one, other in words]
        accuracy = {"accuracy": sum(right) / max(1, len(right))}
        if not self.settings.spans:
            return accuracy
        total, by_type = count_spans(gold, predicted)
        types = sorted({label.partition("-")[2] for label in self.labels} - {""})
        scores = total.metrics | accuracy | {f"f1 {kind}": by_type.get(kind, Counts()).metrics["f1"] for kind in types}
        return {self.settings.metric: scores[self.settings.metric]} | scores

    def tables(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Metrics per type of span, or per plain tag, which counts as a span of one word; `rows` is how many true ones there are."""
        gold, predicted = self._tags(rows, predictions)
        if not self.settings.spans:
            gold, predicted = ([[f"S-{tag}" for tag in tags] for tags in split] for split in (gold, predicted))
        _, by_type = count_spans(gold, predicted)
        return {"per_class": [{"label": kind, **it.metrics, "rows": it.gold} for kind, it in by_type.items()]}

    def mistakes(self, rows: Rows, predictions: Sequence[Prediction]) -> list[Mistake]:
        """Sentences with a wrong tag; their confidence is that of the surest wrong tag."""
        wrong = []
        for row, (true, answer) in enumerate(zip(*self._tags(rows, predictions), strict=True)):
            shares = predictions[row].get("probabilities", [{}] * len(answer))
            sure = [own.get(tag, 0.0) for own, tag, gold in zip(shares, answer, true, strict=True) if tag != gold]
            wrong += [Mistake(row, true, answer, max(sure))] if sure else []
        return wrong

    def majority(self, rows: Rows) -> Answering:
        return self._by_words(rows)[0]

    def baselines(self, train: Rows) -> dict[str, Answering]:
        """The most frequent tag for every word; and for each word the tag that it has most often in train, if train has the word."""
        from electra.finetuning.baselines import MAJORITY, WORDS

        return dict(zip((MAJORITY, WORDS), self._by_words(train), strict=True))

    def _by_words(self, train: Rows) -> tuple[Answering, Answering]:
        words, scheme = self.settings.tokens, self.settings.spans
        by_word: dict[str, Counter[str]] = defaultdict(Counter)
        for row in train:
            for word, tag in zip(row[words], row[self.settings.tags], strict=True):
                by_word[word][tag] += 1
        ((constant, _),) = sum(by_word.values(), Counter()).most_common(1)
        likely = {word: tags.most_common(1)[0][0] for word, tags in by_word.items()}

        def answering(known: Mapping[str, str]) -> Answering:
            def answers(rows: Rows) -> list[Prediction]:
                tags = ([known.get(word, constant) for word in row[words]] for row in rows)
                return [{"prediction": legal(its, scheme) if scheme else its} for its in tags]

            return answers

        return answering({}), answering(likely)

    def one_answer(self, rows: Rows, predictions: Sequence[Prediction]) -> str:
        tags = {tag for it in predictions for tag in it["prediction"]}
        return f"every row is {tags.pop()!r}" if len(tags) == 1 else ""

    def unlearnable(self, shown: Collection[str]) -> list[str]:
        """For spans, the types that train lacks: it does not matter which tags of a type it happens to have."""
        if not self.settings.spans:
            return super().unlearnable(shown)
        types, known = ({tag.partition("-")[2] for tag in tags} - {""} for tags in (self.labels, shown))
        return sorted(types - known)

    def _tags(self, rows: Rows, predictions: Sequence[Prediction]) -> tuple[list[list[str]], list[list[str]]]:
        return [list(row[self.settings.tags]) for row in rows], [list(it["prediction"]) for it in predictions]

    def has_answers(self, split: str, rows: Rows) -> bool:
        """In test splits tags are checked only if some row has them."""
        return super().has_answers(split, rows) or any(self.settings.tags in row for row in rows)

    def row_problems(self, row: Row, answered: bool) -> Iterator[str]:
        """The first problem only, because others often follow from it."""
        return islice(self._row_problems(row, answered), 1)

    def _row_problems(self, row: Row, answered: bool) -> Iterator[str]:
        settings = self.settings
        for name in [settings.tokens, settings.tags][: 1 + answered]:
            values: Any = row.get(name)
            if not is_list(values):
                yield f"{name!r} is {short(values)}, not a list. Give a list with one text for each word."
            for place, value in enumerate(values, 1):
                if not isinstance(value, str) or SURROGATE.search(value):
                    yield f"{name!r} has {short(value)} for word {place}, not valid text. Correct it."
        if not answered:
            return
        words, tags = row[settings.tokens], row[settings.tags]

        def at(place: int) -> str:
            return f"tag {tags[place]!r} of word {place + 1} ({short(words[place])})"

        if len(words) != len(tags):
            start = short(" ".join(words))
            yield f"{counted(len(words), 'word')} but {counted(len(tags), 'tag')} (words: {start}). Give each word one tag."
        if len(words) == 0:
            yield "no words. Remove the row."
        if scheme := settings.spans:
            for place, tag in enumerate(tags):
                if not fits(tag, scheme):
                    yield f"{at(place)} is not {described(scheme)}. Correct it, or set scheme (none: plain tags)."
            for place, (tag, right) in enumerate(zip(tags, legal(tags, scheme), strict=True)):
                if tag != right:
                    after = f"after {tags[place - 1]}" if place else "at the start"
                    yield f"{at(place)} {after} must be {right} in {scheme}. Correct it, or set scheme to the file's."
        for place, tag in enumerate(settings.learn(tags)):
            if tag not in self.numbers:
                known = short(", ".join(self.labels))
                yield f"{at(place)} is not among {known}. Correct it, add it to train, or list all in labels."

    def overall_problems(self, splits: Splits, clean: bool) -> Iterator[Problem]:
        used = {repr(tag) for tag in self.settings.tags_in(splits.get("train", ()))}
        if len(used) == 1:
            text = f"every word has the tag {used.pop()}. Give at least two different tags to learn."
            yield Problem("train", 0, text)

    def answer_sample(self) -> dict[str, Any]:
        return {"spans": [{"type": "", "start": 0, "end": 0, "text": ""}]} if self.settings.spans else {}


# Words -> tokens


class Part(NamedTuple):
    """Words `start` to `end` (not included) are seen together; the answers for those in `own` are taken from this part."""

    start: int
    end: int
    own: range


def split_words(sizes: Sequence[int], room: int) -> list[Part]:
    """Parts of at most `room` tokens that begin and end between words; `sizes` are the tokens of each word, 1 to `room`.

    A part shares up to half its tokens with the one before it, and the last is as full as the others. A word in both a
    and b (a before b) belongs to b as soon as more tokens precede it in b than follow it in a: that is where the shorter
    of its two contexts is longest. With c(w) tokens before word w, the condition is c(a.end) - c(w + 1) < c(w) - c(b.start).
    Every word is in exactly one `own`; a part that would own no word, because of the last part, is left out."""
    before = np.concatenate([[0], np.cumsum(sizes)])
    bounds, start, end = [], 0, 0
    while end < len(sizes):
        end = int(np.searchsorted(before, before[start] + room, "right")) - 1
        if end == len(sizes):
            start = int(np.searchsorted(before, before[-1] - room))
        bounds.append((start, end))
        if end < len(sizes):
            shared = min(room // 2, room - sizes[end])  # the next part must reach beyond this one
            start = int(np.searchsorted(before, before[end] - shared))
    middles = before[:-1] + before[1:]
    borders = [
        int(np.searchsorted(middles, before[end] + before[start], "right")) for (_, end), (start, _) in pairwise(bounds)
    ]
    owned = map(range, [0, *borders], [*borders, len(sizes)])
    return [Part(*bound, own) for bound, own in zip(bounds, owned, strict=False) if own]


# Spans and tags


class Span(NamedTuple):
    """Words `start` to `end` (not included) and their type."""

    type: str
    start: int
    end: int


class Counts(NamedTuple):
    """Numbers of spans: correct ones (same type, same first and last word), predicted ones, and true ones."""

    correct: int = 0
    predicted: int = 0
    gold: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """F1 = 2PR / (P + R); 0 if no span is right, even if there was none to find, as in conlleval."""
        precision, recall = self.correct / max(1, self.predicted), self.correct / max(1, self.gold)
        return {"precision": precision, "recall": recall, "f1": 2 * self.correct / max(1, self.predicted + self.gold)}


def to_spans(tags: Iterable[str]) -> list[Span]:
    """The spans of tags in any scheme, legal or not. A span ends before O, before B and S, before another type, and after E and S."""
    spans: list[Span] = []
    start, open_type = 0, None
    for place, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        if open_type is not None and not (mark in ("I", "E") and kind == open_type):
            spans.append(Span(open_type, start, place))
            open_type = None
        if open_type is None and mark != "O":
            start, open_type = place, kind
        if mark in ("E", "S"):
            spans.append(Span(kind, start, place + 1))
            open_type = None
    return spans


def from_spans(spans: Iterable[Span], length: int, scheme: Scheme) -> list[str]:
    """The tags of `length` words with these spans, which are in order and do not overlap."""
    tags = ["O"] * length
    before = Span("", -1, -1)
    for span in spans:
        marks = ["I"] * (span.end - span.start)
        if scheme == "iob2" or (scheme == "iob1" and (before.type, before.end) == (span.type, span.start)):
            marks[0] = "B"
        elif scheme == "bioes":
            marks[0], marks[-1] = ("B", "E") if len(marks) > 1 else ("S", "S")
        tags[span.start : span.end] = [tag_of(mark, span.type) for mark in marks]
        before = span
    return tags


def tag_of(mark: str, kind: str) -> str:
    return f"{mark}-{kind}" if kind else mark


def legal(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """The same spans, written by the rules of `scheme`: converts, and repairs what is illegal."""
    return from_spans(to_spans(tags), len(tags), scheme)


def fits(tag: str, scheme: Scheme) -> bool:
    """Whether a tag by itself can occur in the scheme."""
    mark, dash, kind = tag.partition("-")
    return tag == "O" or (len(mark) == 1 and mark in MARKS[scheme] and bool(dash) == bool(kind))


def guess_scheme(tags: Collection[str]) -> str:
    """The first scheme that all tags fit; else iob2 if any tag is marked as part of a span, or "none" for parts of speech and the like."""
    marked = any("-" in tag and fits(tag, "bioes") for tag in tags)
    fitting = next((it for it in GUESSED if all(fits(tag, it) for tag in tags)), None)
    return fitting or ("iob2" if marked else "none")


def all_tags(types: Iterable[str], scheme: Scheme) -> list[str]:
    """Every tag that these types can have, O first. CoNLL-2000 has I-LST in its test part only: what a network can
    answer should follow from the types, not from which combinations happened to occur in training."""
    return ["O", *(tag_of(mark, kind) for kind in sorted(types) for mark in MARKS[scheme])]


def count_spans(gold: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> tuple[Counts, dict[str, Counts]]:
    """Counts spans over all sentences together (micro), and per type."""
    right, answered, true = Counter[str](), Counter[str](), Counter[str]()
    for true_tags, tags in zip(gold, predicted, strict=True):
        true_spans, spans = to_spans(true_tags), to_spans(tags)
        true.update(span.type for span in true_spans)
        answered.update(span.type for span in spans)
        right.update(span.type for span in set(true_spans) & set(spans))
    by_type = {kind: Counts(right[kind], answered[kind], true[kind]) for kind in sorted(answered | true)}
    return Counts(right.total(), answered.total(), true.total()), by_type


def is_list(values: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(values, list | tuple | np.ndarray)


def is_texts(values: Any) -> TypeGuard[Sequence[str]]:
    return is_list(values) and all(isinstance(value, str) for value in values)


def described(scheme: Scheme) -> str:
    return f"a tag of {scheme} (O, {', '.join(f'{mark}-TYPE' for mark in MARKS[scheme])})"
