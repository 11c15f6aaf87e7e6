"""The interface of a fine-tuning task: what the loop, the planner and the reports need from every kind, and nothing about any one kind.

    OUT/results.md, results.json        the table over tasks and seeds
    OUT/TASK/settings.json, curves.png  what the runs of a task have in common; dev score against steps
    OUT/TASK/seed-N/                    one finished run: a model folder with task.json, result.json and its outputs
    OUT/submission/*.tsv                what a benchmark's server expects, if there is a test split

A run's folder appears in one piece when the run has finished. The same command again keeps such folders and trains the missing ones.
"""

import difflib
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from pydantic import Field, field_validator
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.batch import Batch, SpecialIds
from electra.base.config import Settings, dump, short, validate
from electra.base.errors import DataError, SettingsError, counted
from electra.base.files import is_plain_name
from electra.data.filters import normalised
from electra.data.tables import Row, is_missing, pick, read_rows
from electra.data.tokenizer import special_ids
from electra.model import EncoderSettings
from electra.model.heads import Pooling, pool

Outputs = dict[str, np.ndarray]
"""Raw head outputs for one example, still padded to the length of its batch."""
Rows = Sequence[Row]
Splits = Mapping[str, Rows]
Prediction = dict[str, Any]
"""The answer to a row: column -> value."""
Answering = Callable[[Rows], list[Prediction]]
"""Answers rows without a network, as the baselines do."""
Layout = Literal["table", "columns", "squad", "mrqa"]
"""How a file is laid out: one row per line; one word per line, in columns; SQuAD's articles of paragraphs of questions; MRQA's
contexts with their questions, one context per line."""
Item = TypeVar("Item")
IS_ALSO, LOWER_IS_BETTER = "is also", ("mse",)
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which JSON can write and no tokenizer reads."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with the rows of a split. Rows count from 1; row 0 means all of them, and split "" no split in particular.
    `other` is a second row (split, number) that ends the message; kept apart from the text, it can be renumbered too."""

    split: str
    row: int
    text: str
    other: tuple[str, int] | None = None

    def __str__(self) -> str:
        where = " ".join([self.split] * bool(self.split) + [f"row {self.row}"] * bool(self.row))
        if self.other:
            return f"{where} {self.text} {self.other[0]} row {self.other[1]}"
        return f"{where}: {self.text}" if where else self.text

    def renumbered(self, numbers: Mapping[str, Sequence[int]]) -> "Problem":
        """The same problem with the row numbers of the file that train and dev were split from."""

        def in_file(split: str, row: int) -> tuple[str, int]:
            return ("train", numbers[split][row - 1]) if row and split in numbers else (split, row)

        split, row = in_file(self.split, self.row)
        return replace(self, split=split, row=row, other=self.other and in_file(*self.other))


@dataclass(frozen=True)
class Example:
    """One sequence for the network. A row gives one example, or several (windows of a long paragraph, parts of a long
    sentence), or none. The first `first` tokens belong to segment 0, the rest to segment 1. `row` is the index of its row in
    the encoded list."""

    ids: Sequence[int]
    first: int
    row: int
    target: Any = None
    """What `Task.targets` of its kind expects; None if the answer is unknown."""
    notes: Any = None
    """What `Task.predict` of its kind needs to map tokens back to text."""


Examples = Sequence[Example]


class Mistake(NamedTuple):
    """A wrong answer: the index of its row, the true answer, the given one, and how sure the network was of it (0 to 1)."""

    row: int
    true: Any
    answer: Any
    confidence: float


class TaskSettings(Settings):
    """The settings that all kinds share, and what a kind knows about its files before a `Task` is built. `files` names the file
    of each split in the data folder. The defaults suit a table of texts."""

    kind: str
    name: str = ""
    metric: str
    epochs: int = Field(3, ge=1, le=1_000_000)
    length: int = Field(128, ge=8, le=1_000_000)
    files: dict[str, str] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def name_stays_in_its_folder(cls, name: str) -> str:
        if name and not is_plain_name(name):
            raise ValueError("a task needs a name that is valid as a folder name")
        return name

    guesses_columns: ClassVar[bool] = False
    """Whether text and label columns that are not set are guessed from the table."""
    any_file: ClassVar[bool] = False
    """Whether its files may be called anything, not only .csv, .jsonl and so on."""
    input_form: ClassVar[str] = "text"
    """What `is_input` accepts, in words."""

    @abstractmethod
    def build(self, tokenizer: Tokenizer, length: int, splits: Splits) -> "Task":
        """Builds the task. Labels that are not set are those of splits["train"]; without rows the settings must have them, as
        those of a saved model do."""

    @property
    @abstractmethod
    def input_columns(self) -> tuple[str, ...]: ...

    @property
    def answer_columns(self) -> tuple[str, ...]:
        """Columns that rows with answers must have."""
        return ()

    @abstractmethod
    def row_key(self, row: Row) -> str:
        """The string whose hash decides whether a row is split off for dev. Equal rows stay together, and so do those of a `family`."""

    def family(self, row: Row) -> Hashable:
        """Equal for rows that must not be divided between train and dev, such as texts that differ only in case."""
        return self.row_key(row)

    @abstractmethod
    def cut_words(self, length: int) -> str:
        """Describes rows that were cut, in words that follow their number."""

    @property
    def cut_remedy(self) -> str:
        return "Raise that limit."

    def identity(self, row: Row, split: str) -> Hashable | None:
        """A key that a row of train and a row of this split must not share; None where they may."""
        return None

    @property
    def shared_rows_remedy(self) -> str:
        return "Remove them from one of the two."

    def row_classes(self, row: Row) -> set[str]:
        """The classes of a row: those that train must have before the row can be scored."""
        return set()

    def is_input(self, value: Any) -> bool:
        return isinstance(value, str) and not SURROGATE.search(value)

    def layout(self, path: Path) -> Layout:
        return "table"

    @property
    def table_header(self) -> tuple[str, ...]:
        """The columns of csv and tsv files without a header line."""
        return ()

    @property
    def file_columns(self) -> dict[str, int]:
        """The columns that `read_conll` reads from a column file: name -> index."""
        return {}

    @property
    def drops_broken_rows(self) -> bool:
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """What readers should know about scores with these settings."""
        return ()

    def row_of(self, line: str) -> Row:
        """A row without an answer, from a line of text whose columns are separated by tabs."""
        names, texts = [name.split("|")[0] for name in self.input_columns], line.split("\t")
        texts = texts if line.strip() else [""] * len(names)
        if len(texts) != len(names):
            between = f"{len(names)} texts ({', '.join(names)}), a tab between them" if len(names) > 1 else "one text"
            raise DataError(f"{short(line)} has {counted(len(texts), 'part')}, where the model reads {between}.")
        return dict(zip(names, texts, strict=True))

    def read(self, path: Path) -> tuple[list[Row], dict[int, str]]:
        """The rows of a file, and by number what is wrong with those that cannot be read, which have no values."""
        malformed: dict[int, str] = {}
        return list(read_rows(path, self.table_header, malformed)), malformed

    @classmethod
    def named_columns(cls, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The overrides with `text` and `label`, which name columns for every kind, renamed to this kind's own settings."""
        return dict(overrides)


