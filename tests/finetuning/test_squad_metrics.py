"""Exact match and F1: by hand, against a second implementation that shares no code and no regular expression, and
against what the official evaluators 1.1 and 2.0 printed for the two development sets."""

import math
import string
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from electra.finetuning.questions import (
    best_threshold,
    normalise,
    overlap,
    read_squad,
    score1,
    score2,
    squad1,
    squad2,
    true_answers,
)

# Words and marks that the rules are about, glued together with and without spaces.
PIECES = [
    "the", "The", "a", "A", "an", "theory", "an-a", "cat", "Cat", "1999", "１９", "don't", "“q”", "。", "…", "_", "-", ".",
    "a_b", "é", "e\u0301", "a\u0301", "İ", "ß", "²", "\u00a0", "\u3000", "\u200b", "\n", "\t", " ", "  ",
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(PIECES), max_size=7).map("".join) | st.text(max_size=12)


def words_of(text: str) -> list[str]:
    """Normalisation once more, one character at a time."""
    runs: list[list[str]] = [[]]
    for character in text.lower():
        if character in string.punctuation:
            continue
        is_word = character.isalnum()
        if runs[-1] and runs[-1][-1].isalnum() != is_word:
            runs.append([])
        runs[-1].append(character)
    joined = "".join(" " if "".join(run) in ("a", "an", "the") else "".join(run) for run in runs)
    return joined.split()


def f1_of(prediction: Sequence[str], truth: Sequence[str]) -> float:
    left = list(truth)
    for word in prediction:
        if word in left:
            left.remove(word)
    same = len(truth) - len(left)
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(truth)
    return 2 / (1 / precision + 1 / recall)


def second2(prediction: str, truths: Sequence[str]) -> tuple[float, float]:
    """Evaluator 2.0 once more."""
    ours, theirs = words_of(prediction), [words_of(truth) for truth in truths]
    kept = [truth for truth in theirs if truth] or [[]]
    best = max(f1_of(ours, truth) if truth else float(not ours) for truth in kept)
    return float(ours in kept), best


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("The Beatles", "beatles"),
        ("the THE a An", ""),
        ("theory of an anathema", "theory of anathema"),
        ("a.b", "ab"),  # punctuation goes before articles are looked for
        ("a-the", "athe"),
        ("a\u0301", "\u0301"),  # a combining mark is no part of a word, so this "a" is an article
        ("á", "á"),
        ("“quoted”, he said.", "“quoted” he said"),
        ("$1,000.50", "100050"),
        ("１９９９", "１９９９"),
        ("one\n\ttwo\u00a0three\u3000four", "one two three four"),
        ("zero\u200bwidth", "zero\u200bwidth"),
        ("under_score", "underscore"),
        ("İ", "i̇"),
        ("...", ""),
        ("", ""),
    ],
)
def test_normalisation_by_hand(raw, normal):
    assert normalise(raw) == normal


@pytest.mark.parametrize(
    ("prediction", "truths", "exact", "f1"),
    [
        ("Denver Broncos", ["The Denver Broncos!"], 1, 1),
        ("Denver", ["Denver Broncos", "the Broncos"], 0, 2 / 3),
        ("in the city of Denver", ["Denver"], 0, 0.4),
        ("New York New York", ["New York"], 0, 2 / 3),  # repeated words count as often as they are there
        ("New York", ["York New"], 0, 1),
        ("theory", ["the ory"], 0, 0),
        ("café", ["cafe"], 0, 0),
        ("“yes”", ["yes"], 0, 0),
        ("", ["Denver"], 0, 0),
        ("19", ["１９"], 0, 0),
        ("a\nb", ["a b"], 1, 1),
    ],
)
def test_both_evaluators_by_hand(prediction, truths, exact, f1):
    for score in (score1, score2):
        assert score(prediction, truths) == pytest.approx((exact, f1), abs=1e-12)


def test_the_evaluators_differ_where_nothing_remains():
    assert score1("the", ["a"]) == (1, 0)  # 1.1: the same, but no word in common
    assert score2("the", []) == (1, 1)
    assert score2("", ["the"]) == (1, 1)  # 2.0: an empty truth is none
    assert score2("", ["the", "cat"]) == (0, 0)
    assert score1("", ["the", "cat"]) == (1, 0)
    assert score2("cat", []) == (0, 0)


@given(ANSWERS)
def test_normalisation_equals_the_second_implementation(text):
    assert normalise(text).split() == words_of(text)
    assert normalise(text) == " ".join(words_of(text))


@given(ANSWERS, st.lists(ANSWERS, min_size=1, max_size=3))
def test_scores_equal_the_second_implementation(prediction, truths):
    ours, theirs = words_of(prediction), [words_of(truth) for truth in truths]
    best = max(f1_of(ours, truth) for truth in theirs)
    assert score1(prediction, truths) == pytest.approx((float(ours in theirs), best), abs=1e-12)
    assert score2(prediction, truths) == pytest.approx(second2(prediction, truths), abs=1e-12)


@given(ANSWERS, ANSWERS)
def test_scores_are_symmetric_bounded_and_agree_about_a_match(one, other):
    for score in (score1, score2):
        exact, f1 = score(one, [other])
        assert exact in (0, 1) and 0 <= f1 <= 1
        assert score(other, [one]) == (exact, f1)
        assert score(f"The {one}", [other]) == score(one, [other])
    assert score2(one, [other]).f1 == 1 or not score2(one, [other]).exact
    assert score1(one, [one]) == (1, 1 if normalise(one) else 0)


