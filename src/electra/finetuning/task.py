"""What the loop asks of a task. Three kinds of task exist (classification, tagging, span); a task is one TOML file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from electra.base.config import Settings
from electra.data.tables import Row
from electra.model.encoders import AnySettings

Outputs = dict[str, np.ndarray]
"""What the head said about one example, padding removed from nothing: arrays as they left the batch."""


def needs_answers(split: str) -> bool:
    """Splits called test, test_matched and so on are predicted, and scored where answers are there all the same."""
    return not split.startswith("test")


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


class Task(Protocol):
    """A kind of task with its settings and labels filled in."""

    architecture: str
    """What follows "Electra" or "ModernBert" in the transformers class that reads the export ("ForTokenClassification"),
    or "" where none has this head."""

    @property
    def settings(self) -> Settings:
        """Its settings, with everything that was guessed from data (labels) filled in: enough to build it again."""
        ...

    @property
    def labels(self) -> Sequence[str]:
        """The names behind the outputs, in their order; empty where outputs have no names."""
        ...

    def problems(self, splits: Mapping[str, Sequence[Row]]) -> list[str]:
        """Everything wrong with the rows, one line each, with split and row number. At most 20 are shown."""
        ...

    def encode(self, rows: Sequence[Row]) -> tuple[list[Example], int]:
        """Examples, and how many rows had to be cut to fit."""
        ...

    def head(self, encoder: AnySettings) -> nn.Module:
        """A module: (hidden [batch seq hidden], Batch) -> dict of tensors whose first dimension is the batch. One that
        looks at the first token alone says `reads_first_only = True` and is given [batch 1 hidden], which is cheaper.
        """
        ...

    def targets(self, examples: Sequence[Example], length: int) -> dict[str, Tensor]:
        """The targets of a batch, padded to `length` where they are by token."""
        ...

    def loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        """The mean over what has a target."""
        ...

    def predict(
        self, rows: Sequence[Row], examples: Sequence[Example], outputs: Sequence[Outputs]
    ) -> list[dict[str, Any]]:
        """One prediction a row, as the columns that go into the answer file; keys starting with "_" are for `scores` and
        for ensembles (logits) and are not written unless asked for."""
        ...

    def scores(self, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """All metrics of the task; the first is the headline."""
        ...
