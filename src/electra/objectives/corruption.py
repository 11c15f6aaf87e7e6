"""Corrupts rows of text, a step that ELECTRA and all its relatives share: choose positions, mask them, sample replacements.
Pure functions of their arguments, with static shapes and no host sync; the Corruptor puts them together.

Differences from the original code: positions are drawn without replacement (there with replacement: a position drawn twice got
the mean of two token ids), so exactly masking.share is chosen; a row with nothing to choose stays as it is (there 0/0).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from electra.base.batch import Batch, SpecialIds
from electra.base.config import Settings
from electra.base.randomness import mix, uniform
from electra.model import DetectionHead, Encoder, EncoderSettings, build_detection_head, encode, gather_rows, initialise
from electra.model.generators import (
    AutoregressiveGenerator,
    Generator,
    GeneratorSettings,
    TransformerGenerator,
    TwoTowerGenerator,
    build_pair,
)
from electra.model.heads import TokenHead, sample_tokens
from electra.objectives.losses import Sums, masked_lm_loss, mean_over
from electra.objectives.metrics import GENERATOR_STALLS, generator_sums, histogram


class MaskingSettings(Settings):
    """`share` is the fraction of a row to choose. Of the chosen tokens, the fraction `mask_token_share` becomes [MASK] and the
    rest stays as it is (never random words, unlike BERT). `unit` is what is chosen as a whole. Span lengths are geometric with mean
    about 1 / `span_stop`, cut at `span_limit` (`span_stop` = 1 gives single tokens, a small value nearly fixed lengths)."""

    share: float = Field(0.15, gt=0, lt=1)
    mask_token_share: float = Field(0.85, ge=0, le=1)
    unit: Literal["token", "word", "span"] = "token"
    span_stop: float = Field(0.3, gt=0, le=1)
    span_limit: int = Field(8, ge=1)


class SamplingSettings(Settings):
    """How replacements are drawn: from softmax(logits / temperature), optionally among the `top_k` most likely tokens only
    (0: all), never the original token (`disallow_correct`), or always the most likely one (`greedy`, found in one description
    of ELECTRA but not in the paper: the discriminator then sees few and dull replacements).

    The temperature falls linearly from `start_temperature` to `temperature` over the first fraction `cooling` of the run
    (Fast-ELECTRA: exponentially). Samples at a high temperature are easier to detect, which helps a discriminator that would
    otherwise stay at chance for long. Equal temperatures are the paper's constant. Evaluation uses `temperature`."""

    temperature: float = Field(1.0, gt=0)
    start_temperature: float = Field(1.0, gt=0)
    cooling: float = Field(0.5, gt=0, le=1)
    disallow_correct: bool = False
    greedy: bool = False
    top_k: int = Field(0, ge=0)

    @model_validator(mode="after")
    def choices_agree(self) -> "SamplingSettings":
        if self.greedy and (self.disallow_correct or self.top_k):
            raise ValueError(
                "greedy takes the most likely token, so disallow_correct and top_k have no effect. Drop one or the other"
            )
        return self

    def hides_probabilities(self, kind: str) -> Iterator[str]:
        """Yields why an objective that needs the probability of each sampled token cannot use these settings."""
        if self.greedy or self.disallow_correct or self.top_k:
            yield (
                f'objective.kind = "{kind}" needs the probability of what was sampled: sampling.greedy, disallow_correct '
                "and top_k must be off"
            )

    def temperature_at(self, progress: float | Float[Tensor, ""]) -> float | Float[Tensor, ""]:
        """The temperature after the fraction `progress` of the run; a plain number if it is constant."""
        start, end = self.start_temperature, self.temperature
        if start == end:
            return end
        cooled = progress / self.cooling
        return start + (end - start) * (cooled.clamp(max=1.0) if isinstance(cooled, Tensor) else min(1.0, cooled))


class NoiseSettings(NamedTuple):
    generator: GeneratorSettings
    masking: MaskingSettings
    sampling: SamplingSettings


class ObjectiveBase(Settings):
    """The base of every objective's settings."""

    def contradictions(self, noise: NoiseSettings) -> Iterator[str]:
        """Yields which of the other settings this objective cannot be trained with, and the remedy. By default none."""
        yield from ()


class Chosen(NamedTuple):
    """The chosen positions: `count` slots per row, some of which may be unused. `targets` are the original tokens there.
    `group` is the number of the group (token, word or span) that each token of the row belongs to."""

    positions: Int[Tensor, "batch count"]
    used: Bool[Tensor, "batch count"]
    targets: Int[Tensor, "batch count"]
    group: Int[Tensor, "batch seq"]


