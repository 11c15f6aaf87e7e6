"""Spans, the three ways to write them as one tag a word, and the score that compares them.

    words   Ada   Lovelace  met  Mary   Somerville  London
    iob1    I-PER I-PER     O    I-PER  I-PER       I-LOC     B- only where a span touches one of its own type
    iob2    B-PER I-PER     O    B-PER  I-PER       B-LOC     B- at every start
    bioes   B-PER E-PER     O    B-PER  E-PER       S-LOC     E- at the end, S- for a span of one word

Legal tags and lists of spans are the same thing: `from_spans` and `to_spans` are inverses. Illegal tags, which a network
may well produce, are read by the rule of conlleval, the program of the CoNLL shared tasks: what cannot continue a span
starts one. `legal(tags)`, which reads and writes them again, is therefore also how they are repaired and how they are
found. A tag without a type (B, I, O) is a span whose type is empty.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

Scheme = Literal["iob1", "iob2", "bioes"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
MARKS: dict[Scheme, str] = {"iob1": "BI", "iob2": "BI", "bioes": "BIES"}


class Span(NamedTuple):
    """Words `start` to `end`, the latter not included."""

    type: str
    start: int
    end: int


class Counts(NamedTuple):
    """Spans that are right (same type, same first and last word), that were predicted, and that are there."""

    correct: int
    predicted: int
    gold: int

    @property
    def precision(self) -> float:
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        return self.correct / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """2PR / (P + R); 0 where nothing is right, also where there was nothing to find, as conlleval has it."""
        return 2 * self.correct / (self.predicted + self.gold) if self.correct else 0.0


NONE = Counts(0, 0, 0)


def to_spans(tags: Iterable[str]) -> list[Span]:
    """Of any scheme, legal or not. A span ends before O, before B and S, before another type, and after E and S."""
    spans: list[Span] = []
    start, open_type = 0, None
    place = 0
    for place, tag in enumerate(tags):
        mark, _, kind = tag.partition("-")
        if open_type is not None and not (mark in ("I", "E") and kind == open_type):
            spans.append(Span(open_type, start, place))
            open_type = None
        if open_type is None and mark != "O":
            start, open_type = place, kind
        if mark in ("E", "S"):
            spans.append(Span(kind, start, place + 1))
            open_type = None
    if open_type is not None:
        spans.append(Span(open_type, start, place + 1))
    return spans


def from_spans(spans: Iterable[Span], length: int, scheme: Scheme) -> list[str]:
    """Tags of `length` words; spans are in order and do not overlap."""
    tags = ["O"] * length
    before = Span("", -1, -1)
    for span in spans:
        marks = ["I"] * (span.end - span.start)
        match scheme:
            case "iob1":
                if (before.type, before.end) == (span.type, span.start):
                    marks[0] = "B"
            case "iob2":
                marks[0] = "B"
            case "bioes":
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


def all_tags(types: Iterable[str], scheme: Scheme) -> list[str]:
    """Every tag that these types can have, O first. CoNLL-2000 has I-LST in its test part only: what a network can
    say should follow from the types, not from which combinations happened to occur in training."""
    return ["O", *(tag_of(mark, kind) for kind in sorted(types) for mark in MARKS[scheme])]


def count_spans(
    gold: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]
) -> tuple[Counts, dict[str, Counts]]:
    """Over all sentences together (micro), and by type."""
    correct: Counter[str] = Counter()
    said: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for true_tags, their_tags in zip(gold, predicted, strict=True):
        true, theirs = to_spans(true_tags), to_spans(their_tags)
        there.update(span.type for span in true)
        said.update(span.type for span in theirs)
        correct.update(span.type for span in set(true) & set(theirs))
    by_type = {kind: Counts(correct[kind], said[kind], there[kind]) for kind in sorted(said | there)}
    return Counts(correct.total(), said.total(), there.total()), by_type