@given(ANSWERS, st.lists(ANSWERS, min_size=1), ANSWERS)
def test_another_true_answer_never_lowers_a_score(prediction, truths, another):
    assert score1(prediction, [*truths, another]) >= score1(prediction, truths)


@given(st.lists(st.sampled_from(["x", "y", "z", "the"]), max_size=9), st.randoms(use_true_random=False))
def test_f1_ignores_the_order_of_words(words, rng):
    shuffled = list(words)
    rng.shuffle(shuffled)
    truth = "x y y"
    assert overlap(normalise(" ".join(words)), truth) == overlap(normalise(" ".join(shuffled)), truth)


QUESTIONS = st.lists(
    st.tuples(st.sampled_from([0, 0.25, 0.5, 1]), st.booleans(), st.sampled_from([-2, -1.5, 0, 0.5, 3])),
    min_size=1,
    max_size=12,
)


@given(QUESTIONS)
def test_the_best_threshold_is_the_best_of_all_and_can_be_reached(questions):
    scores, has_answer, nulls = map(list, zip(*questions, strict=True))

    def reached(threshold: float) -> float:
        return sum(
            float(not has) if null > threshold else score
            for score, has, null in zip(scores, has_answer, nulls, strict=True)
        ) / len(scores)

    best, at = best_threshold(scores, has_answer, nulls)
    assert reached(at) == pytest.approx(best)
    assert best == pytest.approx(max(reached(threshold) for threshold in [-math.inf, *nulls]))


def test_the_threshold_decides_and_groups_are_reported():
    scores = squad2(["x", "x y", "z", ""], [["x"], ["x"], [], []], [-1, 2, 1, -3], threshold=1.5)
    assert scores == pytest.approx(
        {
            "exact": 0.5,  # x is right, x y is thrown away, z should have been
            "f1": 0.5,
            "has_answer_exact": 0.5,
            "has_answer_f1": 0.5,
            "no_answer_exact": 0.5,
            "no_answer_f1": 0.5,
            "best_exact": 0.75,
            "best_exact_threshold": -1,
            "best_f1": 0.75,
            "best_f1_threshold": -1,
        }
    )


def test_a_null_score_must_exceed_the_threshold():
    assert squad2(["x"], [["x"]], [0.5], threshold=0.5)["exact"] == 1
    assert squad2(["x"], [["x"]], [0.5], threshold=0.4)["exact"] == 0


def test_sets_without_one_of_the_groups_have_no_figures_for_it():
    assert "no_answer_f1" not in squad2(["x"], [["x"]], [0.0], 0.0)
    assert "has_answer_f1" not in squad2(["x"], [[]], [0.0], 0.0)


def made_up(number: int, context: str, truths: Sequence[str]) -> str:
    """Answers that are right, nearly right and wrong, by a rule that anybody can repeat."""
    truth = truths[number % len(truths)] if truths else ""
    match number % 7:
        case 0 | 1:
            return truth
        case 2:
            return f"The {truth.upper()}." if truth else "the moon"
        case 3:
            return f"{truth} of it"
        case 4:
            return " ".join(truth.split()[:1])
        case 5:
            return " ".join(context.split()[:3])
        case _:
            return "" if number % 2 else " ".join(reversed(truth.split()))


def questions(path):
    rows = read_squad(path)
    truths = [[answer.text for answer in true_answers(row)] for row in rows]
    told = [made_up(number, row["context"], them) for number, (row, them) in enumerate(zip(rows, truths, strict=True))]
    return told, truths


def test_squad_1_gets_what_the_official_evaluator_printed(shared_data):
    told, truths = questions(shared_data / "squad" / "squad1.1-dev.json.zst")
    assert len(told) == 10570
    percent = {name: 100 * value for name, value in squad1(told, truths).items()}
    assert percent == pytest.approx({"exact": 51.19205298013245, "f1": 69.73817406343615}, abs=1e-9)


def test_squad_2_gets_what_the_official_evaluator_printed(shared_data):
    """Its HasAns and NoAns are has_answer and no_answer here, its thresh threshold."""
    told, truths = questions(shared_data / "squad" / "squad2.0-dev.json.zst")
    nulls = [number * 7919 % 15013 / 15013 - 0.2468013 * bool(them) for number, them in enumerate(truths)]
    found = squad2(told, truths, nulls, threshold=0.5)
    percent = {name: value if name.endswith("threshold") else 100 * value for name, value in found.items()}
    assert percent == pytest.approx(
        {
            "exact": 58.76358123473427,
            "f1": 65.67891402963471,
            "has_answer_exact": 38.512145748987855,
            "has_answer_f1": 52.3626427587465,
            "no_answer_exact": 78.95710681244744,
            "no_answer_f1": 78.95710681244744,
            "best_exact": 59.7911227154047,
            "best_exact_threshold": 0.7194945769066808,
            "best_f1": 68.9803525706932,
            "best_f1_threshold": 0.7526658284886432,
        },
        abs=1e-9,
    )
    for prediction, them in zip(told, truths, strict=True):
        assert score2(prediction, them) == pytest.approx(second2(prediction, them), abs=1e-12)
