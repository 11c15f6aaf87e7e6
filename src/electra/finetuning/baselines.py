"""What a score must be held against: one answer for every row, and what the words alone say.

"words" is TF-IDF of words and pairs of words under a logistic regression (ridge for numbers); of two texts also the
products of their weights and the sum of those, their cosine, without which it could not say whether they are alike. Where a
script has no spaces each character is a word. In tagging it is the tag that a word has most often in train. Seconds of work,
done once for each task.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from electra.base.files import read_or_set_aside, write_json
from electra.finetuning import Rows, Splits, Task

MAJORITY, WORDS, UNTRAINED = "majority", "words", "untrained"
BASELINES = {
    MAJORITY: "the most frequent answer of train for every row (numbers: their mean)",
    WORDS: "TF-IDF with logistic regression (numbers: ridge; tags: the word's most frequent one)",
    UNTRAINED: "the same network from random weights, at the rate that is best on dev",
}
UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Thai, Lao, kana and Chinese characters."""
MOST_ROWS = MOST_WORDS = 50_000
READ_CHARACTERS = 1 << 16
LOOSENESS = 10.0
"""What scikit-learn calls C in a logistic regression; in ridge its inverse is alpha."""

Scores = dict[str, dict[str, dict[str, float]]]
"""split -> baseline -> metrics."""


def baseline_scores(folder: Path, data_sha256: str, task: Task, train: Rows, others: Splits) -> Scores:
    """On every one of the other splits. Kept in the folder for as long as the data are the same; of train at most
    MOST_ROWS are read."""
    path = folder / "baselines.json"
    stored = read_or_set_aside(path) or {}
    if stored.get("data_sha256") != data_sha256 or not isinstance(stored.get("scores"), dict):
        answering = task.baselines(train[:: -(-len(train) // MOST_ROWS)])
        scores = {
            split: {name: task.scores(rows, answers(rows)) for name, answers in answering.items()}
            for split, rows in others.items()
        }
        stored = {"data_sha256": data_sha256, "scores": scores}
        write_json(path, stored)
    found: Scores = stored["scores"]
    return found


def beginning(text: str) -> str:
    """A cell of 20 MB would cost a gigabyte; the network reads far less of it."""
    return text[:READ_CHARACTERS].lower()


class WordModel:
    """Texts, one or two a row, -> targets: numbers of classes, rows x labels of 0 and 1, or quantities."""

    def __init__(self, kind: str, texts: Sequence[tuple[str, ...]], targets: np.ndarray):
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.multiclass import OneVsRestClassifier
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        token = rf"[{UNSPACED}]|[^\W{UNSPACED}]+"
        self.weights = TfidfVectorizer(
            preprocessor=beginning, token_pattern=token, ngram_range=(1, 2), max_features=MOST_WORDS
        )
        self.weights.fit([text for row in texts for text in row] + ["word"])  # texts without a word are no error
        classes = LogisticRegression(C=LOOSENESS, max_iter=200)
        linear = {"classification": classes, "multilabel": OneVsRestClassifier(classes)}
        self.linear = linear.get(kind) or Ridge(alpha=1 / LOOSENESS, solver="lsqr")
        with warnings.catch_warnings(), threadpool_limits(1):  # small products, which threads only slow down
            warnings.simplefilter("ignore")  # not converged in 200 rounds, or a label that no row has
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