def choose(batch: Batch, settings: MaskingSettings, special: SpecialIds, continues: Bool[Tensor, "vocab"]) -> Chosen:
    """The positions to mask. There are always round(share * seq) slots per row, so shapes are static; slot j of a row is used while
    j < max(1, round(share * real tokens of that row)) and maskable tokens are left. [CLS] and [SEP] count as real, as in the original.

    Words and spans are groups of tokens: a row is cut into consecutive groups, and whole groups are drawn in random order
    while they fit, so slightly fewer tokens than `share` are chosen. If the first group alone does not fit, it is cut. Short
    groups fit more often, so they are chosen slightly more often than long ones."""
    length = batch.ids.shape[1]
    can_mask = maskable(batch, special)
    noise = uniform(batch.seed, "choose", batch.samples, length)
    slots = torch.arange(max(1, round(settings.share * length)), device=noise.device)
    wanted = (batch.is_real.sum(1, keepdim=True) * settings.share).round().clamp(min=1)

    # single tokens
    if settings.unit == "token":
        scores, positions = noise.masked_fill(~can_mask, -1.0).topk(len(slots), dim=1)
        group = torch.arange(length, device=noise.device).expand_as(batch.ids)
        return Chosen(positions, (slots < wanted) & (scores >= 0), batch.ids.gather(1, positions), group)

    # cut the row into words or spans; a special token is a group of its own
    starts = ~can_mask | (~can_mask).roll(1, dims=1)
    if settings.unit == "word":
        starts = starts | ~continues[batch.ids]
    else:
        draws = uniform(batch.seed, "span", batch.samples, length)
        starts = starts | span_starts(draws, settings.span_stop, settings.span_limit)
    group = starts.long().cumsum(1) - starts[:, :1].long()

    # all tokens of a group get the same noise, so sorting keeps them side by side
    order = noise.gather(1, group).masked_fill(~can_mask, -1.0).sort(dim=1, descending=True, stable=True)
    scores, positions = order.values[:, : len(slots)], order.indices[:, : len(slots)]
    sizes = torch.zeros_like(group).scatter_add(1, group, can_mask.long())
    chosen = group.gather(1, positions)
    first = slots - place_in_group(chosen)
    fits = (first + sizes.gather(1, chosen) <= wanted) | (first == 0)
    return Chosen(positions, fits & (slots < wanted) & (scores >= 0), batch.ids.gather(1, positions), group)


def span_starts(noise: Float[Tensor, "batch seq"], stop: float, limit: int) -> Bool[Tensor, "batch seq"]:
    """True at the first token of each span. Span lengths are geometric: length l has probability stop (1 - stop)^(l-1), cut at
    `limit`. noise[:, j] gives the length of the j-th span, which begins at the sum of the lengths before it."""
    if stop == 1:
        return torch.ones_like(noise, dtype=torch.bool)
    lengths = (1 + (noise.log() / torch.tensor(1 - stop).log()).floor()).clamp(max=limit).long()
    begins = lengths.cumsum(1) - lengths
    starts = torch.zeros(noise.shape[0], noise.shape[1] + 1, dtype=torch.bool, device=noise.device)
    return starts.scatter(1, begins.clamp(max=noise.shape[1]), True)[:, :-1]


def place_in_group(group: Int[Tensor, "batch n"]) -> Int[Tensor, "batch n"]:
    """0 for the first token of a group, 1 for the second, and so on."""
    places = torch.arange(group.shape[1], device=group.device).expand_as(group)
    is_first = torch.ones_like(group, dtype=torch.bool)
    is_first[:, 1:] = group[:, 1:] != group[:, :-1]
    return places - torch.where(is_first, places, 0).cummax(1).values


def mask_chosen(batch: Batch, chosen: Chosen, settings: MaskingSettings, special: SpecialIds) -> Batch:
    """x^masked = REPLACE(x, m, [MASK]), for the fraction `mask_token_share` of the chosen tokens."""
    draws = uniform(batch.seed, "mask", batch.samples, chosen.positions.shape[1])
    becomes_mask = draws < settings.mask_token_share
    masks = torch.full_like(chosen.positions, special.mask)
    return batch.with_ids(replace_at(batch.ids, chosen.positions, masks, chosen.used & becomes_mask))


def mark(chosen: Chosen) -> Bool[Tensor, "batch seq"]:
    """True where a token was chosen."""
    return torch.zeros_like(chosen.group, dtype=torch.bool).scatter(1, chosen.positions, chosen.used)


def maskable(batch: Batch, special: SpecialIds) -> Bool[Tensor, "batch seq"]:
    """Real tokens other than [CLS], [SEP] and [MASK]. [UNK] may be chosen, as in the original."""
    ids = batch.ids
    return batch.is_real & (ids != special.cls) & (ids != special.sep) & (ids != special.mask)


