"""The seam of fine-tuning: what the loop, the planner and the reports ask of a kind of task, and nothing about any kind.

    OUT/results.md, results.json        the table over tasks and seeds
    OUT/TASK/settings.json, curves.png  what the runs of a task have in common; dev score against steps
    OUT/TASK/seed-N/                    one finished run: a model folder with task.json, result.json and its outputs
    OUT/submission/*.tsv                what a benchmark's server wants, where a test split exists

A run's folder appears whole when the run is done: what is there is kept, what is missing is done again.
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
"""Rows -> their answers, by something that is no network."""
Layout = Literal["table", "columns", "squad", "mrqa"]
"""How a file is written: a row a line; a word a line, in columns; SQuAD's articles of paragraphs of questions; MRQA's contexts
with their questions, a context a line."""
Item = TypeVar("Item")
IS_ALSO, LOWER_IS_BETTER = "is also", ("mse",)
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which JSON can write and no tokenizer reads."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with the rows of a split. Rows count from 1; row 0 means all of them, split "" a file by itself.
    `other` is another row (split, number), which the text leads to: so that both can be numbered again."""

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
        """By the places that rows have in the one file that train and dev were cut from."""

        def in_file(split: str, row: int) -> tuple[str, int]:
            return ("train", numbers[split][row - 1]) if row and split in numbers else (split, row)

        split, row = in_file(self.split, self.row)
        return replace(self, split=split, row=row, other=self.other and in_file(*self.other))


@dataclass(frozen=True)
class Example:
    """One sequence for the network. A row gives one example, or several (windows of a long paragraph, parts of a long
    sentence), or none. The first `first` tokens belong to segment 0, the rest to segment 1. `row` is the place of its row in
    the list that was encoded."""

    ids: Sequence[int]
    first: int
    row: int
    target: Any = None
    """What `targets` of its kind understands; None where the answer is not known."""
    notes: Any = None
    """What `predict` of its kind needs to get back from tokens to text."""


Examples = Sequence[Example]


class Mistake(NamedTuple):
    """A row, by its place in the list, whose answer is not the true one, and how sure the network was of it (0 to 1)."""

    row: int
    true: Any
    answer: Any
    confidence: float


