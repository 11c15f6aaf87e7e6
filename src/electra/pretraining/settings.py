"""The settings of a pre-training run as one tree, and the networks they describe."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from torch import Tensor

from electra.base import config
from electra.base.batch import SpecialIds
from electra.base.remote import is_url
from electra.data.rows import RowsSettings
from electra.data.tokenizer import continuing_tokens, special_ids
from electra.model import EncoderChoice
from electra.model.electra import ElectraEncoderSettings
from electra.model.generators import GeneratorSettings
from electra.objectives import Objective, ObjectiveSettings, build
from electra.objectives.corruption import MaskingSettings, NoiseSettings, ObjectiveInputs, SamplingSettings
from electra.objectives.electra import ElectraSettings
from electra.objectives.masked_lm import MaskedLMSettings
from electra.train.optimizers import OptimizerSettings
from electra.train.settings import Horizon, ScheduleSettings, TrainSettings

log = logging.getLogger(__name__)

DECAY_OF_START = 0.1
"""Of optimizer.total_decay, for a run with `start`: all of it would erase what its weights have learned (docs/evidence/quickstart.md)."""
OF_GENERATORS = ("generator.", "sampling.", "optimizer.generator.")


class PretrainSettings(config.Settings):
    """All settings of a pre-training run. `data` is a folder made by "electra prepare"; `run` is the folder for everything
    that the run writes (default: runs/ and the recipe's name). `start` is a run or a model folder with whose encoder the
    main network begins; empty: random weights."""

    data: str
    run: str = Field(min_length=1)
    start: str = ""
    seed: int = Field(0, ge=0, lt=1 << 63)
    encoder: EncoderChoice = ElectraEncoderSettings()
    generator: GeneratorSettings = GeneratorSettings()
    masking: MaskingSettings = MaskingSettings()
    sampling: SamplingSettings = SamplingSettings()
    objective: ObjectiveSettings = ElectraSettings()
    rows: RowsSettings = RowsSettings()
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()

    @model_validator(mode="before")
    @classmethod
    def electra_by_default(cls, tree: Any) -> Any:
        """The kind of encoder and of objective is the paper's if a recipe names none."""
        if not isinstance(tree, dict):
            return tree
        chosen = {name: tree[name] for name in ("encoder", "objective") if isinstance(tree.get(name), dict)}
        return tree | {name: {"kind": "electra"} | part for name, part in chosen.items()}

    @model_validator(mode="before")
    @classmethod
    def positions_for_rows(cls, tree: Any) -> Any:
        """With `start`, rows that are longer than the table of positions make the table longer."""
        if not isinstance(tree, dict) or not tree.get("start"):
            return tree
        rows, encoder = tree.get("rows", {}), tree.get("encoder", {})
        if not isinstance(rows, dict) or not isinstance(encoder, dict):
            return tree
        length, positions = rows.get("length"), encoder.get("positions", ElectraEncoderSettings().positions)
        if not isinstance(length, int) or not isinstance(positions, int) or length <= positions:
            return tree
        return tree | {"encoder": encoder | {"positions": length}}

    @model_validator(mode="after")
    def parts_agree(self) -> "PretrainSettings":
        noise = NoiseSettings(self.generator, self.masking, self.sampling)
        problems = [*self.generator.contradictions(), *self.objective.contradictions(noise), *self.misfits()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def misfits(self) -> Iterator[str]:
        """Problems: folders where a run cannot train, and sizes of one part that do not fit another."""
        for key, where in (("data", "to a disk first"), ("start", "to a disk first"), ("run", "elsewhere afterwards")):
            if is_url(folder := getattr(self, key)):
                yield f"{key}={folder} is a URL, but training maps and locks files on a disk. Give a path: copy it {where}"
        if self.masking.unit == "span" and self.masking.span_limit > self.rows.length - 2:
            text = f"the text of a row (rows.length {self.rows.length} less [CLS] and [SEP])"
            yield f"masking.span_limit ({self.masking.span_limit}) is more than {text}. Lower it"
        if self.rows.length > self.encoder.positions:
            yield f"rows.length ({self.rows.length}) is beyond encoder.positions ({self.encoder.positions})"
        if self.generator.start == "discriminator" and not self.start:
            yield "generator.start=discriminator is for a run that begins with other weights: give start=FOLDER"
        small = self.encoder.scaled(self.generator.width, self.generator.depth)
        if not small.hidden or small.hidden % small.heads:
            yield f"generator.width={self.generator.width} makes {small.hidden} hidden units for {small.heads} heads"

    def optimizer_of_run(self) -> OptimizerSettings:
        """The optimizer with "auto" weight decays as numbers, unless time decides the number of steps; lower ones with `start`."""
        optimizer = self.optimizer
        if self.start:
            pair = optimizer, optimizer.generator
            optimizer = optimizer.updated(*({"total_decay": DECAY_OF_START * it.total_decay} for it in pair))
        return optimizer if self.train.minutes else optimizer.over(Horizon(self.train).steps_at_peak(self.schedule))

    def inputs(self, special: SpecialIds, continues: Tensor, token_counts: Tensor) -> ObjectiveInputs:
        return ObjectiveInputs(
            encoder=self.encoder,
            generator=self.generator,
            masking=self.masking,
            sampling=self.sampling,
            special=special,
            continues=continues,
            token_counts=token_counts,
            seed=self.seed,
        )


def resolve(recipe: str, words: list[str]) -> tuple[PretrainSettings, dict[str, str]]:
    """The settings of a command line, and where each comes from. The default run folder depends on the recipe's name."""
    name = "+".join(Path(part).stem for part in recipe.split("+"))
    return config.resolve(PretrainSettings, recipe, words, {"run": f"runs/{name}"})


def warn_without_effect(settings: PretrainSettings, sources: Mapping[str, str]) -> None:
    """Warn about settings on the command line that have no effect with the others."""
    is_masked_lm, schedule = isinstance(settings.objective, MaskedLMSettings), settings.schedule.kind
    decay = settings.optimizer.weight_decay
    is_joint = not settings.optimizer.decoupled and not is_masked_lm
    unread = {
        "a masked language model has no generator": OF_GENERATORS if is_masked_lm else (),
        "without optimizer.decoupled the generator has no optimizer of its own": OF_GENERATORS[2:] if is_joint else (),
        f"optimizer.weight_decay is {decay}, not auto": () if decay == "auto" else ("optimizer.total_decay",),
        f"schedule.kind={schedule} does not use it": ("schedule.power",) if schedule in ("cosine", "constant") else (),
    }
    for reason, keys in unread.items():
        if words := [key for key in sources if sources[key] == "command line" and key.startswith(keys)]:
            log.warning("%s will have no effect: %s.", ", ".join(words), reason)


def build_objective(
    settings: PretrainSettings, tokenizer: Tokenizer, token_counts: numpy.ndarray | None = None
) -> Objective:
    """The objective with its networks' initial weights. Counts are for a unigram generator that is not restored from a checkpoint."""
    continues = torch.from_numpy(continuing_tokens(tokenizer))
    counts = torch.zeros(len(continues)) if token_counts is None else torch.from_numpy(token_counts).float()
    return build(settings.objective, settings.inputs(special_ids(tokenizer), continues, counts))
