"""Classification of one text or of two: one label, several labels, or a number.

The default head is that of transformers (dropout, dense, GELU, dropout, output), so that exports load there; "linear" is
the original's: dropout and one dense layer. Both use Glorot initialisation, as every fine-tuning head of the original does.
The loss is the mean over the batch. The original's is the sum; clipping gradients to norm 1 makes the two the same in most
steps, but not in all.
"""

from array import array
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.config import LARGEST, auto_or
from electra.data.tables import Row, column_of, comma_number, label_list, label_name, number, read_label
from electra.data.tokenizer import encode_texts
from electra.finetuning import (
    Answering,
    Example,
    Examples,
    LabelOutputs,
    Mistake,
    Outputs,
    Prediction,
    Problem,
    Rows,
    Splits,
    Task,
    TaskSettings,
    softmax,
    text_problem,
    wording,
)
from electra.finetuning.question_heads import window_places
from electra.model import EncoderSettings, sequence_label_head
from electra.model.heads import Pooling, in_float32, pool
from electra.model.linear import Linear

Metric = Literal["accuracy", "f1", "f1_macro", "f1_micro", "mcc", "pearson", "spearman", "mse"]
METRICS_OF_KINDS: dict[str, tuple[Metric, ...]] = {
    "classification": ("accuracy", "f1", "f1_macro", "f1_micro", "mcc"),
    "multilabel": ("f1_micro", "f1_macro", "accuracy"),
    "regression": ("spearman", "pearson", "mse"),
}
"""The metrics of each kind; the first is the headline unless the task names another."""
PROBLEM_TYPES = {
    "classification": "single_label_classification",
    "multilabel": "multi_label_classification",
    "regression": "regression",
}
"""transformers' words for the kinds."""
MANY_ROWS, NEARLY_ALL, MOSTLY = 100, 0.99, 0.9
"""The same answer to nearly all of many rows raises an alarm, unless it is mostly right: the other classes may be rare."""


