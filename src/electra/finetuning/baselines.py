"""Baselines for every score: one answer for all rows, and what the words alone tell.

"words" is TF-IDF of words and pairs of words under a logistic regression (ridge for numbers); of two texts also the
products of their weights and the sum of those, their cosine, without which it could not tell whether they are alike. In scripts
without spaces each character is a word. In tagging it is the tag that a word has most often in train; for questions, the
sentence that is most like the question. This takes seconds and is done once per task. The module also warns about results that
look ordinary and are not, as pre-training does (objectives.metrics).
"""

import math
import re
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from electra.base.config import Figure, short
from electra.base.errors import counted
from electra.base.files import read_shaped_or_set_aside, write_json
from electra.data.filters import normalised
from electra.finetuning import LOWER_IS_BETTER, Prediction, Rows, Splits, Task, merit

MAJORITY, WORDS, UNTRAINED = "majority", "words", "untrained"
BASELINES = {
    MAJORITY: "the most frequent answer of train for every row (numbers: their mean)",
    WORDS: "TF-IDF with logistic regression (numbers: ridge; tags: the word's most frequent one; questions: the likest sentence)",
    UNTRAINED: "the same network from random weights, at the rate that is best on dev",
}
UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Thai, Lao, kana and Chinese characters."""
TOKEN = rf"[{UNSPACED}]|[^\W{UNSPACED}]+"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
MOST_ROWS = MOST_WORDS = 50_000
READ_CHARACTERS = 1 << 16
LOOSENESS = 10.0
"""C of scikit-learn's logistic regression; its inverse is alpha of the ridge."""

Scores = dict[str, dict[str, dict[str, Figure]]]
"""split -> baseline -> metrics."""
LOGGED_ENOUGH = 10
"""With fewer logged losses nothing is said about their course."""
FALLS = 0.97
"""A loss that ends above this fraction of its start does not fall."""
BY_HEART = 0.25
"""If the loss ends below this fraction of its start and dev is worse than the majority, train was learned by heart."""
CUT_SHARE = SLIPS = 0.01
TOO_GOOD = 0.99
"""The score that words alone reach on rows they have seen, or where one word is the label itself."""
ENOUGH_ROWS = 100
"""Rows that dev should have: with fewer, chance moves an accuracy by five points or more."""
LONGER = "Train longer (epochs, min_steps), try other rates (lr), or give it more rows."
MEMORISED = "Give it more rows, or an encoder that was pre-trained longer or on text like this."
TRY = "Try other rates (lr), more epochs or fewer (keep=best), or give it more rows."


@dataclass(frozen=True)
class StoredBaselines:
    data_sha256: str
    scores: Scores