class Task(Protocol):
    """A task with its settings and labels filled in. The kinds inherit explicitly from this protocol, so that the type checker
    reports what one of them lacks and the common defaults are written once, at the end."""

    settings: TaskSettings
    """They include everything that was guessed from data (labels): enough to build the task again."""
    tokenizer: Tokenizer
    length: int
    """The `length` of the settings, or the size of the network's position table if that is smaller."""
    labels: Sequence[str] = ()
    """The names of the outputs, in order; empty if they have none."""
    numbers: Mapping[str, int]
    """The index of each label."""
    special: SpecialIds
    columns_written: Collection[str] = ("prediction",)
    architecture: str
    """The transformers class that reads the export, without the encoder's name in front ("ForTokenClassification"), or ""
    if no class has this head."""
    pooling: Pooling = "cls"
    """Which vector a head for whole rows reads."""

    def __init__(self, settings: TaskSettings, tokenizer: Tokenizer, length: int, labels: Sequence[str] = ()):
        self.settings, self.tokenizer, self.length, self.labels = settings, tokenizer, length, labels
        self.special = special_ids(tokenizer)
        self.numbers = {name: number for number, name in enumerate(labels)}

    @abstractmethod
    def row_problems(self, row: Row, answered: bool) -> Iterator[str]:
        """Everything wrong with one row; `answered` says whether it must have an answer."""

    @abstractmethod
    def overall_problems(self, splits: Splits, clean: bool) -> Iterator[Problem]:
        """What is wrong with the rows taken together; `clean` says that no row has a problem of its own."""

    @abstractmethod
    def encode(self, rows: Rows) -> tuple[list[Example], int]:
        """Returns the examples, and how many rows were cut to fit."""

    @abstractmethod
    def head(self, encoder: EncoderSettings) -> nn.Module:
        """Builds a module: (hidden [batch seq hidden], Batch) -> dict of tensors whose first dimension is the batch. If its
        `reads_first_only` is true it gets the first token alone, [batch 1 hidden], which is cheaper."""

    @abstractmethod
    def targets(self, examples: Examples, length: int) -> dict[str, Tensor]:
        """The targets of a batch, padded to `length` where there is one per token."""

    @abstractmethod
    def loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        """The mean loss over everything that has a target."""

    @abstractmethod
    def predict(self, rows: Rows, examples: Examples, outputs: Sequence[Outputs]) -> list[Prediction]:
        """Returns one prediction per row, as columns of an answer file: `columns_written`, and all others if probabilities
        are asked for."""

    @abstractmethod
    def scores(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        """All metrics of the task; the first is the headline."""

    # Defaults that suit most kinds

    def baselines(self, train: Rows) -> dict[str, Answering]:
        """What a network must beat, by the names in `electra.finetuning.baselines`."""
        return {}

    def majority(self, rows: Rows) -> Answering | None:
        """Answers every row with the most frequent answer of these; None if there is no such answer."""
        return None

    def one_answer(self, rows: Rows, predictions: Sequence[Prediction]) -> str:
        """A clause such as "every row is 'a'" if all rows get the same answer, otherwise ""."""
        answers = {repr(it["prediction"]) for it in predictions}
        return f"every row is {answers.pop()}" if len(predictions) > 1 and len(answers) == 1 else ""

    def undefined(self, rows: Rows) -> str:
        """A sentence if these rows leave a score undefined, otherwise ""."""
        return ""

    def unlearnable(self, shown: Collection[str]) -> list[str]:
        """Labels that no row of train has; `shown` are those that it has."""
        return [label for label in self.labels if label not in shown]

    def problems(self, splits: Splits) -> list[Problem]:
        """Everything wrong with the rows: split by split, then taken together, then rows of other splits that train has too."""
        problems: list[Problem] = []
        shared: list[Problem] = []
        first: dict[Hashable, int] = {}
        for split, rows in splits.items():
            answered = self.has_answers(split, rows)
            broken = self.column_problems(split, rows, answered)
            problems += broken
            for number, row in enumerate(rows, 1):
                texts = () if broken else self.row_problems(row, answered)
                problems += [Problem(split, number, text) for text in texts]
                key = self.settings.identity(row, split)
                if split == "train":
                    first.setdefault(key, number)
                elif key is not None and key in first:
                    shared.append(Problem(split, number, IS_ALSO, ("train", first[key])))
        return [*problems, *self.overall_problems(splits, not problems), *shared]

    def has_answers(self, split: str, rows: Rows) -> bool:
        """Whether rows must have answers. Splits called test, test_matched and so on need none; they are scored if they have them."""
        return not split.startswith("test")

    def column_problems(self, split: str, rows: Rows, answered: bool) -> list[Problem]:
        """Problems that keep the rows from being checked one by one: no rows, or missing columns."""
        if not rows:
            return [Problem(split, 0, "no rows. Give at least one.")]
        return missing_columns(split, rows, self.settings.input_columns + self.settings.answer_columns * answered)

    def with_columns(self, columns: Mapping[str, Any]) -> "Task":
        """The same task for a table with other column names."""
        settings = validate(type(self.settings), dump(self.settings) | self.settings.named_columns(columns))
        learned, texts = len(self.settings.input_columns), len(settings.input_columns)
        if texts != learned:
            raise SettingsError(f"the model reads {counted(learned, 'text column')}, not {texts}.")
        return settings.build(self.tokenizer, self.length, {})

    def training_rows(self, rows: Rows) -> Sequence[Row]:
        """The rows to train on, which may differ from those to score."""
        return rows

    def fitted(self, dev_scores: Mapping[str, float]) -> "Task":
        """The task with what is chosen on dev after training, such as a threshold."""
        return self

    def of_seeds(self, settings: Sequence[TaskSettings]) -> "Task":
        """The task by which several networks answer together; `settings` are theirs, with what was chosen on dev for each."""
        return self

    def ensemble(self, rows: Rows, examples: Examples, runs: Sequence[Sequence[Outputs]]) -> list[Prediction]:
        """One prediction per row from several networks: that of their mean outputs, example by example."""
        means = [
            {name: np.mean([outputs[name] for outputs in parts], axis=0) for name in parts[0]}
            for parts in zip(*runs, strict=True)
        ]
        return self.predict(rows, examples, means)

    def tables(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Confusion matrix and metrics of each class, where there are classes."""
        return {}

    def mistakes(self, rows: Rows, predictions: Sequence[Prediction]) -> list[Mistake]:
        """The rows that were answered wrong, for people to look at; empty for kinds that cannot tell which these are."""
        return []

    def answer_sample(self) -> dict[str, Any]:
        """Sample values of answer columns that may be empty lists in every row, so that their type is known."""
        return {}

    def submission(self, rows: Rows, predictions: Sequence[Prediction]) -> Sequence[Prediction] | Mapping[str, Any]:
        """What a benchmark's server expects: a table for GLUE, one JSON object for SQuAD."""
        return [{"index": index, "prediction": it["prediction"]} for index, it in enumerate(predictions)]

    def config_entries(self) -> dict[str, Any]:
        """What config.json of the export says about labels."""
        if not self.labels:
            return {}
        return {"id2label": {str(number): name for name, number in self.numbers.items()}, "label2id": self.numbers}


class LabelOutputs(nn.Module):
    """A label head of `electra.model` as the head of a task: one output per token, or per row if there is a `pooling`."""

    def __init__(self, label: nn.Module, pooling: Pooling | None = None):
        super().__init__()
        self.label, self.pooling = label, pooling
        self.reads_first_only = pooling == "cls"

    def forward(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.label(pool(hidden, batch.is_real, self.pooling) if self.pooling else hidden)}


def wording(*texts: str) -> int:
    """A hash that is equal for texts that differ only in case, white space and character width. The texts themselves would take
    the memory of a table a second time."""
    return hash(tuple(map(normalised, texts)))


def merit(metric: str, value: float) -> float:
    """The value of a metric with the sign that makes greater better."""
    return -value if metric in LOWER_IS_BETTER else value


def softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(exponents / exponents.sum(-1, keepdims=True))


def in_chunks(
    items: Iterable[Item], most: int, characters: Callable[[Item], int] = lambda _: 0, most_characters: int = 0
) -> Iterator[list[Item]]:
    """Yields at most `most` items at a time, fewer if they are long, so that memory does not depend on the size of a file."""
    chunk, total = list[Item](), 0
    for item in items:
        chunk.append(item)
        total += characters(item)
        if len(chunk) == most or total > most_characters:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def missing_columns(split: str, rows: Rows, columns: Sequence[str]) -> list[Problem]:
    present = list(dict.fromkeys(name for row in rows[:100] for name in row))
    problems = []
    for name in columns:
        if pick(present, name) is None:
            near = difflib.get_close_matches(name, present, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Name the columns of your table."
            problems.append(Problem(split, 0, f"no column {name!r} (there are {', '.join(present)}). {remedy}"))
    return problems


def text_problem(name: str, value: Any) -> str:
    """Why a value cannot be used as text, or ""."""
    if is_missing(value):
        return f"no text in {name!r}. Fill it or remove the row."
    if not isinstance(value, str):
        return f"{name!r} is {short(value)}, not text. Correct it."
    half = SURROGATE.search(value)
    return f"{name!r} has a lone surrogate ({half[0]!r}) at {half.start()}. Write the file again." if half else ""