class ClassificationSettings(TaskSettings):
    """`text` is one column or two; `a|b` means a, or b where there is no a. `labels` fixes the classes and their order;
    empty, they are those of the training rows, sorted. `metric` is the headline. `double_unordered` trains on both
    orders of a pair. A regression learns (label - `offset`) / `scale`; with `scale=auto` these are the mean and the standard
    deviation of the training labels. Answers are in the labels' unit either way. A multi-label cell that is not a list is
    split at `separator`. Some public sets have rows both in train and in dev (`shared_rows`), or rows with too few or too many
    cells (`broken_rows`). `pooling`: the head reads the vector of [CLS] or the mean over all tokens. `long`: text beyond the
    length is cut, or read in windows that overlap by half; each window learns the row's label, and the mean of their logits
    answers. `header` names the columns of csv and tsv files without a header line. `files` names the files of the splits, with
    or without their endings; further splits whose names start with dev or test are scored or predicted as well."""

    kind: Literal["classification", "multilabel", "regression"] = "classification"
    text: tuple[str, ...] = Field(("text",), min_length=1, max_length=2)
    label: str = "label"
    labels: tuple[str, ...] = ()
    metric: Metric | Literal[""] = ""
    head: Literal["transformers", "linear"] = "transformers"
    pooling: Pooling = "cls"
    long: Literal["cut", "windows"] = "cut"
    double_unordered: bool = False
    scale: Annotated[float | Literal["auto"], auto_or("a number above 0", lambda it: it > 0)] = 1.0
    offset: float = 0.0
    separator: str = Field("|", min_length=1)
    shared_rows: Literal["refuse", "allow"] = "refuse"
    broken_rows: Literal["refuse", "drop"] = "refuse"
    header: tuple[str, ...] = ()

    guesses_columns: ClassVar[bool] = True

    @field_validator("text", "labels", mode="before")
    @classmethod
    def one_is_a_list_of_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def classes_have_no_scale(cls, tree: Any) -> Any:
        """Drops `scale=auto`, a default of the method that is meant for regression only."""
        is_ours = isinstance(tree, dict) and tree.get("scale") == "auto" and tree.get("kind") != "regression"
        return {key: value for key, value in tree.items() if key != "scale"} if is_ours else tree

    @model_validator(mode="after")
    def parts_agree(self) -> "ClassificationSettings":
        metrics = METRICS_OF_KINDS[self.kind]
        if self.metric and self.metric not in metrics:
            raise ValueError(f"metric={self.metric} is not one of {self.kind}: {', '.join(metrics)}")
        if self.double_unordered and len(self.text) == 1:
            raise ValueError("double_unordered=true needs two text columns")
        if self.kind == "regression" and self.labels:
            raise ValueError("a regression has no labels")
        if len(set(self.labels)) < len(self.labels) or len(self.labels) == 1:
            raise ValueError(f"labels ({', '.join(self.labels)}) must be at least two different names")
        return self

    def build(self, tokenizer: Tokenizer, length: int, splits: Splits) -> "Classification":
        if self.kind == "regression":
            return Classification(self.standardised(splits.get("train", ())), tokenizer, length)
        if self.labels:
            return Classification(self, tokenizer, length)
        names = {name for row in splits.get("train", ()) for name in self.label_names(row)}
        ordered = sorted(names, key=lambda name: (number(name) is None, number(name) or 0.0, name))
        # a copy without validation: too few labels is a problem of the data, which `problems` reports
        filled = self.model_copy(update={"labels": tuple(ordered)})
        return Classification(filled, tokenizer, length, guessed=True)

    def standardised(self, train: Rows) -> "ClassificationSettings":
        """The settings with numbers for scale and offset. Labels that are not numbers are left to `row_problems`."""
        if self.scale != "auto":
            return self
        values = [value for row in train if (value := number(read_label(row, column_of(self.label, row)))) is not None]
        spread = float(np.std(values)) if values else 0.0
        return self.model_copy(update={"scale": spread or 1.0, "offset": float(np.mean(values)) if values else 0.0})

    @property
    def input_columns(self) -> tuple[str, ...]:
        return self.text

    @property
    def answer_columns(self) -> tuple[str, ...]:
        return (self.label,)

    @property
    def table_header(self) -> tuple[str, ...]:
        return self.header

    @property
    def drops_broken_rows(self) -> bool:
        return self.broken_rows == "drop"

    def texts(self, row: Row) -> tuple[str, ...]:
        return tuple(str(row.get(column_of(name, row)) or "") for name in self.text)

    def row_key(self, row: Row) -> str:
        return "\x1f".join(self.texts(row))

    def family(self, row: Row) -> Hashable:
        texts = self.texts(row)
        return hash(frozenset(map(wording, texts))) if self.double_unordered else wording(*texts)

    def identity(self, row: Row, split: str) -> Hashable | None:
        """None for rows without text too: they are refused for that, not as duplicates of each other."""
        refused = self.shared_rows == "refuse" and not split.startswith("test")
        return self.family(row) if refused and all(map(str.strip, self.texts(row))) else None

    @property
    def shared_rows_remedy(self) -> str:
        return "Remove them, or keep them with shared_rows=allow (scores are then a little too good)."

    def label_names(self, row: Row) -> list[str]:
        """The labels of a row, known or not; none where it has none."""
        value = read_label(row, column_of(self.label, row))
        if value is None:
            return []
        return label_list(value, self.separator) if self.kind == "multilabel" else [label_name(value)]

    def row_classes(self, row: Row) -> set[str]:
        return set() if self.kind == "regression" else set(self.label_names(row))

    @property
    def notes(self) -> tuple[str, ...]:
        """Of which class f1 is: the rare one that it is meant for may well be the first."""
        whose = f"{self.labels[1]!r}" if self.labels else "the second of the two labels, as sorted"
        return (f"f1 is that of {whose}; labels=[…] sets another order",) if self.metric == "f1" else ()

    def cut_words(self, length: int) -> str:
        if self.long == "windows":
            return f"whose shorter text has more than half of {length} tokens and is cut there"
        return f"longer than {length} tokens and cut"

    @property
    def cut_remedy(self) -> str:
        return "Raise length" + (", or say long=windows to read all of it." if self.long == "cut" else ".")


