"""Classification of one text or of two: one label, several labels, or a number.

The head of transformers (dropout, dense, GELU, dropout, output) is the default, so that exports load there; "linear" is
the original's: dropout and one dense layer. Both start from Glorot's distribution, as every fine-tuning head of the
original does. The loss is the mean over the batch; the original's is the sum, which its clipping to norm 1 undoes.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.data.columns import column_of, label_list, label_name, number, read_label
from electra.data.tables import Row
from electra.data.tokenizer import special_ids
from electra.finetuning import metrics
from electra.finetuning.class_rows import ClassificationSettings, row_texts, table_problems
from electra.finetuning.heads import LinearHead, ModernBertHead, TransformersHead
from electra.finetuning.task import Example, Outputs
from electra.model.electra import EncoderSettings
from electra.model.encoders import AnySettings
from electra.model.modern import ModernBertSettings


def build_classification(
    settings: ClassificationSettings,
    tokenizer: Tokenizer,
    length: int,
    rows_by_split: Mapping[str, Sequence[Row]],
) -> "Classification":
    """Labels that the settings leave open are those of the training rows."""
    guessed = settings.kind != "regression" and not settings.labels
    if guessed:
        names: set[str] = set()
        for row in rows_by_split.get("train", ()):
            value = read_label(row, column_of(settings.label, row))
            if settings.kind == "multilabel":
                names.update(label_list(value, settings.separator) if value is not None else ())
            elif value is not None:
                names.add(label_name(value))
        ordered = sorted(names, key=lambda name: (number(name) is None, number(name) or 0.0, name))
        # a copy without validation: too few labels is a problem of the data, which `problems` reports
        settings = settings.model_copy(update={"labels": tuple(ordered)})
    return Classification(settings, tokenizer, length, guessed)


class Classification:
    """A `Task`."""

    def __init__(
        self, settings: ClassificationSettings, tokenizer: Tokenizer, length: int, guessed: bool = False
    ):
        self.settings, self.tokenizer, self.length, self.guessed = settings, tokenizer, length, guessed
        self.special = special_ids(tokenizer)
        tokenizer.encode_special_tokens = True  # a text that says "[SEP]" means the word
        self.labels = settings.labels
        self.numbers = {name: index for index, name in enumerate(settings.labels)}
        self.architecture = "ForSequenceClassification" if settings.head == "transformers" else ""

    @property
    def outputs(self) -> int:
        return 1 if self.settings.kind == "regression" else len(self.labels)

    def problems(self, splits: Mapping[str, Sequence[Row]]) -> list[str]:
        return table_problems(self.settings, splits, self.guessed)

    def texts(self, row: Row) -> tuple[str, ...]:
        return row_texts(self.settings, row)

    # Rows -> examples

    def training_rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Both orders of every pair, where order has no meaning."""
        if not self.settings.double_unordered:
            return rows
        first, second = (column_of(name, rows[0]) for name in self.settings.text)
        return [*rows, *({**row, first: row[second], second: row[first]} for row in rows)]

    def encode(self, rows: Sequence[Row]) -> tuple[list[Example], int]:
        """[CLS] A [SEP] (B [SEP]); of a pair that is too long the longer text is cut first, from its end."""
        pieces = []
        columns = zip(*(self.texts(row) for row in rows), strict=True) if rows else ()
        for column in columns:
            encodings = self.tokenizer.encode_batch_fast(list(column), add_special_tokens=False)
            pieces.append([encoding.ids for encoding in encodings])
        examples, cut = [], 0
        room = self.length - 1 - len(self.settings.text)
        for index, (row, parts) in enumerate(zip(rows, zip(*pieces, strict=True), strict=True)):
            kept = fit([len(part) for part in parts], room)
            cut += kept != [len(part) for part in parts]
            ids = array("i", [self.special.cls])
            for part, size in zip(parts, kept, strict=True):
                ids.extend([*part[:size], self.special.sep])
            examples.append(Example(ids, 2 + kept[0], index, self.target(row)))
        return examples, cut

    def target(self, row: Row) -> Any:
        value = read_label(row, column_of(self.settings.label, row))
        match self.settings.kind:
            case "regression":
                found = number(value)
                return None if found is None else found / self.settings.scale
            case "multilabel":
                if column_of(self.settings.label, row) not in row:
                    return None
                names = label_list(value, self.settings.separator) if value is not None else []
                return [float(name in names) for name in self.labels]
            case "classification":
                return None if value is None else self.numbers.get(label_name(value))

    # The network's side

    def head(self, encoder: AnySettings) -> nn.Module:
        match self.settings.head, encoder:
            case "transformers", EncoderSettings():
                return TransformersHead(encoder, self.outputs)
            case "transformers", ModernBertSettings():
                return ModernBertHead(encoder, self.outputs)
        return LinearHead(encoder, self.outputs)

    def targets(self, examples: Sequence[Example], length: int) -> dict[str, Tensor]:
        kind = torch.long if self.settings.kind == "classification" else torch.float32
        return {"labels": torch.tensor([example.target for example in examples], dtype=kind)}

    def loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        logits, labels = outputs["logits"].float(), targets["labels"]
        match self.settings.kind:
            case "classification":
                return F.cross_entropy(logits, labels)
            case "multilabel":
                return F.binary_cross_entropy_with_logits(logits, labels)
            case "regression":
                return F.mse_loss(logits.squeeze(-1), labels)

    # Answers

    def predict(
        self, rows: Sequence[Row], examples: Sequence[Example], outputs: Sequence[Outputs]
    ) -> list[dict[str, Any]]:
        logits = np.stack([output["logits"] for output in outputs]).astype(np.float64)
        match self.settings.kind:
            case "regression":
                return [{"prediction": float(value)} for value in logits[:, 0] * self.settings.scale]
            case "classification":
                exponents = np.exp(logits - logits.max(1, keepdims=True))
                shares = exponents / exponents.sum(1, keepdims=True)
                answers: list[Any] = [self.labels[index] for index in logits.argmax(1)]
            case "multilabel":
                shares = 1 / (1 + np.exp(-logits))
                answers = [[n for n, p in zip(self.labels, row, strict=True) if p > 0.5] for row in shares]
        return [
            {"prediction": answer}
            | {f"_probability_{name}": float(p) for name, p in zip(self.labels, row, strict=True)}
            for answer, row in zip(answers, shares, strict=True)
        ]

    def scores(self, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        answers = [prediction["prediction"] for prediction in predictions]
        match self.settings.kind:
            case "regression":
                gold = np.array([self.target(row) for row in rows], float) * self.settings.scale
                found = metrics.regression_scores(gold, np.array(answers, float))
            case "multilabel":
                chosen = np.array([[float(name in answer) for name in self.labels] for answer in answers])
                found = metrics.multilabel_scores(np.array([self.target(row) for row in rows]), chosen)
            case "classification":
                numbers = np.array([self.numbers[answer] for answer in answers])
                found = metrics.class_scores(
                    np.array([self.target(row) for row in rows]), numbers, len(self.labels)
                )
        headline = self.settings.metric or metrics.METRICS[self.settings.kind][0]
        return {headline: found[headline]} | found

    def tables(self, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Per-class figures and, for single labels, the confusion matrix."""
        answers = [prediction["prediction"] for prediction in predictions]
        match self.settings.kind:
            case "regression":
                return {}
            case "multilabel":
                gold = np.array([self.target(row) for row in rows])
                chosen = np.array([[float(name in answer) for name in self.labels] for answer in answers])
                return {"per_class": metrics.per_class(gold, chosen, self.labels)}  # type: ignore[arg-type]
            case "classification":
                true = [self.target(row) for row in rows]
                said = [self.numbers[answer] for answer in answers]
                return {
                    "labels": list(self.labels),
                    "confusion": metrics.confusion(true, said, len(self.labels)),
                    "per_class": metrics.per_class(true, said, self.labels),
                }


def fit(sizes: Sequence[int], room: int) -> list[int]:
    """Lengths that together fit: the longer gives way until both are equal, then both."""
    if sum(sizes) <= room:
        return list(sizes)
    if len(sizes) == 1:
        return [room]
    short = min(min(sizes), room // 2)
    return [short, room - short] if sizes[0] <= sizes[1] else [room - short, short]
