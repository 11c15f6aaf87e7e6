"""Exact match and F1 of answers, as SQuAD's evaluators 1.1 and 2.0 define them. Shares of one, not percent.

An answer is compared after lowering its case, dropping the 32 ASCII punctuation marks (and no others: “ and 。 stay), the
words a, an and the, and superfluous whitespace, in this order. F1 is that of the two bags of words that remain. A
question gets the best score over its true answers, a set of questions the mean.

The evaluators disagree about answers of which nothing remains. In 1.1 two of them match exactly but share no word, so
F1 is 0. In 2.0 the empty answer means "there is none": F1 is 1 if both are empty, and a true answer of which nothing
remains does not count as one.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:an?|the)\b")


class Pair(NamedTuple):
    """The scores of one question, or the means of many."""

    exact: float
    f1: float


def normalise(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def overlap(prediction: str, truth: str) -> float:
    """F1 = 2 |P ∩ T| / (|P| + |T|) of two normalised answers as bags of words; 0 where one is empty."""
    words, true_words = prediction.split(), truth.split()
    shared = (Counter(words) & Counter(true_words)).total()
    return 2 * shared / (len(words) + len(true_words)) if shared else 0.0


def score1(prediction: str, truths: Sequence[str]) -> Pair:
    """One question, evaluator 1.1. Every question has a true answer there."""
    answer, accepted = normalise(prediction), [normalise(truth) for truth in truths]
    return Pair(float(answer in accepted), max(overlap(answer, truth) for truth in accepted))


def score2(prediction: str, truths: Sequence[str]) -> Pair:
    """One question, evaluator 2.0. No true answer: only the empty one is right."""
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
    """`predictions` are the best answers found; where `null_scores` exceeds the threshold, "no answer" is predicted
    instead. `best_…` says what the best threshold for these very questions would have given: an upper bound, unless
    the threshold is then used for other questions."""
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

    Beginning with "no answer" everywhere, questions are let through in the order of their null scores. Two differences
    from the official evaluator, both because its number could not be reached: questions with equal null scores
    go through together, and one whose prediction is only an article (right, as it says nothing) costs nothing. The
    threshold that lets nothing through is 0 there, which needs null scores above 0; here it is below all of them."""
    total = float(len(scores) - sum(has_answer))
    best, at = total, min(0.0, math.nextafter(min(null_scores), -math.inf))
    order = sorted(range(len(scores)), key=lambda question: null_scores[question])
    for question, following in zip_longest(order, order[1:]):
        total += scores[question] - (not has_answer[question])
        if total > best and (following is None or null_scores[following] > null_scores[question]):
            best, at = total, null_scores[question]
    return best / len(scores), at
