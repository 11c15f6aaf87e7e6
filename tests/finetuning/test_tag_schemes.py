"""Tags and spans are two spellings of one thing, and the score is the one an independent library computes."""

import json
import random
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies
from nervaluate import Evaluator

from electra.finetuning.tagging import Counts, Scheme, Span, all_tags, count_spans, fits, from_spans, legal, to_spans

SCHEMES = get_args(Scheme)

TYPES = ["PER", "LOC", "per-nam"]


@strategies.composite
def sentences(draw: strategies.DrawFn) -> tuple[list[Span], int]:
    """Any spans that do not overlap, touching or not, and the number of words."""
    place, spans = 0, []
    gap, size = strategies.integers(0, 2), strategies.integers(1, 4)
    for kind in draw(strategies.lists(strategies.sampled_from([*TYPES, ""]), max_size=5)):
        start = place + draw(gap)
        place = start + draw(size)
        spans.append(Span(kind, start, place))
    return spans, place + draw(gap)


any_tags = strategies.sampled_from(SCHEMES).flatmap(
    lambda scheme: strategies.lists(strategies.sampled_from(all_tags(TYPES, scheme)), max_size=12)
)


@given(sentences(), strategies.sampled_from(SCHEMES))
def test_spans_survive_every_scheme(sentence: tuple[list[Span], int], scheme: Scheme) -> None:
    spans, length = sentence
    tags = from_spans(spans, length, scheme)
    assert len(tags) == length and all(fits(tag, scheme) for tag in tags)
    assert to_spans(tags) == spans
    assert legal(tags, scheme) == tags


@given(sentences(), strategies.sampled_from(SCHEMES), strategies.sampled_from(SCHEMES))
def test_converting_there_and_back_changes_nothing(
    sentence: tuple[list[Span], int], one: Scheme, other: Scheme
) -> None:
    tags = from_spans(*sentence, one)
    assert legal(legal(tags, other), one) == tags


@given(any_tags, strategies.sampled_from(SCHEMES))
def test_repair_is_legal_keeps_the_spans_and_is_done_once(tags: list[str], scheme: Scheme) -> None:
    repaired = legal(tags, scheme)
    assert to_spans(repaired) == to_spans(tags)
    assert legal(repaired, scheme) == repaired
    assert [tag == "O" for tag in repaired] == [tag == "O" for tag in tags]


@pytest.mark.parametrize(
    ("scheme", "tags", "spans"),
    [
        ("iob1", "I-A I-A B-A I-B", ["A 0 2", "A 2 3", "B 3 4"]),
        ("iob2", "B-A B-A I-A O B-B", ["A 0 1", "A 1 3", "B 4 5"]),
        ("bioes", "B-A I-A E-A S-A S-B", ["A 0 3", "A 3 4", "B 4 5"]),
        ("iob2", "O I-A I-A", ["A 1 3"]),
        ("iob2", "B-A I-B", ["A 0 1", "B 1 2"]),
        ("bioes", "B-A O", ["A 0 1"]),
        ("bioes", "B-A E-A I-A", ["A 0 2", "A 2 3"]),
        ("bioes", "S-A E-A E-A", ["A 0 1", "A 1 2", "A 2 3"]),
        ("bioes", "I-A B-A E-B", ["A 0 1", "A 1 2", "B 2 3"]),
        ("iob2", "B I O I", [" 0 2", " 3 4"]),
    ],
)
def test_tags_are_read_as_conlleval_reads_them(scheme: Scheme, tags: str, spans: list[str]) -> None:
    found = to_spans(tags.split())
    assert [" ".join(map(str, span)) for span in found] == spans
    assert all(fits(tag, scheme) for tag in tags.split())


@pytest.mark.parametrize(
    ("scheme", "tags"),
    [("iob1", "I-A I-A B-A I-B O I-B"), ("iob2", "B-A I-A B-A B-B O B-B"), ("bioes", "B-A E-A S-A S-B O S-B")],
)
def test_each_scheme_marks_the_same_spans_its_own_way(scheme: Scheme, tags: str) -> None:
    spans = [Span("A", 0, 2), Span("A", 2, 3), Span("B", 3, 4), Span("B", 5, 6)]
    assert " ".join(from_spans(spans, 6, scheme)) == tags


@pytest.mark.parametrize("tag", ["", "-", "B-", "X-PER", "PER", "BI-PER", "O-PER", "o", "E-PER", "b-PER"])
def test_what_is_no_tag_of_the_scheme_is_seen(tag: str) -> None:
    assert not fits(tag, "iob2")


def as_iob2(tags: list[str]) -> list[str]:
    """nervaluate knows B- and I- only. What E- and S- say beyond that is that whatever follows is not part of them."""
    plain, over = [], True
    for tag in tags:
        mark, dash, kind = tag.partition("-")
        plain.append("O" if tag == "O" else ("B" if over or mark in "BS" else "I") + dash + kind)
        over = mark in "ES"
    return plain


