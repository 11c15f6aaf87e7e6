"""A probe: how well a logistic regression on the vectors of a frozen encoder learns a labelled table."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from electra.base.errors import DataError, counted
from electra.base.randomness import mix
from electra.data.tables import read_rows
from electra.inspector.embed import text_vectors
from electra.interop.read import Pretrained


@dataclass(frozen=True)
class LabelledTexts:
    texts: list[str]
    labels: np.ndarray
    train: int
    """The number of rows, from the beginning, to learn from; the others are scored."""

    @property
    def digest(self) -> str:
        whole = "\x1f".join((*self.texts, *self.labels.tolist()))
        return hashlib.sha256(whole.encode()).hexdigest()


def read_labelled(path: Path, text: str, label: str, limit: int) -> LabelledTexts:
    """Reads at most `limit` rows, chosen by their hash; a fifth of them is held out."""
    records = []
    for number, row in enumerate(read_rows(path), 1):
        for column in (text, label):
            if column not in row:
                known = ", ".join(row)
                raise DataError(f"{path} row {number} has no {column!r}, only {known}. Name its columns (text, label).")
            if row[column] is None:
                raise DataError(f"{path} row {number} has nothing in its {column!r}. Fill it in, or leave the row out.")
        records.append((mix("probe", str(row[text])), str(row[text]), str(row[label])))
    records = sorted(records)[:limit]
    labels = [label for _, _, label in records]
    train = round(0.8 * len(records))
    if len(set(labels[:train])) < 2 or train == len(records):
        raise DataError(
            f"{path} has {counted(len(records), 'row')}, of which the {train:,} to learn from have {len(set(labels[:train]))} label in column "
            f"{label!r}; a probe needs two or more, and a row to be evaluated on. Give it more rows."
        )
    # as objects: in an array of strings every element takes the space of the longest
    return LabelledTexts([it for _, it, _ in records], np.array(labels, dtype=object), train)


def probe_accuracy(table: LabelledTexts, network: Pretrained, length: int) -> float:
    """Accuracy from the mean of the last layer's vectors concatenated with that of [CLS]. Texts are cut at `length` tokens."""
    features = np.concatenate(text_vectors(network, table.texts, length), axis=1)
    judge = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    judge.fit(features[: table.train], table.labels[: table.train])
    return float(judge.score(features[table.train :], table.labels[table.train :]))
