"""Inspecting and using trained models: `load` reads any model, `Model` answers questions about text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from tokenizers import Tokenizer

from electra.base import config
from electra.base.errors import DataError, ElectraError, command
from electra.data.tables import Row
from electra.data.tokenizer import TokenIds, is_same_tokenizer
from electra.finetuning.folder import (
    TASK_FILE,
    TaskModel,
    adopt_classifier,
    is_classifier,
    load_task_folder,
    seed_folders,
)
from electra.finetuning.predict import Predictor
from electra.inspector.detect import (
    PlayedToken,
    Proposal,
    Scored,
    ScoredToken,
    corrupted_ids,
    detect_texts,
    encode_one,
    played,
    propose,
    replaced_ids,
    score_texts,
)
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
        """discriminator, electric, generator or encoder; for a fine-tuned model its kind of task (classification, …)."""
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

    @cached_property
    def generator(self) -> Pretrained:
        """The generator that the network was trained against, from the same run or export; for a masked language model, the
        network itself."""
        if self.network.kind == "generator":
            return self.network
        for folder in (self.path, self.path.resolve().parent):
            with suppress(ElectraError):
                if is_same_tokenizer((network := load_network(folder, "generator")).tokenizer, self.tokenizer):
                    return network
        raise DataError(
            f"{self.path} has no generator with a token head beside it. Give the run, or the whole folder of such an export."
        )

    @overload
    def detect(self, texts: str) -> list[ScoredToken]: ...  # type: ignore[overload-overlap]
    @overload
    def detect(self, texts: Sequence[str]) -> list[list[ScoredToken]]: ...
    def detect(self, texts: str | Sequence[str]) -> list[ScoredToken] | list[list[ScoredToken]]:
        """P(replaced) of every token of a text, or of each of several texts."""
        if self.kind == "electric":
            raise DataError(
                f"{self.path} has energies, not probabilities of replacement. Use: {command('score', self.path)}"
            )
        if self.kind != "discriminator":
            raise DataError(
                f"{self.path} holds no discriminator: its network is of kind {self.kind}. Give one that has a "
                "detection head, or the run it is from."
            )
        refuse_table(texts)
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
                "energies. Train one with: electra pretrain modern-small+electric data=SHARDS run=RUN"
            )
        refuse_table(texts)
        return self.score([texts])[0] if isinstance(texts, str) else score_texts(self.network, texts)

    def fill(
        self, text: str, places: Sequence[int], top: int = 10, replacements: Mapping[int, str] | None = None
    ) -> list[list[Proposal]]:
        """What the generator would put at each of these places (tokens, counted from 0), the most probable first. `replacements`
        are tokens that already replace others elsewhere in the text."""
        return propose(self.generator, text, places, top, replacements or {})

    def corrupt(self, text: str, share: float = 0.15, seed: int = 0) -> list[PlayedToken]:
        """The text with a fraction `share` of its tokens replaced by the generator, and what the network says about each token."""
        encoding = encode_one(self.tokenizer, text)
        return self._played(encoding, *corrupted_ids(self.generator, encoding.ids, share, seed))

    def replace(self, text: str, replacements: Mapping[int, str]) -> list[PlayedToken]:
        """What the network says about the text with other tokens at some places."""
        encoding = encode_one(self.tokenizer, text)
        ids = replaced_ids(self.tokenizer, encoding, replacements)
        return self._played(encoding, ids, [place in replacements for place in range(len(ids))])

    def _played(self, encoding: TokenIds, ids: Sequence[int], chosen: Sequence[bool]) -> list[PlayedToken]:
        return played(self.network, encoding, ids, chosen, detects=self.kind == "discriminator")

    def embed(self, texts: str | Sequence[str], pooling: Pooling = "mean", length: int | None = None) -> np.ndarray:
        """An array with one row per text: the mean of the last layer's vectors, or that of [CLS]. With a `length` texts are cut
        after that many tokens; without it long ones are read in windows."""
        parts = self.embed_batches([texts] if isinstance(texts, str) else texts, pooling, length)
        return np.concatenate([np.zeros((0, self.encoder.settings.hidden), np.float32), *parts])

    def embed_batches(
        self, texts: Iterable[str], pooling: Pooling = "mean", length: int | None = None
    ) -> Iterator[np.ndarray]:
        """Like `embed` for any number of texts: yields arrays of up to a few thousand rows, in the order of the texts, which are
        read only as arrays are asked for."""
        refuse_table(texts)
        settings = config.validate(EmbedSettings, {"pooling": pooling, "length": length})
        return embed_texts(self.network, texts, settings)

    def predict(self, rows: str | Row | Iterable[str | Row]) -> list[dict[str, Any]]:
        """For each row its prediction and what the model says besides: the columns that `electra.predict` writes with
        probabilities. A row has the columns of the task; a plain text will do where the task reads one text column."""
        if not self.finetuned:
            raise DataError(
                f"{self.path} is not fine-tuned (it is of kind {self.kind}). Fine-tune it first: "
                f"{command('finetune', self.path, 'TABLE')}"
            )
        settings = self.finetuned.task.settings
        columns = settings.input_columns
        refuse_table(rows)
        rows = [rows] if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable) else list(rows)
        if odd := [(number, row) for number, row in enumerate(rows, 1) if not isinstance(row, str | Mapping)]:
            number, row = odd[0]
            raise DataError(
                f"row {number} is of type {type(row).__name__}. Give a text, or a dict with {' and '.join(columns)}."
            )
        if any(isinstance(row, str) and (len(columns) != 1 or not settings.is_input(row)) for row in rows):
            raise DataError(f"{self.path} does not read plain texts: give rows with {' and '.join(columns)}.")
        named = [{columns[0]: row} if isinstance(row, str) else row for row in rows]
        return Predictor(self.finetuned)(named) if named else []


def refuse_table(rows: object) -> None:
    """A DataFrame of pandas gives the names of its columns where its rows are asked for."""
    if type(rows).__name__ == "DataFrame":
        remedy = 'Give its column of texts, or its rows: table.to_dict("records") in pandas.'
        raise DataError(f"a table is not read as it is. {remedy}")


def load(path: str | Path) -> Model:
    """Loads any model for `detect`, `score`, `embed` and `predict`: a run folder, an export, a fine-tuned folder, or anybody's
    ELECTRA or ModernBERT folder of transformers, including classifiers.

    >>> electra.load("my-run").kind, electra.load("my-model/generator").kind
    ('discriminator', 'generator')
    """
    path = Path(path)
    if (path / TASK_FILE).is_file():
        finetuned = load_task_folder(path)
        return Model(path, finetuned.pretrained, finetuned)
    if seeds := seed_folders(path):
        names = ", ".join(folder.name for folder in seeds.values())
        raise DataError(
            f"{path} has several models ({names}). Load one of them; electra.predict takes the mean of all."
        )
    network = load_network(path)
    if network.kind == "encoder" and is_classifier(path):
        finetuned = adopt_classifier(path, {})
        return Model(path, finetuned.pretrained, finetuned)
    return Model(path, network)