class Classification(Task):
    """The task. `guessed` says that the labels are those of the training rows: only then can there be suspiciously many."""

    settings: ClassificationSettings

    def __init__(self, settings: ClassificationSettings, tokenizer: Tokenizer, length: int, guessed: bool = False):
        super().__init__(settings, tokenizer, length, settings.labels)
        self.guessed = guessed
        self.architecture = "ForSequenceClassification" if settings.head == "transformers" else ""
        self.pooling = settings.pooling
        self.scale = 1.0 if settings.scale == "auto" else settings.scale

    # Problems of rows

    def column_problems(self, split: str, rows: Rows, answered: bool) -> list[Problem]:
        problems = super().column_problems(split, rows, answered) or [
            Problem(split, 0, f"column {name!r} holds numbers, not text")
            for name in self.settings.text
            if all(number(row.get(column_of(name, row))) is not None for row in rows)
        ]
        return problems or ([Problem(split, 0, text)] if answered and (text := self.comma_problem(rows)) else [])

    def comma_problem(self, rows: Rows) -> str:
        """Reports numbers written with a comma, each of which would otherwise become a class of its own."""
        settings = self.settings
        if settings.kind == "multilabel" or not (self.guessed or settings.kind == "regression"):
            return ""
        text = comma_number([read_label(row, column_of(settings.label, row)) for row in rows])
        remedy = "Write decimals with a point and thousands without a mark, or say separator=, for several labels"
        return f"column {settings.label!r} holds numbers with a comma ({text!r}). {remedy}." if text else ""

    def row_problems(self, row: Row, answered: bool) -> Iterator[str]:
        settings = self.settings
        yield from filter(None, (text_problem(name, row.get(column_of(name, row))) for name in settings.text))
        if not answered:
            return
        value = read_label(row, column_of(settings.label, row))
        if value is None and settings.kind != "multilabel":
            yield "no label. Fill it or remove the row."
        elif settings.kind == "regression":
            read = number(value)
            if read is None:
                yield f"label {value!r} is not a number"
            elif abs(read) > LARGEST:
                yield f"label {value!r} is beyond {LARGEST:,}, too large to be learned. Use other units."
        else:
            for name in settings.label_names(row):
                if name not in self.numbers:
                    what = "was not seen in train" if self.guessed else "is unknown"
                    if number(name) is not None and all(number(label) is None for label in self.labels):
                        what = "is a number where a name was expected"
                    known = ", ".join([*self.labels[:8], "…"][: len(self.labels)])
                    remedy = " Add rows with it to train, or remove such rows." * self.guessed
                    yield f"label {name!r} {what} (known: {known}).{remedy}"

    def overall_problems(self, splits: Splits, clean: bool) -> Iterator[Problem]:
        classes, rows = len(self.labels), len(splits.get("train", ()))
        if rows and self.settings.kind != "regression" and (classes == 1 or (classes == 0 and clean)):
            yield Problem("train", 0, f"one class only ({', '.join(self.labels) or 'none'}): there is nothing to learn")
        if (
            clean
            and self.settings.kind == "regression"
            and len(labels := self.quantities(splits.get("train", ()))) == 1
        ):
            yield Problem("train", 0, f"every label is {labels.pop():g}: there is nothing to learn")
        stripped = {name.strip(): name for name in self.labels}
        if self.guessed and len(stripped) < classes:
            twice = next((name, stripped[name.strip()]) for name in self.labels if stripped[name.strip()] != name)
            text = f"labels {twice[0]!r} and {twice[1]!r} differ by spaces alone: make them one, or say labels=[…]"
            yield Problem("train", 0, text)
        is_doubtful = self.guessed and self.settings.kind == "classification" and classes > max(20, rows // 2)
        if is_doubtful and not self.comma_problem(splits["train"]):
            remedy = "use kind=regression for quantities, labels=[…] if these are classes, or another label column"
            yield Problem("train", 0, f"{classes} different labels in {rows} rows: {remedy}")
        if self.settings.metric == "f1" and classes > 2:
            yield Problem("", 0, f"metric=f1 is for two classes, there are {classes}: use metric=f1_macro")

    def quantities(self, rows: Rows) -> set[float]:
        """The different labels of a regression."""
        values = {number(read_label(row, column_of(self.settings.label, row))) for row in rows}
        return {value for value in values if value is not None}

    def undefined(self, rows: Rows) -> str:
        """A correlation with a constant."""
        if self.settings.kind != "regression" or len(labels := self.quantities(rows)) != 1:
            return ""
        remedy = "Score it on rows that differ, or look at mse alone"
        return f"every label is {labels.pop():g}, so its correlations are undefined and count as 0. {remedy}."

    # Rows -> examples

    def training_rows(self, rows: Rows) -> Sequence[Row]:
        """Both orders of every pair if the order has no meaning (`double_unordered`)."""
        if not self.settings.double_unordered:
            return rows
        first, second = (column_of(name, rows[0]) for name in self.settings.text)
        return [*rows, *({**row, first: row[second], second: row[first]} for row in rows)]

    def encode(self, rows: Rows) -> tuple[list[Example], int]:
        """[CLS] A [SEP] (B [SEP]). If they are too long, the longer text is cut first, at its end, or read in windows."""
        most = self.length if self.settings.long == "cut" else None
        pieces = [
            [encoding.ids for encoding in encode_texts(self.tokenizer, texts, most)]
            for texts in zip(*map(self.settings.texts, rows), strict=True)
        ]
        examples, cut = [], 0
        room = self.length - 1 - len(self.settings.text)
        for index, (row, parts) in enumerate(zip(rows, zip(*pieces, strict=True), strict=True)):
            sizes, target = [len(part) for part in parts], self.target(row)
            places, is_cut = places_of(sizes, room, self.settings.long)
            cut += is_cut
            for slices in places:
                ids = array("i", [self.special.cls])
                for part, kept in zip(parts, slices, strict=True):
                    ids.extend([*part[kept], self.special.sep])
                examples.append(Example(ids, 2 + len(parts[0][slices[0]]), index, target))
        return examples, cut

    def target(self, row: Row) -> Any:
        column = column_of(self.settings.label, row)
        names = self.settings.label_names(row)
        match self.settings.kind:
            case "regression":
                value = number(read_label(row, column))
                return None if value is None else (value - self.settings.offset) / self.scale
            case "multilabel":
                return [float(name in names) for name in self.labels] if column in row else None
            case "classification":
                return self.numbers.get(names[0]) if names else None

    # The network's side

    def head(self, encoder: EncoderSettings) -> nn.Module:
        outputs = 1 if self.settings.kind == "regression" else len(self.labels)
        if self.settings.head == "linear":
            return LinearHead(encoder, outputs, self.pooling)
        return LabelOutputs(sequence_label_head(encoder, outputs), self.pooling)

    def targets(self, examples: Examples, length: int) -> dict[str, Tensor]:
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

    def predict(self, rows: Rows, examples: Examples, outputs: Sequence[Outputs]) -> list[Prediction]:
        logits = np.stack([output["logits"] for output in outputs]).astype(np.float64)
        if self.settings.long == "windows":  # the mean over the windows of a row
            numbers = np.array([example.row for example in examples])
            sums = np.zeros((len(rows), logits.shape[1]))
            np.add.at(sums, numbers, logits)
            logits = sums / np.bincount(numbers, minlength=len(rows))[:, None]
        match self.settings.kind:
            case "regression":
                return [{"prediction": self.answer(value)} for value in logits[:, 0]]
            case "classification":
                shares = softmax(logits)
                answers: list[Any] = [self.labels[index] for index in logits.argmax(1)]
            case "multilabel":
                shares = 1 / (1 + np.exp(-logits))
                answers = [[n for n, p in zip(self.labels, row, strict=True) if p > 0.5] for row in shares]
        return [
            {"prediction": answer} | {f"probability_{name}": float(p) for name, p in zip(self.labels, row, strict=True)}
            for answer, row in zip(answers, shares, strict=True)
        ]

    def scores(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        pair = self.gold_and_predicted(rows, predictions)
        quantities = self.settings.kind == "regression"
        scores = regression_scores(*pair) if quantities else class_scores(*pair, len(self.labels))
        headline = self.settings.metric or METRICS_OF_KINDS[self.settings.kind][0]
        return {headline: scores[headline]} | scores

    def gold_and_predicted(self, rows: Rows, predictions: Sequence[Prediction]) -> tuple[np.ndarray, np.ndarray]:
        """The true and the predicted targets: class numbers, rows x labels of 0 and 1, or quantities."""
        answers = [{self.settings.label: prediction["prediction"]} for prediction in predictions]
        gold, predicted = (np.array([self.target(row) for row in table]) for table in (rows, answers))
        if self.settings.kind == "regression":
            gold, predicted = (values * self.scale + self.settings.offset for values in (gold, predicted))
        return gold, predicted

    def majority(self, rows: Rows) -> Answering:
        """Answers every row with the most frequent class, with all labels that most rows have, or with the mean."""
        targets = np.array([self.target(row) for row in rows])
        match self.settings.kind:
            case "classification":
                constant = np.bincount(targets).argmax()
            case "multilabel":
                constant = (targets.mean(0) > 0.5).astype(float)
            case "regression":
                constant = targets.mean()
        answer = self.answer(constant)
        return lambda asked: [{"prediction": answer} for _ in asked]

    def baselines(self, train: Rows) -> dict[str, Answering]:
        from electra.finetuning.baselines import MAJORITY, WORDS, WordModel

        majority, targets = self.majority(train), np.array([self.target(row) for row in train])
        if len(np.unique(targets, axis=0)) == 1:
            return {MAJORITY: majority, WORDS: majority}
        words = WordModel(self.settings.kind, list(map(self.settings.texts, train)), targets)

        def by_words(rows: Rows) -> list[Prediction]:
            return [{"prediction": self.answer(it)} for it in words.predict(list(map(self.settings.texts, rows)))]

        return {MAJORITY: majority, WORDS: by_words}

    def one_answer(self, rows: Rows, predictions: Sequence[Prediction]) -> str:
        """Also counts numbers that hardly vary compared with the true ones, and one answer to nearly all of many rows if mostly wrong."""
        if self.settings.kind == "regression":
            gold, predicted = self.gold_and_predicted(rows, predictions)
            return f"every row is about {predicted.mean():.3g}" if np.std(predicted) < 0.05 * np.std(gold) else ""
        ((answer, count),) = Counter(repr(it["prediction"]) for it in predictions).most_common(1)
        right = sum(repr(self.answer(self.target(row))) == answer for row in rows)
        if NEARLY_ALL * len(rows) <= count < len(rows) and len(rows) >= MANY_ROWS and right < MOSTLY * len(rows):
            return f"{count:,} of {len(rows):,} rows is {answer}"
        return super().one_answer(rows, predictions)

    def answer(self, target: Any) -> Any:
        """The inverse of `target`."""
        match self.settings.kind:
            case "regression":
                return float(target) * self.scale + self.settings.offset
            case "multilabel":
                return [name for name, value in zip(self.labels, target, strict=True) if value]
            case "classification":
                return self.labels[int(target)]

    def tables(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Metrics of each class and, for single labels, the confusion matrix, whose rows are the true classes."""
        if self.settings.kind == "regression":
            return {}
        from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

        gold, predicted = self.gold_and_predicted(rows, predictions)
        numbers = list(range(len(self.labels)))
        columns = precision_recall_fscore_support(gold, predicted, labels=numbers, zero_division=0)
        per_class = [
            {"label": label, "precision": float(p), "recall": float(r), "f1": float(f), "rows": int(n)}
            for label, p, r, f, n in zip(self.labels, *columns, strict=True)
        ]
        if self.settings.kind == "multilabel":
            return {"per_class": per_class}
        confusion = confusion_matrix(gold, predicted, labels=numbers)
        return {"labels": list(self.labels), "confusion": confusion.tolist(), "per_class": per_class}

    def mistakes(self, rows: Rows, predictions: Sequence[Prediction]) -> list[Mistake]:
        """For numbers, the rows with more than the median error; their `confidence` is the error as a fraction of the largest."""
        gold, predicted = self.gold_and_predicted(rows, predictions)
        if self.settings.kind == "regression":
            errors = np.abs(gold - predicted)
            shares = errors / max(float(errors.max(initial=0.0)), 1e-12)
            wrong = [int(row) for row in np.flatnonzero(errors > np.median(errors))]
            return [Mistake(row, float(gold[row]), float(predicted[row]), float(shares[row])) for row in wrong]
        is_wrong = gold != predicted if gold.ndim == 1 else (gold != predicted).any(1)
        wrong = [int(row) for row in np.flatnonzero(is_wrong)]
        return [
            Mistake(row, self.answer(gold[row]), predictions[row]["prediction"], self.confidence(predictions[row]))
            for row in wrong
        ]

    def confidence(self, prediction: Prediction) -> float:
        """The probability of the answer as a whole; of several labels, the product over all labels."""
        shares = [prediction.get(f"probability_{label}", 0.0) for label in self.labels]
        return float(
            max(shares) if self.settings.kind == "classification" else np.prod([max(p, 1 - p) for p in shares])
        )

    def answer_sample(self) -> dict[str, Any]:
        return {"prediction": [""]} if self.settings.kind == "multilabel" else {}

    def config_entries(self) -> dict[str, Any]:
        entries = super().config_entries() | {"problem_type": PROBLEM_TYPES[self.settings.kind]}
        if self.settings.kind == "regression":
            entries |= {"id2label": {"0": self.settings.label}, "label2id": {self.settings.label: 0}}
        return entries


class LinearHead(nn.Module):
    """The original's head: dropout and one dense layer, whatever the encoder."""

    def __init__(self, settings: EncoderSettings, outputs: int, pooling: Pooling = "cls"):
        super().__init__()
        self.pooling: Pooling = pooling
        self.reads_first_only = pooling == "cls"
        self.dropout = nn.Dropout(settings.dropout)
        self.output = Linear(settings.hidden, outputs, start="glorot")

    def forward(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"logits": in_float32(self.output, self.dropout(pool(hidden, batch.is_real, self.pooling)))}


def places_of(sizes: Sequence[int], room: int, how: Literal["cut", "windows"]) -> tuple[list[tuple[slice, ...]], bool]:
    """Which part of each text goes into each example, and whether any part is left out of all. Windows overlap by half."""
    kept = fit(sizes, room)
    longer = max(range(len(sizes)), key=sizes.__getitem__)
    windows = [slice(0, kept[longer])]
    if how == "windows" and sizes[longer] > kept[longer]:
        stride = max(1, kept[longer] // 2)
        windows = [slice(at, at + size) for at, size in window_places(sizes[longer], kept[longer], stride)]
    places = [tuple(it if place == longer else slice(0, kept[place]) for place in range(len(sizes))) for it in windows]
    missing = [size > room for place, (size, room) in enumerate(zip(sizes, kept, strict=True)) if place != longer]
    return places, any(missing) or (how == "cut" and sizes[longer] > kept[longer])


def fit(sizes: Sequence[int], room: int) -> list[int]:
    """Lengths that fit together: the longer text is shortened until both are equal, then both are."""
    if sum(sizes) <= room:
        return list(sizes)
    if len(sizes) == 1:
        return [room]
    short = min(min(sizes), room // 2)
    return [short, room - short] if sizes[0] <= sizes[1] else [room - short, short]


# Metrics, computed by scikit-learn and scipy, which are imported when asked for


def class_scores(gold: np.ndarray, predicted: np.ndarray, classes: int) -> dict[str, float]:
    """Scores from class numbers, or from rows x labels of 0 and 1, where accuracy needs all labels of a row to be right. `f1` is that
    of the second of two classes, which GLUE calls positive. F1 over classes includes classes of the task that are absent from this
    data. Micro F1 of single labels is the accuracy."""
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    single = gold.ndim == 1
    scores = {"accuracy": accuracy_score(gold, predicted)}
    if single and classes == 2:
        scores["f1"] = f1_score(gold, predicted, pos_label=1, zero_division=0)
    for average in ("macro", "micro"):
        every = list(range(classes))
        scores[f"f1_{average}"] = f1_score(gold, predicted, labels=every, average=average, zero_division=0)
    if single:  # an undefined correlation counts as 0
        scores["mcc"] = matthews_corrcoef(gold, predicted) if len(np.union1d(gold, predicted)) > 1 else 0.0
    return {name: float(score) for name, score in scores.items()}


def regression_scores(gold: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Correlations and squared error. A correlation with a constant is undefined and counts as 0, so that a collapsed run has a score."""
    from scipy.stats import pearsonr, spearmanr

    varies = len(gold) > 1 and np.ptp(gold) > 0 and np.ptp(predicted) > 0
    return {
        "spearman": float(spearmanr(gold, predicted).statistic) if varies else 0.0,
        "pearson": float(pearsonr(gold, predicted).statistic) if varies else 0.0,
        "mse": float(np.mean((gold - predicted) ** 2)),
    }
