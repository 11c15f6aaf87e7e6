"""Looking at and using what was trained: `load` reads any model, `Model` answers questions about text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from tokenizers import Tokenizer

from electra.base import config
from electra.base.errors import DataError
from electra.data.tables import Row
from electra.finetuning.folder import TASK_FILE, TaskModel, load_task_folder
from electra.finetuning.predict import Predictor
from electra.inspector.detect import Scored, ScoredToken, detect_texts, score_texts
from electra.inspector.embed import EmbedSettings, embed_texts
from electra.interop.read import Pretrained
from electra.model import Encoder
from electra.model.heads import Pooling
from electra.pretraining.load import load_network


@dataclass(frozen=True)
class Model:
    """A trained network with its tokenizer. Which questions it answers depends on its kind: a discriminator detects, an
    Electric model scores, a fine-tuned model predicts; all of them embed."""

    path: Path
    network: Pretrained
    finetuned: TaskModel | None = None

    @property
    def kind(self) -> str:
        """discriminator, electric, generator or encoder; of a fine-tuned model its kind of task (classification, …)."""
        if self.finetuned:
            return self.finetuned.task.settings.kind
        is_electric = self.network.kind == "discriminator" and self.network.objective == "electric"
        return "electric" if is_electric else self.network.kind

    @property
    def encoder(self) -> Encoder:
        return self.network.encoder

    @property
    def tokenizer(self) -> Tokenizer:
        return self.network.tokenizer

    @overload
    def detect(self, texts: str) -> list[ScoredToken]: ...  # type: ignore[overload-overlap]
    @overload
    def detect(self, texts: Sequence[str]) -> list[list[ScoredToken]]: ...
    def detect(self, texts: str | Sequence[str]) -> list[ScoredToken] | list[list[ScoredToken]]:
        """P(replaced) of every token of a text, or of each of several texts."""
        if self.kind == "electric":
            raise DataError(
                f"{self.path} has energies, not probabilities of replacement. Use: electra score {self.path}"
            )
        if self.kind != "discriminator":
            raise DataError(
                f"{self.path} holds no discriminator: its network is of kind {self.kind}. Give one that has a "
                "detection head, or the run it is from."
            )
        return self.detect([texts])[0] if isinstance(texts, str) else detect_texts(self.network, texts)

    @overload
    def score(self, texts: str) -> Scored: ...  # type: ignore[overload-overlap]
    @overload
    def score(self, texts: Sequence[str]) -> list[Scored]: ...
    def score(self, texts: str | Sequence[str]) -> Scored | list[Scored]:
        """Pseudo-log-likelihoods: log p(token | all others), summed over each text and token by token."""
        if self.kind != "electric":
            raise DataError(
                f'{self.path} cannot score text: its objective is {self.network.objective}, and only "electric" learns '
                "energies. Train one with: electra pretrain electric data=…"
            )
        return self.score([texts])[0] if isinstance(texts, str) else score_texts(self.network, texts)

    def embed(self, texts: str | Sequence[str], pooling: Pooling = "mean", length: int | None = None) -> np.ndarray:
        """A vector for each text, one row each: the mean of the last layer's vectors, or that of [CLS]. With a `length` texts are
        cut there, in tokens; without it long ones are read in windows."""
        parts = self.embed_batches([texts] if isinstance(texts, str) else texts, pooling, length)
        return np.concatenate([np.zeros((0, self.encoder.settings.hidden), np.float32), *parts])

    def embed_batches(
        self, texts: Iterable[str], pooling: Pooling = "mean", length: int | None = None
    ) -> Iterator[np.ndarray]:
        """`embed` of texts without end: arrays of a few thousand rows, in the order of the texts, which are read as the arrays
        are asked for."""
        settings = config.validate(EmbedSettings, {"pooling": pooling, "length": length})
        return embed_texts(self.network, texts, settings)

    def predict(self, rows: str | Sequence[str | Row]) -> list[dict[str, Any]]:
        """For each row its prediction and what the model says besides: the columns that `electra.predict` writes with
        probabilities. A row has the columns of the task; a plain text will do where the task reads one text column."""
        if not self.finetuned:
            raise DataError(
                f"{self.path} is not fine-tuned (it is of kind {self.kind}). Fine-tune it first: "
                f"electra finetune {self.path} TABLE"
            )
        rows, settings = [rows] if isinstance(rows, str) else rows, self.finetuned.task.settings
        columns = settings.input_columns
        if any(isinstance(row, str) and (len(columns) != 1 or not settings.is_input(row)) for row in rows):
            raise DataError(f"{self.path} does not read plain texts: give rows with {' and '.join(columns)}.")
        named = [{columns[0]: row} if isinstance(row, str) else row for row in rows]
        return Predictor(self.finetuned)(named) if named else []


def load(path: str | Path) -> Model:
    """Any model, ready for `detect`, `score`, `embed` and `predict`: a run folder, an export, a fine-tuned folder, or anybody's
    ELECTRA or ModernBERT folder of transformers.

    >>> electra.load("my-run").kind, electra.load("my-model/generator").kind
    ('discriminator', 'generator')
    """
    path = Path(path)
    if (path / TASK_FILE).is_file():
        finetuned = load_task_folder(path)
        return Model(path, finetuned.pretrained, finetuned)
    return Model(path, load_network(path))
