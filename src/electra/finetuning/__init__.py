"""The seam of fine-tuning: what the loop, the planner and the reports ask of a kind of task, and nothing about any kind.

    OUT/results.md, results.json        the table over tasks and seeds
    OUT/TASK/settings.json, curves.png  what the runs of a task have in common; dev score against steps
    OUT/TASK/seed-N/                    one finished run: a model folder with task.json, result.json and its outputs
    OUT/submission/*.tsv                what a benchmark's server wants, where a test split exists

A run's folder appears whole when the run is done: what is there is kept, what is missing is done again.

A new kind of task touches at most four source files: its own in this room (a `TaskSettings` and a `Task`), `plan.py` (the
arm of `settings_class`, and `guess_shape` where its tables can be told from others), `interop` (the names that its head has
in transformers) and a recipe in `recipes/tasks`.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.config import Settings, dump, validate
from electra.base.errors import SettingsError
from electra.data.tables import Row, read_rows
from electra.model import EncoderSettings

Outputs = dict[str, np.ndarray]
"""Raw head outputs for one example, still padded to the length of its batch."""
Rows = Sequence[Row]
Splits = Mapping[str, Rows]
Prediction = dict[str, Any]
"""The answer to a row: column -> value."""
Layout = Literal["table", "columns", "squad"]
"""How a file is written: a row a line; a word a line, in columns; SQuAD's articles of paragraphs of questions."""
OTHER = "{other}"
"""Where the text of a `Problem` names another row."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with the rows of a split. Rows count from 1; row 0 means all of them, split "" a file by itself.
    `other` is another row (split, number), which the text calls OTHER, so that both can be numbered again; without a text,
    the row is there twice."""

    split: str
    row: int
    column: str
    text: str
    other: tuple[str, int] | None = None

    def __str__(self) -> str:
        where = " ".join([self.split] * bool(self.split) + [f"row {self.row}"] * bool(self.row))
        text = self.text
        if self.other:
            split, row = self.other
            if not text:
                return f"{where} is also {split} row {row}"
            text = text.replace(OTHER, f"row {row}" if split == self.split else f"{split} row {row}")
        return f"{where}: {text}" if where else text

    def renumbered(self, numbers: Mapping[str, Sequence[int]]) -> "Problem":
        """By the places that rows have in the one file that train and dev were cut from."""

        def in_file(split: str, row: int) -> tuple[str, int]:
            return ("train", numbers[split][row - 1]) if row and split in numbers else (split, row)

        split, row = in_file(self.split, self.row)
        return replace(self, split=split, row=row, other=self.other and in_file(*self.other))


@dataclass(frozen=True)
class Example:
    """One sequence for the network. A row gives one example, or several (windows of a long paragraph, parts of a long
    sentence), or none."""

    ids: Sequence[int]
    first: int
    """How many leading tokens belong to segment 0; the rest is segment 1."""
    row: int
    """Place of its row in the list that was encoded."""
    target: Any = None
    """What `targets` of its kind understands; None where the answer is not known."""
    notes: Any = None
    """What `predict` of its kind needs to get back from tokens to text."""


Examples = Sequence[Example]