class TaskSettings(Settings):
    """What every kind is set with, and what a kind knows of its files before there is a task. `files` names the file of each
    split in the folder that holds the data. The defaults here are those of a table of texts."""

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
            raise ValueError("a task needs a name that can be a folder's")
        return name

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

    @property
    def answer_columns(self) -> tuple[str, ...]:
        """Columns without which nothing can be learned."""
        return ()

    @abstractmethod
    def row_key(self, row: Row) -> str:
        """What chooses the rows that are split off for dev: equal rows go together, and so do those of one `family`."""

    def family(self, row: Row) -> Hashable:
        """Rows of which none may be in train and another in dev, though they are not written alike."""
        return self.row_key(row)

    @abstractmethod
    def cut_words(self, length: int) -> str:
        """What it means that a row was cut."""

    @property
    def cut_remedy(self) -> str:
        return "Raise that limit."

    def identity(self, row: Row, split: str) -> Hashable | None:
        """What must not be in train and in this split too; None where it may."""
        return None

    @property
    def shared_rows_remedy(self) -> str:
        return "Remove them from one of both."

    def row_classes(self, row: Row) -> set[str]:
        """What a row teaches that must be known before it can be scored."""
        return set()

    def is_input(self, value: Any) -> bool:
        return isinstance(value, str) and not SURROGATE.search(value)

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

    def row_of(self, line: str) -> Row:
        """A row without an answer, from a line of text: its columns, with a tab between them."""
        names, texts = [name.split("|")[0] for name in self.input_columns], line.split("\t")
        texts = texts if line.strip() else [""] * len(names)
        if len(texts) != len(names):
            between = f"{len(names)} texts ({', '.join(names)}), a tab between them" if len(names) > 1 else "one text"
            raise DataError(f"{short(line)} has {counted(len(texts), 'part')}, where the model reads {between}.")
        return dict(zip(names, texts, strict=True))

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
    """The settings' one, or the size of the network's table of positions where that is less."""
    labels: Sequence[str] = ()
    """The names behind the outputs, in their order; empty where outputs have no names."""
    numbers: Mapping[str, int]
    """The place of each label."""
    special: SpecialIds
    columns_written: Collection[str] = ("prediction",)
    architecture: str
    """The class of transformers that reads the export, without the encoder's name before it ("ForTokenClassification"),
    or "" where none has this head."""
    pooling: Pooling = "cls"
    """What a head for rows reads."""

    def __init__(self, settings: TaskSettings, tokenizer: Tokenizer, length: int, labels: Sequence[str] = ()):
        self.settings, self.tokenizer, self.length, self.labels = settings, tokenizer, length, labels
        self.special = special_ids(tokenizer)
        self.numbers = {name: number for number, name in enumerate(labels)}

    @abstractmethod
    def row_problems(self, row: Row, answered: bool) -> Iterator[str]:
        """All that is wrong with one row, of which an answer is asked or not."""

    @abstractmethod
    def overall_problems(self, splits: Splits, clean: bool) -> Iterator[Problem]:
        """What rows are together; `clean` says that nothing is wrong with any by itself."""

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

    def baselines(self, train: Rows) -> dict[str, Answering]:
        """What a network must be better than, by the names in `baselines`."""
        return {}

    def majority(self, rows: Rows) -> Answering | None:
        """Always the most frequent answer of these; None where there is nothing of the sort."""
        return None

    def one_answer(self, rows: Rows, predictions: Sequence[Prediction]) -> str:
        """What all rows are answered with, where that is one thing ("every row is 'a'"); "" where it is not."""
        answers = {repr(it["prediction"]) for it in predictions}
        return f"every row is {answers.pop()}" if len(predictions) > 1 and len(answers) == 1 else ""

    def unlearnable(self, shown: Collection[str]) -> list[str]:
        """Labels that no row of train shows."""
        return [label for label in self.labels if label not in shown]

    def problems(self, splits: Splits) -> list[Problem]:
        """Everything wrong with the rows: split by split, then together, then those of train that are elsewhere too."""
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
        """Splits called test, test_matched and so on are predicted, and scored where answers are there all the same."""
        return not split.startswith("test")

    def column_problems(self, split: str, rows: Rows, answered: bool) -> list[Problem]:
        """What keeps the rows from being looked at one by one."""
        if not rows:
            return [Problem(split, 0, "no rows. Give at least one.")]
        return missing_columns(split, rows, self.settings.input_columns + self.settings.answer_columns * answered)

    def with_columns(self, columns: Mapping[str, Any]) -> "Task":
        """The same task on a table whose columns are called otherwise."""
        settings = validate(type(self.settings), dump(self.settings) | self.settings.named_columns(columns))
        learned, texts = len(self.settings.input_columns), len(settings.input_columns)
        if texts != learned:
            raise SettingsError(f"the model reads {counted(learned, 'text column')}, not {texts}.")
        return settings.build(self.tokenizer, self.length, {})

    def training_rows(self, rows: Rows) -> Sequence[Row]:
        """Rows as they are trained on, where that differs from how they are scored."""
        return rows

    def fitted(self, dev_scores: Mapping[str, float]) -> "Task":
        """The task with what is chosen on dev after training."""
        return self

    def of_seeds(self, settings: Sequence[TaskSettings]) -> "Task":
        """What several networks answer by together, where something was chosen on dev for each: these are theirs."""
        return self

    def ensemble(self, rows: Rows, examples: Examples, runs: Sequence[Sequence[Outputs]]) -> list[Prediction]:
        """One prediction from several networks: that of their mean outputs, example by example."""
        means = [
            {name: np.mean([outputs[name] for outputs in parts], axis=0) for name in parts[0]}
            for parts in zip(*runs, strict=True)
        ]
        return self.predict(rows, examples, means)

    def tables(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Confusion matrix and metrics of each class, where there are classes."""
        return {}

    def mistakes(self, rows: Rows, predictions: Sequence[Prediction]) -> list[Mistake]:
        """The rows that were answered wrong, for people to look at; none where nobody can say which."""
        return []

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
        return {"id2label": {str(number): name for name, number in self.numbers.items()}, "label2id": self.numbers}


class LabelOutputs(nn.Module):
    """A label head of an encoder (`electra.model`) as the head of a task: for every token, or for the row."""

    def __init__(self, label: nn.Module, pooling: Pooling | None = None):
        super().__init__()
        self.label, self.pooling = label, pooling
        self.reads_first_only = pooling == "cls"

    def forward(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.label(pool(hidden, batch.is_real, self.pooling) if self.pooling else hidden)}


def wording(*texts: str) -> int:
    """Equal for texts that differ in case, white space and width of characters alone. A hash: of a million rows the texts would
    be held twice."""
    return hash(tuple(map(normalised, texts)))


def merit(metric: str, value: float) -> float:
    """The greater, the better, whatever the metric."""
    return -value if metric in LOWER_IS_BETTER else value


def softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(exponents / exponents.sum(-1, keepdims=True))


def in_chunks(
    items: Iterable[Item], most: int, characters: Callable[[Item], int] = lambda _: 0, most_characters: int = 0
) -> Iterator[list[Item]]:
    """So many at a time, and fewer where they are long: memory must not depend on the size of a file."""
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
    """Why a value is no text to learn from, or ""."""
    if is_missing(value):
        return f"no text in {name!r}. Fill it or remove the row."
    if not isinstance(value, str):
        return f"{name!r} is {short(value)}, not text. Correct it."
    half = SURROGATE.search(value)
    return f"{name!r} has half a character ({half[0]!r}) at {half.start()}. Write the file again." if half else ""
