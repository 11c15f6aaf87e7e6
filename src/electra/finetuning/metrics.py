"""The figures of classification and regression, computed by scikit-learn and scipy; sklearn is imported when asked for."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Metric = Literal["accuracy", "f1", "f1_macro", "f1_micro", "mcc", "pearson", "spearman", "mse"]
METRICS: dict[str, tuple[Metric, ...]] = {
    "classification": ("accuracy", "f1", "f1_macro", "f1_micro", "mcc"),
    "multilabel": ("f1_micro", "f1_macro", "accuracy"),
    "regression": ("spearman", "pearson", "mse"),
}
"""What each kind has; its first is the headline unless the task names another."""


def class_scores(gold: np.ndarray, predicted: np.ndarray, classes: int) -> dict[str, float]:
    """`f1` is that of the second of two classes, which GLUE calls positive. F1 over classes counts those of the task,
    also one that is absent from this data. Micro F1 of single labels is accuracy and is left out for two classes."""
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    every = list(range(classes))
    scores = {"accuracy": float(accuracy_score(gold, predicted))}
    if classes == 2:
        scores["f1"] = float(f1_score(gold, predicted, pos_label=1, zero_division=0))
    scores["f1_macro"] = float(f1_score(gold, predicted, labels=every, average="macro", zero_division=0))
    scores["f1_micro"] = float(f1_score(gold, predicted, labels=every, average="micro", zero_division=0))
    alone = len(np.union1d(gold, predicted)) < 2  # a correlation with nothing, which counts as 0
    scores["mcc"] = 0.0 if alone else float(matthews_corrcoef(gold, predicted))
    return scores


def multilabel_scores(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Rows x labels of 0 and 1. Accuracy asks for every label of a row to be right."""
    from sklearn.metrics import accuracy_score, f1_score

    return {
        "f1_micro": float(f1_score(gold, predicted, average="micro", zero_division=0)),
        "f1_macro": float(f1_score(gold, predicted, average="macro", zero_division=0)),
        "accuracy": float(accuracy_score(gold, predicted)),
    }


def regression_scores(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Correlations with a constant are undefined; they count as 0, so that a collapsed run has a score."""
    from scipy.stats import pearsonr, spearmanr

    varies = len(gold) > 1 and np.ptp(gold) > 0 and np.ptp(predicted) > 0
    return {
        "spearman": float(spearmanr(gold, predicted).statistic) if varies else 0.0,
        "pearson": float(pearsonr(gold, predicted).statistic) if varies else 0.0,
        "mse": float(np.mean((gold - predicted) ** 2)),
    }


def per_class(gold: Sequence[Any], predicted: Sequence[Any], labels: Sequence[str]) -> list[dict[str, Any]]:
    from sklearn.metrics import precision_recall_fscore_support

    numbers = list(range(len(labels)))
    columns = precision_recall_fscore_support(gold, predicted, labels=numbers, zero_division=0)
    return [
        {"label": label, "precision": float(p), "recall": float(r), "f1": float(f), "rows": int(n)}
        for label, p, r, f, n in zip(labels, *columns, strict=True)
    ]


def confusion(gold: Sequence[int], predicted: Sequence[int], classes: int) -> list[list[int]]:
    """Rows are the true classes, columns the predicted ones."""
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (np.asarray(gold, np.int64), np.asarray(predicted, np.int64)), 1)
    return [[int(value) for value in row] for row in matrix]
