"""What the generator wrote and what the discriminator said, for the same held-out rows at every evaluation: samples.json of the
run folder, small enough to be sent to a page. It is for people. Nothing reads it to train, and a damaged one is begun anew.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from torch import Tensor

from electra.base.batch import Batch
from electra.base.config import Settings, dump
from electra.base.errors import ElectraError
from electra.base.files import read_object, write_json
from electra.objectives import Objective
from electra.train.device import autocast, kernels
from electra.train.log import Record
from electra.train.loop import HeldOutEvaluation

log = logging.getLogger(__name__)
SAMPLES = "samples.json"
ROWS_SHOWN, TOKENS_SHOWN = 20, 48  # rows are read whole, and shown as far
MOST_STEPS = 200  # then every other one goes


@dataclass(frozen=True)
class Shown:
    """Rows, and the objective whose answers to them are kept in the folder, in words."""

    objective: Objective
    folder: Path
    tokenizer: Tokenizer
    rows: Iterable[Batch]


@dataclass
class SampledEvaluation(HeldOutEvaluation):
    """The evaluation of pre-training, which also keeps its answers to a few rows."""

    shown: Shown = field(kw_only=True)

    def measure(self, step: int, earlier: Sequence[Record]) -> dict[str, float]:
        metrics = super().measure(step, earlier)
        if metrics and self.update.execution.ranks.is_first:
            execution, shown = self.update.execution, self.shown
            with torch.no_grad(), autocast(execution.precision, execution.device), kernels(self.update.with_kernels):
                answers = [
                    played_rows(shown.objective, batch.to(execution.device), shown.tokenizer) for batch in shown.rows
                ]
            try:
                keep_step(shown.folder, step, [row for part in answers for row in part])
            except (OSError, ElectraError) as error:
                log.warning("%s is not written: %s", shown.folder / SAMPLES, error)
        return metrics


def played_rows(objective: Objective, batch: Batch, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Of each row its tokens, what the generator put where it had its turn, and how probably each token was replaced, in
    hundredths. Nothing of an objective that has no detector of replaced tokens."""
    network = objective.networks().get("discriminator")
    if network is None or objective.corruptor is None:
        return []
    corrupted = objective.corruptor(batch)
    said = (100 * network.detect(corrupted.batch).float().sigmoid()).round().long()
    positions, used, *_ = corrupted.chosen
    columns = batch.ids, corrupted.batch.ids, said, batch.is_real.sum(1), positions, used
    return [played_row(tokenizer, *(column[row].cpu() for column in columns)) for row in range(len(batch.ids))]


def played_row(
    tokenizer: Tokenizer, ids: Tensor, made: Tensor, said: Tensor, real: Tensor, positions: Tensor, used: Tensor
) -> dict[str, Any]:
    end = min(TOKENS_SHOWN, int(real))
    places = sorted(place for place in positions[used].tolist() if place < end)
    return {
        "tokens": [tokenizer.id_to_token(number) or "" for number in ids[:end].tolist()],
        "written": {str(place): tokenizer.id_to_token(int(made[place])) or "" for place in places},
        "said": said[:end].tolist(),
    }


class ShownStep(Settings):
    """What was written, by place, and what was said of every token, in hundredths: both row by row."""

    step: int
    written: list[dict[str, str]]
    said: list[list[int]]


class Samples(Settings):
    """`rows` are the tokens of each."""

    format: int = 1
    rows: list[list[str]] = Field(default_factory=list)
    steps: list[ShownStep] = Field(default_factory=list)

    @model_validator(mode="after")
    def steps_are_of_the_rows(self) -> "Samples":
        lengths = [len(row) for row in self.rows]
        if any([len(row) for row in it.said] != lengths or len(it.written) != len(lengths) for it in self.steps):
            raise ValueError("a step is of other rows")
        return self


def keep_step(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    stored, tokens = read_samples(folder), [row["tokens"] for row in rows]
    steps = [it for it in stored["steps"] if it["step"] < step and stored["rows"] == tokens]
    if len(steps) >= MOST_STEPS:
        steps = steps[::2]
    steps.append({"step": step, "written": [row["written"] for row in rows], "said": [row["said"] for row in rows]})
    write_json(folder / SAMPLES, {"format": 1, "rows": tokens, "steps": steps})


def read_samples(folder: Path) -> dict[str, Any]:
    """`Samples` as JSON has them; empty where there are none, or none that are whole."""
    samples = Samples()
    with suppress(ValueError):
        samples = Samples.model_validate(read_object(folder / SAMPLES))
    return {"rows": samples.rows, "steps": [dump(it) for it in samples.steps]}
