"""samples.json of a run folder: what the generator wrote and what the discriminator said, for the same held-out rows at every
evaluation, small enough to send to a web page. It is for people. Training never reads it, and a damaged one is replaced.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from tokenizers import Tokenizer

from electra.base.batch import Batch
from electra.base.config import Settings, dump
from electra.base.errors import ElectraError
from electra.base.files import read_object, write_json
from electra.objectives import Objective
from electra.objectives.corruption import mark
from electra.train.device import inference
from electra.train.step import Step

log = logging.getLogger(__name__)
SAMPLES = "samples.json"
ROWS_SHOWN, TOKENS_SHOWN = 20, 48  # the networks read whole rows, of which this many tokens are shown
MOST_STEPS = 200  # then every other one is dropped


def keep_samples(
    folder: Path, step: int, objective: Objective, update: Step, tokenizer: Tokenizer, batches: Iterable[Batch]
) -> None:
    """Add the outputs of an objective in evaluation mode, for the same rows each time."""
    device = update.execution.device
    with inference(update.execution.precision, device, update.with_kernels):
        answers = [played_rows(objective, batch.to(device), tokenizer) for batch in batches]
    try:
        keep_step(folder, step, [row for part in answers for row in part])
    except (OSError, ElectraError) as error:
        log.warning("%s is not written: %s", folder / SAMPLES, error)


def played_rows(objective: Objective, batch: Batch, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For each row its tokens, the generator's tokens at the chosen positions, and the probability that each token was
    replaced, in percent. Empty for an objective without a detector of replaced tokens."""
    network = objective.networks().get("discriminator")
    if network is None or objective.corruptor is None:
        return []
    corrupted = objective.corruptor(batch)
    percents = (100 * network.detect(corrupted.batch).float().sigmoid()).round().long()
    columns = batch.ids, corrupted.batch.ids, percents, mark(corrupted.chosen), batch.is_real.sum(1)
    rows = []
    for ids, samples, answers, is_chosen, length in zip(*(column.tolist() for column in columns), strict=True):
        end = min(TOKENS_SHOWN, length)
        written = {str(place): samples[place] for place in range(end) if is_chosen[place]}
        rows.append(
            {
                "tokens": [tokenizer.id_to_token(token) or "" for token in ids[:end]],
                "written": {place: tokenizer.id_to_token(token) or "" for place, token in written.items()},
                "said": answers[:end],
            }
        )
    return rows


class ShownStep(Settings):
    """For each row: what the generator wrote, by position, and what the discriminator said of every token, in percent."""

    step: int
    written: list[dict[str, str]]
    said: list[list[int]]


class Samples(Settings):
    """The content of samples.json. `rows`: the tokens of each row."""

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
    """The rows and steps of samples.json; empty if it is missing or damaged."""
    samples = Samples()
    with suppress(ValueError):
        samples = Samples.model_validate(read_object(folder / SAMPLES))
    return {"rows": samples.rows, "steps": [dump(it) for it in samples.steps]}
