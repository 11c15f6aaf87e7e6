"""How much of a labelled table a frozen encoder already knows: logistic regression on its vectors, nothing fine-tuned."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tokenizers import Tokenizer

from electra.base.batch import SpecialIds
from electra.base.errors import DataError
from electra.base.randomness import mix
from electra.data.tables import read_rows
from electra.model.encoders import AnyEncoder

ROWS_AT_ONCE = 64


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
                raise DataError(
                    f"{path} row {number} has no {column!r}, only {known}. Name columns with --text, --label."
                )
        records.append((mix("probe", str(row[text])), str(row[text]), str(row[label])))
    records = sorted(records)[:limit]
    labels = [label for _, _, label in records]
    if len(set(labels)) < 2:
        raise DataError(
            f"{path} has {len(set(labels))} label in column {label!r}; a probe needs two or more."
        )
    return LabelledTexts([it for _, it, _ in records], np.array(labels), round(0.8 * len(records)))


def probe_accuracy(
    table: LabelledTexts, encoder: AnyEncoder, tokenizer: Tokenizer, special: SpecialIds, length: int
) -> float:
    features = text_vectors(table.texts, encoder, tokenizer, special, length)
    judge = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    judge.fit(features[: table.train], table.labels[: table.train])
    return float(judge.score(features[table.train :], table.labels[table.train :]))


def text_vectors(
    texts: list[str], encoder: AnyEncoder, tokenizer: Tokenizer, special: SpecialIds, length: int
) -> np.ndarray:
    """The last layer's vectors, averaged over the text, beside that of [CLS]. Texts are cut at `length` tokens."""
    device = next(encoder.parameters()).device
    rows = [e.ids[: length - 2] for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    vectors = np.zeros((len(rows), 2 * encoder.settings.hidden), dtype=np.float32)
    encoder.eval()
    for start in range(0, len(order), ROWS_AT_ONCE):
        part = order[start : start + ROWS_AT_ONCE]
        width = max(len(rows[row]) for row in part) + 2
        ids = torch.full((len(part), width), special.pad)
        is_real = torch.zeros(len(part), width, dtype=torch.bool)
        for place, row in enumerate(part):
            tokens = [special.cls, *rows[row], special.sep]
            ids[place, : len(tokens)] = torch.tensor(tokens)
            is_real[place, : len(tokens)] = True
        ids, is_real = ids.to(device), is_real.to(device)
        with torch.no_grad():
            hidden = encoder(ids, torch.zeros_like(ids), is_real).float()
        mean = (hidden * is_real[:, :, None]).sum(1) / is_real.sum(1, keepdim=True)
        vectors[part] = torch.cat([mean, hidden[:, 0]], 1).cpu().numpy()
    return vectors