def baseline_scores(folder: Path, data_sha256: str, task: Task, train: Rows, others: Splits) -> Scores:
    """The scores of the baselines on all other splits. They are kept in the folder as long as the data stay the same; at most
    MOST_ROWS rows of train are read."""
    path = folder / "baselines.json"
    stored = read_shaped_or_set_aside(path, TypeAdapter(StoredBaselines))
    if stored is None or stored.data_sha256 != data_sha256 or stored.scores.keys() != others.keys():
        answering = task.baselines(train[:: -(-len(train) // MOST_ROWS)])
        scores = {
            split: {name: task.scores(rows, answers(rows)) for name, answers in answering.items()}
            for split, rows in others.items()
        }
        stored = StoredBaselines(data_sha256, scores)
        write_json(path, asdict(stored))
    return stored.scores


def beginning(text: str) -> str:
    """The first characters of a text, in lower case: a cell of 20 MB would cost a gigabyte, and the network reads far less of it."""
    return text[:READ_CHARACTERS].lower()


class WordModel:
    """A linear model of TF-IDF features, from one or two texts per row to class numbers, rows x labels of 0 and 1, or quantities."""

    def __init__(self, kind: str, texts: Sequence[tuple[str, ...]], targets: np.ndarray):
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.multiclass import OneVsRestClassifier
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        self.weights = TfidfVectorizer(
            preprocessor=beginning, token_pattern=TOKEN, ngram_range=(1, 2), max_features=MOST_WORDS
        )
        self.weights.fit([text for row in texts for text in row] + ["word"])  # texts without any word must not fail
        classes = LogisticRegression(C=LOOSENESS, max_iter=200)
        linear = {"classification": classes, "multilabel": OneVsRestClassifier(classes)}
        self.linear = linear.get(kind) or Ridge(alpha=1 / LOOSENESS, solver="lsqr")
        with warnings.catch_warnings(), threadpool_limits(1):  # threads only slow down such small products
            warnings.simplefilter("ignore")  # not converged in 200 iterations, or a label that no row has
            self.linear.fit(self.features(texts), targets)

    def features(self, texts: Sequence[tuple[str, ...]]) -> Any:
        from scipy.sparse import csr_matrix, hstack

        first, *second = (self.weights.transform(column) for column in zip(*texts, strict=True))
        if not second:
            return first
        products = first.multiply(second[0]).tocsr()
        return hstack([first, *second, products, csr_matrix(products.sum(1))], format="csr")

    def predict(self, texts: Sequence[tuple[str, ...]]) -> np.ndarray:
        return np.asarray(self.linear.predict(self.features(texts)))


class LikestSentence:
    """Answers a question with the sentence of its context whose words in common with the question weigh most. A word weighs
    log(n / contexts with the word), n being the number of contexts. F1 on dev of SQuAD 1.1 is 0.19: it points at the right place only."""

    def __init__(self, contexts: Iterable[str]):
        different = set(contexts)
        self.count = 1 + len(different)
        self.contexts_with = Counter(word for text in different for word in words_of(text))

    def weight(self, words: Iterable[str]) -> float:
        return sum(math.log(self.count / (1 + self.contexts_with[word])) for word in sorted(words))

    def answer(self, question: str, context: str) -> tuple[str, float]:
        """The sentence, and the fraction of the question's weight that it shares."""
        asked = words_of(question)
        sentences = SENTENCE_END.split(context[:READ_CHARACTERS])
        shared = [self.weight(asked & words_of(sentence)) for sentence in sentences]
        best = shared.index(max(shared))
        return sentences[best].strip(), shared[best] / (self.weight(asked) or 1.0)


def words_of(text: str) -> set[str]:
    return set(re.findall(TOKEN, beginning(text)))


# Warnings


def label_alarms(task: Task, splits: Splits) -> list[str]:
    """Warnings before training: labels that look like two spellings of one, labels without a row in train, texts with several labels,
    a dev split on which a score is undefined, and a test split that will not be scored because some of its rows have no known label."""
    alike: dict[str, list[str]] = {}
    for label in task.labels:
        alike.setdefault(normalised(label), []).append(label)
    texts = [
        f"the labels {' and '.join(map(repr, names))} look alike but are learned as {len(names)} classes. If they are "
        "the same, spell them the same way in the table."
        for names in alike.values()
        if len(names) > 1
    ]
    shown = {name for row in splits["train"] for name in task.settings.row_classes(row)}
    if absent := [label for label in task.unlearnable(shown) if shown]:
        names = ", ".join(map(repr, absent[:8])) + " …" * (len(absent) > 8)
        texts.append(
            f"train has no row of {names}: it will never be predicted. Add such rows, or leave it out of labels."
        )
    texts += several_answers(task, splits["train"]) if task.settings.kind in ("classification", "multilabel") else []
    texts += [f"dev: {text}"] if (text := task.undefined(splits.get("dev", ()))) else []
    for split in splits if task.settings.kind == "classification" else ():
        unknown = [
            n for n, row in enumerate(splits[split], 1) if not {*task.settings.row_classes(row)} & {*task.labels}
        ]
        if split not in ("train", "dev") and 0 < len(unknown) < len(splits[split]):
            rows = f"{len(unknown)} of {len(splits[split]):,} rows have no label that train knows"
            texts.append(f"{split} is not scored: {rows} (the first is row {unknown[0]}). Correct them.")
    return texts


def several_answers(task: Task, train: Rows) -> list[str]:
    """Warns if more texts of train than a slip would explain appear with different labels, which no network can learn."""
    answers: dict[str, set[frozenset[str]]] = {}
    for row in train:
        answers.setdefault(task.settings.row_key(row), set()).add(frozenset(task.settings.row_classes(row)))
    texts = [text for text, labels in answers.items() if len(labels) > 1]
    if len(texts) <= max(1, SLIPS * len(answers)):
        return []
    first = short(texts[0].split("\x1f")[0])
    remedy = "Decide on one for each, or join those that hold together in one row (kind=multilabel)."
    return [f"{len(texts):,} texts of train, such as {first}, have several answers: not all can be learned. {remedy}"]


def run_alarms(
    task: Task, rows: Rows, predictions: Sequence[Prediction], scores: Mapping[str, float], losses: Sequence[float]
) -> list[str]:
    """Warnings about one seed, from its answers on dev, their scores, and its losses in order."""
    texts = []
    answer = task.one_answer(rows, predictions)
    if answer and not is_perfect(*next(iter(scores.items()))):
        texts.append(f"the answer to {answer}: nothing was learned that tells rows apart. {LONGER}")
    first, last = first_and_last(losses)
    if last > FALLS * first:
        texts.append(f"the loss does not fall ({first:.3f} at first, {last:.3f} at last). {LONGER}")
    return texts


def is_perfect(metric: str, score: float) -> bool:
    return score == (0 if metric in LOWER_IS_BETTER else 1)


def majority_alarms(scores: Mapping[str, float], majority: Mapping[str, float]) -> list[str]:
    """Warns if the headline score on a file is no better than that of the file's own most frequent answer."""
    metric, score = next(iter(scores.items()))
    if is_perfect(metric, score) or merit(metric, score) > merit(metric, majority[metric]):
        return []
    levels = f"{metric} {score:.4f}, {MAJORITY} {majority[metric]:.4f}"
    return [f"no better than always giving the most frequent answer of this file ({levels}). {TRY}"]


def first_and_last(losses: Sequence[float]) -> tuple[float, float]:
    """The means of the first and the last fifth, or nan if there are too few losses to tell."""
    if len(losses) < LOGGED_ENOUGH:
        return math.nan, math.nan
    fifth = len(losses) // 5
    return statistics.fmean(losses[:fifth]), statistics.fmean(losses[-fifth:])


def result_alarms(result: Mapping[str, Any]) -> list[str]:
    """Warnings about all seeds: a baseline that is better, a small dev set, cut rows. `result["losses"]`: the first and the last."""
    texts = []
    metric, median, (first, last) = result["metric"], result["median"], result["losses"]
    levels = {name: scores[metric] for name, scores in result["baselines"]["dev"].items()}
    ahead = {name: merit(metric, level) - merit(metric, median) for name, level in levels.items()}
    better = [f"{name} {levels[name]:.4f}" for name, by in ahead.items() if by > 0]
    if ahead.get(MAJORITY, 0) > 0 and last < BY_HEART * first:
        texts.append(
            f"worse than {' and '.join(better)}, though the loss fell from {first:.3f} to {last:.3f}: the rows of train were "
            f"memorised, and nothing was learned that generalises. {MEMORISED}"
        )
    elif ahead.get(MAJORITY, 0) > 0:
        texts.append(f"worse than {' and '.join(better)}: next to nothing was learned. {TRY}")
    elif ahead.get(UNTRAINED, 0) > (result["sd"] or 0):
        texts.append(
            f"worse than {' and '.join(better)}: pre-training does not help here. Pre-train longer, on text like that of "
            "the task, or try other settings (lr, pooling, layer_decay, reinitialise)."
        )
    elif ahead.get(WORDS, 0) > 0:
        texts.append(f"worse than {' and '.join(better)}: a count of words does better. {TRY} Or pre-train longer.")
    if metric not in LOWER_IS_BETTER and levels.get(MAJORITY, 0) < TOO_GOOD <= levels.get(WORDS, 0):
        texts.append(
            f"{WORDS} {levels[WORDS]:.4f}: dev rows seem to be in train, or one word gives the answer away. Look at rows of both."
        )
    cut, of = result["cut"].get("dev", (0, 0))
    if 0 < of < ENOUGH_ROWS:
        texts.append(
            f"dev has only {counted(of, 'row')}: differences of a few points are chance. Score it on more rows."
        )
    if cut > CUT_SHARE * of:
        texts.append(f"{cut:,} of {of:,} dev rows {result['cut_words']}. {result['cut_remedy']}")
    return texts
