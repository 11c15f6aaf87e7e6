"""How much of a labelled table a frozen encoder already knows: logistic regression on its vectors, nothing fine-tuned."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from electra.base.errors import DataError
from electra.base.randomness import mix
from electra.data.tables import read_rows
from electra.inspector.detect import text_vectors
from electra.interop.read import Pretrained


@dataclass(frozen=True)
class LabelledTexts:
    texts: list[str]
    labels: np.ndarray
    train: int
    """So many from the beginning are to learn from, the others to be judged by."""

    @property
    def digest(self) -> str:
        whole = "\x1f".join((*self.texts, *self.labels.tolist()))
        return hashlib.sha256(whole.encode()).hexdigest()


def read_labelled(path: Path, text: str, label: str, limit: int) -> LabelledTexts:
    """Of more than `limit` rows, `limit` chosen by their hash; a fifth of them is held out."""
    records = []
    for number, row in enumerate(read_rows(path), 1):
        for column in (text, label):
            if row.get(column) is None:
                known = ", ".join(row)
                raise DataError(f"{path} row {number} has no {column!r}, only {known}. Name its columns (text, label).")
        records.append((mix("probe", str(row[text])), str(row[text]), str(row[label])))
    records = sorted(records)[:limit]
    labels = [label for _, _, label in records]
    if len(set(labels)) < 2:
        raise DataError(f"{path} has {len(set(labels))} label in column {label!r}; a probe needs two or more.")
    return LabelledTexts([it for _, it, _ in records], np.array(labels), round(0.8 * len(records)))


def probe_accuracy(table: LabelledTexts, network: Pretrained, length: int) -> float:
    """On the mean of the last layer's vectors beside that of [CLS]. Texts are cut at `length` tokens."""
    features = np.concatenate(text_vectors(network, table.texts, length), axis=1)
    judge = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    judge.fit(features[: table.train], table.labels[: table.train])
    return float(judge.score(features[table.train :], table.labels[table.train :]))
