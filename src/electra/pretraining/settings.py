"""The settings of a pre-training run as one tree, and the networks they describe."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import Field, model_validator
from tokenizers import Tokenizer

from electra.base import config
from electra.data.rows import RowsSettings
from electra.data.tokenizer import continuing_tokens, special_ids
from electra.model import EncoderChoice
from electra.model.electra import ElectraEncoderSettings
from electra.model.generators import GeneratorSettings
from electra.objectives import Objective, ObjectiveSettings, build
from electra.objectives.corruption import MaskingSettings, ObjectiveInputs, SamplingSettings
from electra.objectives.electra import ElectraSettings
from electra.objectives.masked_lm import MaskedLMSettings
from electra.train.optimizers import OptimizerSettings
from electra.train.settings import ScheduleSettings, TrainSettings


class PretrainSettings(config.Settings):
    """The whole tree of a pre-training run. `data` is a folder made by "electra prepare"; `run` is where everything
    that the run makes goes (default: runs/ and the recipe's name). `start` is a run or a model folder whose encoder is
    what the main network begins with; empty: with random weights."""

    data: str
    run: str
    start: str = ""
    seed: int = Field(0, ge=0)
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
        """Of all kinds of encoders and objectives the paper's, where a recipe names none."""
        if not isinstance(tree, dict):
            return tree
        chosen = {name: tree[name] for name in ("encoder", "objective") if isinstance(tree.get(name), dict)}
        return tree | {name: {"kind": "electra"} | part for name, part in chosen.items()}

    @model_validator(mode="after")
    def parts_agree(self) -> "PretrainSettings":
        problems = list(contradictions(self))
        if self.rows.length > self.encoder.positions:
            problems.append(
                f"rows.length ({self.rows.length}) is beyond encoder.positions ({self.encoder.positions})"
            )
        small = self.encoder.scaled(self.generator.width, self.generator.depth)
        if not small.hidden or small.hidden % small.heads:
            problems.append(
                f"generator.width={self.generator.width} makes {small.hidden} hidden units for {small.heads} heads"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


def contradictions(settings: PretrainSettings) -> Iterator[str]:
    """What cannot be trained together, and what to do about it."""
    generator, objective, sampling = settings.generator, settings.objective.kind, settings.sampling
    if generator.sharing == "all":
        if (generator.width, generator.depth) != (1, 1):
            yield 'generator.sharing = "all" needs generator.width=1 and generator.depth=1'
        if generator.kind != "transformer":
            yield f'generator.sharing = "all" makes generator and discriminator one network: generator.kind={generator.kind} cannot. Use generator.sharing=tied'
    if generator.kind == "frozen":
        if not generator.source:
            yield (
                'generator.kind = "frozen" needs the run it comes from. Train it first (electra pretrain masked-lm data=… '
                "run=runs/masked-lm), then give generator.source=runs/masked-lm"
            )
        if generator.sharing in ("tied", "all"):
            yield f'a frozen generator cannot share weights that learn: generator.sharing={generator.sharing}. Use "none" or "gdes"'
        if objective == "masked_lm":
            yield 'objective.kind = "masked_lm" has no generator, so generator.kind = "frozen" has no meaning. Drop one'
    elif generator.source:
        yield f'generator.source is only for generator.kind = "frozen" (this one is {generator.kind})'
    if generator.sharing == "gdes" and generator.kind in ("uniform", "unigram"):
        yield f"generator.kind={generator.kind} has no embeddings to share. Use generator.sharing=none"
    if objective == "electric" and settings.masking.unit != "token":
        yield 'objective.kind = "electric" needs masking.unit=token: words and spans are not drawn from the proposal token by token'
    match settings.objective:
        case MaskedLMSettings(random_share=random) if settings.masking.mask_token_share + random > 1:
            yield (
                f"masking.mask_token_share ({settings.masking.mask_token_share}) and objective.random_share ({random}) are "
                "shares of the same tokens: together at most 1"
            )
    if objective == "electric" and generator.kind not in ("two_tower", "autoregressive"):
        yield (
            f'objective.kind = "electric" needs a generator that scores every position in one pass, and '
            f"generator.kind={generator.kind} cannot. Use generator.kind=two_tower"
        )
    if objective == "adversarial" and generator.kind != "transformer":
        yield f'objective.kind = "adversarial" trains a generator.kind=transformer (got {generator.kind})'
    plain = not (sampling.greedy or sampling.disallow_correct or sampling.top_k)
    if objective in ("electric", "adversarial") and not plain:
        yield (
            f'objective.kind = "{objective}" needs the probability of what was sampled: sampling.greedy, disallow_correct and '
            "top_k must be off"
        )
    if objective == "electric" and (sampling.temperature, sampling.start_temperature) != (1, 1):
        yield 'objective.kind = "electric" compares with the generator itself: sampling.temperature and start_temperature must be 1'
    if objective == "replaced_span" and settings.masking.unit != "span":
        yield 'objective.kind = "replaced_span" needs masking.unit=span'
    if settings.masking.unit == "span" and settings.masking.span_limit > settings.rows.length - 2:
        yield (
            f"masking.span_limit ({settings.masking.span_limit}) is beyond the text of a row "
            f"(rows.length {settings.rows.length} less [CLS] and [SEP]). Lower it"
        )


def resolve(recipe: str, words: list[str]) -> tuple[PretrainSettings, dict[str, str]]:
    """The settings of a command line. The run folder has a default that depends on the recipe's name."""
    given = config.parse_overrides(words).keys() | config.read_recipe(recipe).keys()
    if "run" in given:
        return config.resolve(PretrainSettings, recipe, words)
    name = "+".join(Path(part).stem for part in recipe.split("+"))
    settings, sources = config.resolve(PretrainSettings, recipe, [*words, f'run="runs/{name}"'])
    return settings, sources | {"run": "default"}


def build_objective(
    settings: PretrainSettings, tokenizer: Tokenizer, token_counts: numpy.ndarray | None = None
) -> Objective:
    """The networks with their first weights. Counts are for a unigram generator that is not read from a checkpoint."""
    continues = torch.from_numpy(continuing_tokens(tokenizer))
    counts = torch.zeros(len(continues)) if token_counts is None else torch.from_numpy(token_counts)
    inputs = ObjectiveInputs(
        encoder=settings.encoder,
        generator=settings.generator,
        masking=settings.masking,
        sampling=settings.sampling,
        special=special_ids(tokenizer),
        continues=continues,
        token_counts=counts.float(),
        seed=settings.seed,
    )
    return build(settings.objective, inputs)