def theirs(gold: list[list[str]], predicted: list[list[str]], kinds: list[str]) -> dict[str, tuple]:
    """nervaluate's strict scores, "" for all types together."""
    found = Evaluator([*map(as_iob2, gold)], [*map(as_iob2, predicted)], tags=kinds, loader="list").evaluate()
    strict = {kind: result["strict"] for kind, result in found["entities"].items()}
    return {
        kind: (result.correct, result.actual, result.possible, result.precision, result.recall, result.f1)
        for kind, result in {"": found["overall"]["strict"], **strict}.items()
    }


def ours(gold: list[list[str]], predicted: list[list[str]]) -> dict[str, tuple]:
    total, by_type = count_spans(gold, predicted)
    return {kind: (*counts, *counts.metrics.values()) for kind, counts in {"": total, **by_type}.items()}


def assert_equal_scores(gold: list[list[str]], predicted: list[list[str]], kinds: list[str]) -> None:
    mine, their = ours(gold, predicted), theirs(gold, predicted, kinds)
    assert mine.keys() == their.keys()
    for kind, values in mine.items():
        assert values == pytest.approx(their[kind], abs=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("what", ["legal", "illegal"])
def test_scores_equal_an_independent_library(scheme: Scheme, what: str) -> None:
    """2000 sentences each, of random tags; the prediction is the truth with a third of its tags drawn anew."""
    rng = random.Random(f"{scheme} {what}")
    choices = all_tags(TYPES, scheme)
    for _ in range(20):
        gold = [rng.choices(choices, k=rng.randint(1, 12)) for _ in range(100)]
        predicted = [[rng.choice(choices) if rng.random() < 0.33 else tag for tag in row] for row in gold]
        if what == "legal":
            gold, predicted = [legal(row, scheme) for row in gold], [legal(row, scheme) for row in predicted]
        assert 0 < count_spans(gold, predicted)[0].metrics["f1"] < 1
        assert_equal_scores(gold, predicted, TYPES)


@pytest.mark.parametrize(
    ("gold", "predicted"), [([["O"]], [["O"]]), ([["B-PER"]], [["O"]]), ([["O", "O"]], [["O", "B-PER"]])]
)
def test_nothing_to_find_or_nothing_found_scores_zero(gold: list, predicted: list) -> None:
    assert count_spans(gold, predicted)[0].metrics["f1"] == 0.0
    assert_equal_scores(gold, predicted, TYPES)


def test_a_span_is_right_only_as_a_whole() -> None:
    gold, predicted = [["B-PER", "I-PER", "O", "B-LOC"]], [["B-PER", "O", "O", "B-LOC"]]
    total, by_type = count_spans(gold, predicted)
    assert total == Counts(1, 2, 2) and total.metrics["f1"] == 0.5
    assert by_type == {"LOC": Counts(1, 1, 1), "PER": Counts(0, 1, 1)}


@settings(max_examples=50)
@given(strategies.lists(any_tags, min_size=1, max_size=4))
def test_the_truth_itself_scores_one(gold: list[list[str]]) -> None:
    total, _ = count_spans(gold, gold)
    assert total.metrics["f1"] == (1.0 if total.gold else 0.0)


def read(path: Path) -> list[dict]:
    with pa.CompressedInputStream(str(path), "zstd") as stream:
        return [json.loads(line) for line in stream.read().splitlines()]


def test_conll_2003_with_perturbed_tags_scores_as_the_library_says(shared_data: Path) -> None:
    gold = [row["ner_tags"] for row in read(shared_data / "tokens" / "conll2003-dev.jsonl.zst")]
    kinds = ["LOC", "MISC", "ORG", "PER"]
    choices, rng = all_tags(kinds, "iob2"), random.Random(0)
    predicted = [[rng.choice(choices) if rng.random() < 0.05 else tag for tag in row] for row in gold]
    total, by_type = count_spans(gold, predicted)
    assert {kind: c.gold for kind, c in by_type.items()} == {
        "LOC": 1837, "MISC": 922, "ORG": 1341, "PER": 1842,
    }  # fmt: skip
    assert 0.5 < total.metrics["f1"] < 0.9
    assert_equal_scores(gold, predicted, kinds)


@pytest.mark.parametrize("name", ["conll2003-train ner_tags", "conll2003-dev chunk_tags", "conll2000-test chunk_tags"])
def test_real_tags_convert_without_loss(shared_data: Path, name: str) -> None:
    file, column = name.split()
    for row in read(shared_data / "tokens" / f"{file}.jsonl.zst"):
        tags = row[column]
        assert legal(tags, "iob2") == tags
        for scheme in SCHEMES:
            assert legal(legal(tags, scheme), "iob2") == tags