class TaskSettings(Settings):
    """What every kind is set with, and what a kind knows of its files before there is a task. `files` names the file of each
    split in the folder that holds the data. The defaults here are those of a table of texts."""

    kind: str
    name: str = ""
    metric: str
    epochs: int = Field(3, ge=1)
    length: int = Field(128, ge=8)
    files: dict[str, str] = Field(default_factory=dict)

    guesses_columns: ClassVar[bool] = False
    """Whether text and label are looked for in a table of which nothing is known."""
    any_file: ClassVar[bool] = False
    """Whether its files may be called anything, not only .csv, .jsonl and so on."""
    input_form: ClassVar[str] = "text"
    """What `is_input` asks for, in words."""

    @abstractmethod
    def build(self, tokenizer: Tokenizer, length: int, splits: Splits) -> "Task":
        """The task. Labels that are not set are those of splits["train"]; with no rows the settings must hold them, as those
        of a saved model do."""

    @property
    @abstractmethod
    def input_columns(self) -> tuple[str, ...]: ...

    @abstractmethod
    def row_key(self, row: Row) -> str:
        """What makes two rows the same when a part of a table is split off for dev."""

    @abstractmethod
    def cut_words(self, length: int) -> str:
        """What it means that a row was cut."""

    def row_classes(self, row: Row) -> set[str]:
        """What a row teaches that must be known before it can be scored."""
        return set()

    def is_input(self, value: Any) -> bool:
        return isinstance(value, str)

    def layout(self, path: Path) -> Layout:
        return "table"

    @property
    def table_header(self) -> tuple[str, ...]:
        """The columns of csv and tsv files that have no line for them."""
        return ()

    @property
    def file_columns(self) -> dict[str, int]:
        """What `read_conll` reads of a file of columns: name -> place."""
        return {}

    @property
    def drops_broken_rows(self) -> bool:
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of scores with these settings."""
        return ()

    def read(self, path: Path) -> tuple[list[Row], dict[int, str]]:
        """The rows of a file, and what is wrong with those that cannot be read, by their number. Those have no values."""
        malformed: dict[int, str] = {}
        return list(read_rows(path, self.table_header, malformed)), malformed

    @classmethod
    def named_columns(cls, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """`text` and `label`, which people call columns by whatever the kind, as the settings of this one."""
        return dict(overrides)


class Task(Protocol):
    """A kind of task with its settings and labels filled in. Kinds inherit from it by name, so that the type checker names
    what one of them lacks, and so that what most agree on is written once, at the end."""

    settings: TaskSettings
    """With everything that was guessed from data (labels) filled in: enough to build the task again."""
    tokenizer: Tokenizer
    length: int
    """The settings' one or the positions of the network, whichever is less."""
    labels: Sequence[str] = ()
    """The names behind the outputs, in their order; empty where outputs have no names."""
    columns_written: Collection[str] = ("prediction",)
    architecture: str
    """The class of transformers that reads the export, without the encoder's name before it ("ForTokenClassification"),
    or "" where none has this head."""

    @abstractmethod
    def problems(self, splits: Splits) -> list[Problem]:
        """Everything wrong with the rows."""

    @abstractmethod
    def encode(self, rows: Rows) -> tuple[list[Example], int]:
        """Examples, and how many rows had to be cut to fit."""

    @abstractmethod
    def head(self, encoder: EncoderSettings) -> nn.Module:
        """A module: (hidden [batch seq hidden], Batch) -> dict of tensors whose first dimension is the batch. Its
        `reads_first_only` says that it looks at the first token alone: it is given [batch 1 hidden], which is cheaper."""

    @abstractmethod
    def targets(self, examples: Examples, length: int) -> dict[str, Tensor]:
        """The targets of a batch, padded to `length` where they are by token."""

    @abstractmethod
    def loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        """The mean over what has a target."""

    @abstractmethod
    def predict(self, rows: Rows, examples: Examples, outputs: Sequence[Outputs]) -> list[Prediction]:
        """One prediction per row, as the columns of an answer file: `columns_written` and, where people ask for
        probabilities, all others."""

    @abstractmethod
    def scores(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        """All metrics of the task; the first is the headline."""

    # What most kinds agree on

    def with_columns(self, columns: Mapping[str, Any]) -> "Task":
        """The same task on a table whose columns are called otherwise."""
        before = self.settings
        settings = validate(type(before), dump(before) | before.named_columns(columns))
        if len(settings.input_columns) != len(before.input_columns):
            raise SettingsError(
                f"the model reads {len(before.input_columns)} text columns, not {len(settings.input_columns)}."
            )
        return settings.build(self.tokenizer, self.length, {})

    def training_rows(self, rows: Rows) -> Sequence[Row]:
        """Rows as they are trained on, where that differs from how they are scored."""
        return rows

    def fitted(self, dev_scores: Mapping[str, float]) -> "Task":
        """The task with what is chosen on dev after training."""
        return self

    def ensemble(self, rows: Rows, examples: Examples, runs: Sequence[Sequence[Outputs]]) -> list[Prediction]:
        """One prediction from several networks: that of their mean outputs."""
        return self.predict(rows, examples, mean_outputs(runs))

    def tables(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Confusion matrix and metrics of each class, where there are classes."""
        return {}

    def answer_sample(self) -> dict[str, Any]:
        """An example of those columns of answers that may be empty lists, row after row."""
        return {}

    def submission(self, rows: Rows, predictions: Sequence[Prediction]) -> Sequence[Prediction] | Mapping[str, Any]:
        """What a benchmark's server wants: GLUE's a table, SQuAD's one JSON object."""
        return [{"index": index, "prediction": it["prediction"]} for index, it in enumerate(predictions)]

    def config_entries(self) -> dict[str, Any]:
        """What config.json of the export says of labels."""
        if not self.labels:
            return {}
        numbers = {name: index for index, name in enumerate(self.labels)}
        return {"id2label": {str(index): name for name, index in numbers.items()}, "label2id": numbers}


class LabelOutputs(nn.Module):
    """A label head of an encoder (`electra.model`) as the head of a task: for every token, or for the first alone."""

    def __init__(self, label: nn.Module, reads_first_only: bool = False):
        super().__init__()
        self.label, self.reads_first_only = label, reads_first_only

    def forward(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.label(hidden[:, 0] if self.reads_first_only else hidden)}


def mean_outputs(runs: Sequence[Sequence[Outputs]]) -> list[Outputs]:
    """The ensemble: logits averaged over runs, example by example."""
    return [
        {name: np.mean([outputs[name] for outputs in parts], axis=0) for name in parts[0]}
        for parts in zip(*runs, strict=True)
    ]


def needs_answers(split: str) -> bool:
    """Splits called test, test_matched and so on are predicted, and scored where answers are there all the same."""
    return not split.startswith("test")


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