def replace_at(
    ids: Int[Tensor, "batch seq"],
    positions: Int[Tensor, "batch count"],
    tokens: Int[Tensor, "batch count"],
    where: Bool[Tensor, "batch count"],
) -> Int[Tensor, "batch seq"]:
    """REPLACE(x, m, tokens). Positions within a row are distinct, so the order of writes does not matter."""
    return ids.scatter(1, positions, torch.where(where, tokens, ids.gather(1, positions)))


def sample(
    logits: Float[Tensor, "*rows vocab"],
    noise: Float[Tensor, "*draws"],
    settings: SamplingSettings,
    progress: float | Float[Tensor, ""],
    targets: Int[Tensor, "*rows"],
) -> Int[Tensor, "*rows"]:
    """One token per distribution, drawn with two noise numbers each as the settings say. No gradient flows through it."""
    logits = logits.detach()
    if settings.greedy:
        return logits.argmax(-1)
    if settings.disallow_correct:
        logits = logits.scatter(-1, targets[..., None], -torch.inf)
    if settings.top_k:
        least = logits.topk(min(settings.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    drawn = sample_tokens(logits.flatten(0, -2), noise.reshape(-1, 2), settings.temperature_at(progress))
    return drawn.view_as(targets)


class Network(NamedTuple):
    """A network that can be exported and reused. `kind` says which head it has: a discriminator's detects replaced tokens, a
    generator's predicts tokens."""

    encoder: Encoder
    head: DetectionHead | TokenHead
    kind: Literal["discriminator", "generator"] = "discriminator"

    def detect(self, batch: Batch) -> Float[Tensor, "batch seq"]:
        """A discriminator's logits: above 0 if it considers the token replaced (Electric: the energies)."""
        logits: Tensor = self.head(encode(self.encoder, batch))
        return logits


@dataclass(frozen=True, kw_only=True)
class ObjectiveInputs:
    """Everything an objective needs to build its networks besides its own settings. `continues` and `token_counts` have one entry
    per vocabulary token: whether it continues the word before it, and how often it occurs in the corpus."""

    encoder: EncoderSettings
    generator: GeneratorSettings
    masking: MaskingSettings
    sampling: SamplingSettings
    special: SpecialIds
    continues: Bool[Tensor, "vocab"]
    token_counts: Float[Tensor, "vocab"]
    seed: int

    @property
    def vocab_size(self) -> int:
        return len(self.continues)

    def networks(self, keeps_logits: bool = False) -> tuple[Encoder, DetectionHead, "Corruptor"]:
        """A discriminator, its detection head, and the corruptor with its generator."""
        discriminator, generator = build_pair(self.encoder, self.generator, self.vocab_size, self.token_counts)
        rules = self.masking, self.sampling, self.special, self.continues
        return discriminator, build_detection_head(self.encoder), Corruptor(generator, *rules, keeps_logits)

    def initialise(self, objective: nn.Module) -> None:
        initialise(objective, self.encoder, mix(self.seed, "weights"))


class Generated(NamedTuple):
    """The generator's output at the chosen positions, with a sampled token for every slot, used or not. `is_best`: the original
    token is the most likely one. `logits` are those at the chosen positions, `everywhere` those at all positions, `states` the hidden
    states that the token head read; each is None if the generator did not compute it."""

    sampled: Int[Tensor, "batch count"]
    is_best: Bool[Tensor, "batch count"]
    mlm_loss: Float[Tensor, ""]
    logits: Float[Tensor, "batch count vocab"] | None = None
    everywhere: Float[Tensor, "batch seq vocab"] | None = None
    states: Float[Tensor, "batch count hidden"] | None = None


class Corrupted(NamedTuple):
    """A corrupted batch and how it came about. `generator_loss` is L_MLM if the generator learns, else 0; `sums` are the generator's."""

    batch: Batch
    masked: Batch
    chosen: Chosen
    generated: Generated
    generator_loss: Float[Tensor, ""]
    is_replaced: Bool[Tensor, "batch seq"]
    sums: Sums


class Corruptor(nn.Module):
    """Chooses, masks, generates and replaces; holds the generator. `keeps_logits` is for objectives that read its logits."""

    continues: Bool[Tensor, "vocab"]

    def __init__(
        self,
        generator: Generator,
        masking: MaskingSettings,
        sampling: SamplingSettings,
        special: SpecialIds,
        continues: Bool[Tensor, "vocab"],
        keeps_logits: bool = False,
    ):
        super().__init__()
        self.generator, self.masking, self.sampling, self.special = generator, masking, sampling, special
        self.needs_logits = keeps_logits or sampling.greedy or sampling.top_k > 0
        # a generator that does not learn cannot stall
        self.muted_alarms: tuple[str, ...] = () if generator.learns else (GENERATOR_STALLS,)
        self.register_buffer("continues", continues, persistent=False)

    def forward(self, batch: Batch) -> Corrupted:
        """x^masked = REPLACE(x, m, [MASK]);  x̂_i ~ p_G(x_i | x^masked);  x^corrupt = REPLACE(x, m, x̂).
        A sampled token that equals the original counts as original."""
        chosen = choose(batch, self.masking, self.special, self.continues)
        masked = mask_chosen(batch, chosen, self.masking, self.special)
        generated = self.generate(batch, masked, chosen)
        sampled, is_best, mlm_loss, *_ = generated
        corrupted = batch.with_ids(replace_at(batch.ids, chosen.positions, sampled, chosen.used))
        loss = mlm_loss if self.generator.learns else torch.zeros_like(mlm_loss)
        sums = generator_sums(is_best, chosen.used, mlm_loss) | {
            "sampled_correct": ((sampled == chosen.targets) & chosen.used).sum(),
            "sampled_counts": histogram(sampled, chosen.used, len(self.continues)),
            "target_counts": histogram(chosen.targets, chosen.used, len(self.continues)),
        }
        return Corrupted(corrupted, masked, chosen, generated, loss, corrupted.ids != batch.ids, sums)

    def generate(self, batch: Batch, masked: Batch, chosen: Chosen) -> Generated:
        """The generator's loss and samples. If nobody reads its logits, a transformer computes likelihood and sample in one pass over
        the vocabulary. A two-tower or autoregressive generator never sees the token it predicts, so it reads the unmasked text,
        gives logits everywhere and learns from all maskable positions."""
        generator, (positions, used, targets, _) = self.generator, chosen
        noise = uniform(batch.seed, "sample", batch.samples, 2 * targets.shape[1])
        if isinstance(generator, TransformerGenerator) and not self.needs_logits:
            how = self.sampling.temperature_at(batch.progress), self.sampling.disallow_correct
            filled = generator.fill(masked, positions, targets, noise.view(-1, 2), *how)
            mlm_loss = mean_over(-filled.log_likelihood, used.flatten())
            return Generated(filled.sampled.view_as(targets), filled.is_best.view_as(targets), mlm_loss)
        everywhere, states = None, None
        if isinstance(generator, (TwoTowerGenerator, AutoregressiveGenerator)):
            everywhere = generator(batch, torch.arange(batch.ids.shape[1], device=noise.device).expand_as(batch.ids))
            logits = gather_rows(everywhere, positions)
            mlm_loss = masked_lm_loss(everywhere, batch.ids, maskable(batch, self.special))
        else:
            if isinstance(generator, TransformerGenerator):
                states = generator.states(masked, positions)
                logits = generator.logits(states)
            else:
                logits = generator(masked, positions)
            mlm_loss = masked_lm_loss(logits, targets, used)
        if isinstance(generator, AutoregressiveGenerator) and self.masking.unit != "token":
            sampled = self.sample_in_order(batch, chosen, noise)
        else:
            sampled = sample(logits, noise, self.sampling, batch.progress, targets)
        return Generated(sampled, logits.detach().argmax(2) == targets, mlm_loss, logits, everywhere, states)

    @torch.no_grad()
    def sample_in_order(
        self, batch: Batch, chosen: Chosen, noise: Float[Tensor, "batch draws"]
    ) -> Int[Tensor, "batch count"]:
        """Samples spans and words from left to right: the second token of a span is drawn given the first one drawn. All
        spans of a row grow at the same time, one token per pass, in `span_limit` passes; the rest of longer words is drawn in the
        last pass. A span sees the spans to its left as far as they have grown."""
        places = place_in_group(chosen.group).gather(1, chosen.positions)
        turns = places.clamp(max=self.masking.span_limit - 1)
        sampled = chosen.targets
        for turn in range(self.masking.span_limit):
            grown = batch.with_ids(replace_at(batch.ids, chosen.positions, sampled, chosen.used))
            logits = self.generator(grown, chosen.positions)
            drawn = sample(logits, noise, self.sampling, batch.progress, chosen.targets)
            sampled = torch.where(chosen.used & (turns == turn), drawn, sampled)
        return sampled

    def networks(self) -> dict[str, Network]:
        """The generator, if it is a network that `transformers` can load; else nothing."""
        if not isinstance(self.generator, TransformerGenerator):
            return {}
        return {"generator": Network(self.generator.encoder, self.generator.head, "generator")}
