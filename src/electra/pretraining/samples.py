"""What the generator wrote and what the discriminator said, for the same held-out rows at every evaluation: samples.json of the
run folder, small enough to be sent to a page. It is for people. Nothing reads it to train, and a damaged one is begun anew.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from electra.base.batch import Batch
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
    """Rows whose answers are kept in the folder, in words."""

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
            objective, execution, shown = self.update.objective, self.update.execution, self.shown
            assert isinstance(objective, Objective)
            with torch.no_grad(), autocast(execution.precision, execution.device), kernels(self.update.with_kernels):
                answers = [played_rows(objective, batch.to(execution.device), shown.tokenizer) for batch in shown.rows]
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
    columns = (
        batch.ids,
        corrupted.batch.ids,
        said,
        batch.is_real.sum(1),
        corrupted.chosen.positions,
        corrupted.chosen.used,
    )
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


def keep_step(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    stored, tokens = read_samples(folder), [row["tokens"] for row in rows]
    is_same_text = stored["rows"] == tokens
    steps = [it for it in stored["steps"] if it["step"] < step and is_same_text]
    if len(steps) >= MOST_STEPS:
        steps = steps[::2]
    steps.append({"step": step, "written": [row["written"] for row in rows], "said": [row["said"] for row in rows]})
    write_json(folder / SAMPLES, {"format": 1, "rows": tokens, "steps": steps})


def read_samples(folder: Path) -> dict[str, Any]:
    """{"rows": the tokens of each, "steps": [{"step", "written": place -> token for each row, "said": hundredths}]}; empty where
    there is none, or none that is whole."""
    empty: dict[str, Any] = {"rows": [], "steps": []}
    if not (folder / SAMPLES).is_file():
        return empty
    try:
        content = read_object(folder / SAMPLES)
    except ElectraError:
        return empty
    return {key: content[key] for key in empty} if is_whole(content) else empty


def is_whole(content: Mapping[str, Any]) -> bool:
    rows, steps = content.get("rows"), content.get("steps")
    if not isinstance(rows, list) or not isinstance(steps, list) or not all(map(are_texts, rows)):
        return False
    return all(isinstance(it, dict) and is_step(it, rows) for it in steps)


def are_texts(row: object) -> bool:
    return isinstance(row, list) and all(isinstance(token, str) for token in row)


def is_step(step: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> bool:
    written, said = step.get("written"), step.get("said")
    if not isinstance(step.get("step"), int) or not isinstance(written, list) or not isinstance(said, list):
        return False
    if not len(written) == len(said) == len(rows):
        return False
    return all(
        isinstance(own, dict)
        and are_texts(list(own.values()))
        and isinstance(values, list)
        and len(values) == len(row)
        and all(isinstance(value, int) for value in values)
        for own, values, row in zip(written, said, rows, strict=True)
    )
