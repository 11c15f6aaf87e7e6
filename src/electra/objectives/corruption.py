"""Choose positions, mask them, sample replacements: pure functions of their arguments, static shapes, no host sync.

What is chosen is groups of tokens: single tokens, whole words, or spans. A row is cut into consecutive groups and whole
groups are drawn until the asked share is reached; a single token is a group of one.

Where we differ from the original code: positions are drawn without replacement (there, with: a position drawn twice got
the mean of two token ids), so exactly the asked share is chosen; a row with nothing to choose is left alone (there 0/0).
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from electra.base.batch import Batch, SpecialIds
from electra.base.config import Settings
from electra.base.randomness import uniform
from electra.kernels.sampling import sample_tokens


class MaskingSettings(Settings):
    """`share` of a row is chosen; of the chosen, `mask_token_share` become [MASK] and the rest stay as they are (never
    random words, unlike BERT). `unit`: what is chosen as a whole. Span lengths are geometric with mean about
    1 / `span_stop`, cut at `span_limit` (`span_stop` = 1 makes single tokens, a small one nearly fixed lengths)."""

    share: float = Field(0.15, gt=0, lt=1)
    mask_token_share: float = Field(0.85, ge=0, le=1)
    unit: Literal["token", "word", "span"] = "token"
    span_stop: float = Field(0.3, gt=0, le=1)
    span_limit: int = Field(8, ge=1)


class SamplingSettings(Settings):
    """How replacements are drawn from the generator: from softmax(logits / temperature), by choice among the `top_k` most
    likely tokens only (0: all), never the original token (`disallow_correct`), or always the most likely one (`greedy`,
    which one description of ELECTRA has and the paper has not: the generator's one favourite soon is the right token or
    always the same wrong one, so the discriminator sees few and dull replacements).

    The temperature falls in a straight line from `start_temperature` to `temperature` over the first `cooling` of the
    run: samples of a hot generator are easier to catch, which starts a discriminator that would else stand at chance for
    long. Equal temperatures, the default, are the paper's constant. Evaluation is at `temperature`."""

    temperature: float = Field(1.0, gt=0)
    start_temperature: float = Field(1.0, gt=0)
    cooling: float = Field(0.5, gt=0, le=1)
    disallow_correct: bool = False
    greedy: bool = False
    top_k: int = Field(0, ge=0)

    @model_validator(mode="after")
    def choices_agree(self) -> "SamplingSettings":
        if self.greedy and self.disallow_correct:
            raise ValueError(
                "greedy and disallow_correct contradict each other: greedy takes the most likely token. Drop one of them"
            )
        if self.greedy and self.top_k:
            raise ValueError("greedy takes one token, so top_k has no meaning. Drop one of them")
        return self

    def temperature_at(self, progress: float | Float[Tensor, ""]) -> float | Float[Tensor, ""]:
        """A plain number where it does not change."""
        start, end = self.start_temperature, self.temperature
        if start == end:
            return end
        cooled = progress / self.cooling
        return start + (end - start) * (
            cooled.clamp(max=1.0) if isinstance(cooled, Tensor) else min(1.0, cooled)
        )


class Chosen(NamedTuple):
    """`count` slots a row, of which some may be unused. `group`: the group of every token of the row, by number."""

    positions: Int[Tensor, "batch count"]
    used: Bool[Tensor, "batch count"]
    group: Int[Tensor, "batch seq"]


def choose(
    batch: Batch, settings: MaskingSettings, special: SpecialIds, continues: Bool[Tensor, "vocab"]
) -> Chosen:
    """`continues` says of each token of the vocabulary whether it goes on with the word before it."""
    length = batch.ids.shape[1]
    can_mask = maskable(batch, special)
    noise = uniform(batch.seed, "choose", batch.samples, length)
    match settings.unit:
        case "token":
            positions, used = choose_positions(can_mask, batch.is_real, settings.share, noise)
            return Chosen(positions, used, torch.arange(length, device=noise.device).expand_as(batch.ids))
        case "word":
            starts = ~continues[batch.ids] | ~can_mask
        case "span":
            draws = uniform(batch.seed, "span", batch.samples, length)
            starts = span_starts(draws, settings.span_stop, settings.span_limit)
    starts = starts | ~can_mask | (~can_mask).roll(1, dims=1)
    group = starts.long().cumsum(1) - starts[:, :1].long()
    return Chosen(*choose_groups(can_mask, batch.is_real, group, settings.share, noise), group)


def span_starts(noise: Float[Tensor, "batch seq"], stop: float, limit: int) -> Bool[Tensor, "batch seq"]:
    """The row cut into spans of geometric length: length l has probability stop (1 - stop)^(l-1), cut at `limit`.
    Slot j's number gives the length of the j-th span; a span begins where the lengths before it add up to."""
    if stop == 1:
        return torch.ones_like(noise, dtype=torch.bool)
    lengths = (1 + (noise.log() / torch.tensor(1 - stop).log()).floor()).clamp(max=limit).long()
    begins = lengths.cumsum(1) - lengths
    starts = torch.zeros(noise.shape[0], noise.shape[1] + 1, dtype=torch.bool, device=noise.device)
    return starts.scatter(1, begins.clamp(max=noise.shape[1]), True)[:, :-1]


def choose_groups(
    can_mask: Bool[Tensor, "batch seq"],
    is_real: Bool[Tensor, "batch seq"],
    group: Int[Tensor, "batch seq"],
    share: float,
    noise: Float[Tensor, "batch seq"],
) -> tuple[Int[Tensor, "batch count"], Bool[Tensor, "batch count"]]:
    """Whole groups in random order while they fit into max(1, round(share * real tokens)) slots, so a little less than
    the asked share is chosen. The first group is cut where it alone does not fit."""
    count = max(1, round(share * can_mask.shape[1]))
    score = noise.gather(1, group).masked_fill(~can_mask, -1.0)
    order = score.sort(dim=1, descending=True, stable=True)
    scores, positions = order.values[:, :count], order.indices[:, :count]
    slots = torch.arange(count, device=noise.device).expand_as(positions)
    sizes = torch.zeros_like(group).scatter_add(1, group, can_mask.long())
    chosen = group.gather(1, positions)
    is_first = torch.ones_like(chosen, dtype=torch.bool)
    is_first[:, 1:] = chosen[:, 1:] != chosen[:, :-1]
    first = torch.where(is_first, slots, 0).cummax(1).values
    wanted = (is_real.sum(1, keepdim=True) * share).round().clamp(min=1)
    fits = (first + sizes.gather(1, chosen) <= wanted) | (first == 0)
    return positions, fits & (slots < wanted) & (scores >= 0)


def mask_chosen(batch: Batch, chosen: Chosen, settings: MaskingSettings, special: SpecialIds) -> Batch:
    """x^masked = REPLACE(x, m, [MASK])."""
    count = chosen.positions.shape[1]
    becomes_mask = uniform(batch.seed, "mask", batch.samples, count) < settings.mask_token_share
    masks = torch.full_like(chosen.positions, special.mask)
    return batch.with_ids(replace_at(batch.ids, chosen.positions, masks, chosen.used & becomes_mask))


def mark(chosen: Chosen) -> Bool[Tensor, "batch seq"]:
    """True where a token was chosen."""
    return torch.zeros_like(chosen.group, dtype=torch.bool).scatter(1, chosen.positions, chosen.used)


def maskable(batch: Batch, special: SpecialIds) -> Bool[Tensor, "batch seq"]:
    """Real tokens other than [CLS], [SEP] and [MASK]. [UNK] may be chosen, as in the original."""
    ids = batch.ids
    return batch.is_real & (ids != special.cls) & (ids != special.sep) & (ids != special.mask)


def choose_positions(
    can_mask: Bool[Tensor, "batch seq"],
    is_real: Bool[Tensor, "batch seq"],
    share: float,
    noise: Float[Tensor, "batch seq"],
) -> tuple[Int[Tensor, "batch count"], Bool[Tensor, "batch count"]]:
    """count = round(share * seq) slots a row, always. Slot j of a row is used while j < max(1, round(share * real
    tokens of that row)) and maskable tokens are left; the rest is marked unused. [CLS] and [SEP] count as real tokens
    here, as in the original."""
    length = can_mask.shape[1]
    count = max(1, round(share * length))
    scores, positions = noise.masked_fill(~can_mask, -1.0).topk(count, dim=1)
    wanted = (is_real.sum(1, keepdim=True) * share).round().clamp(min=1)
    slots = torch.arange(count, device=noise.device)
    return positions, (slots < wanted) & (scores >= 0)


def replace_at(
    ids: Int[Tensor, "batch seq"],
    positions: Int[Tensor, "batch count"],
    tokens: Int[Tensor, "batch count"],
    where: Bool[Tensor, "batch count"],
) -> Int[Tensor, "batch seq"]:
    """REPLACE(x, m, tokens): positions within a row are distinct, so the order of writing cannot matter."""
    return ids.scatter(1, positions, torch.where(where, tokens, ids.gather(1, positions)))


def sample(
    logits: Float[Tensor, "rows vocab"],
    noise: Float[Tensor, "rows 2"],
    settings: SamplingSettings,
    progress: float | Float[Tensor, ""],
    targets: Int[Tensor, "rows"],
) -> Int[Tensor, "rows"]:
    """One token a row, as the settings say. No gradient passes."""
    logits = logits.detach()
    if settings.greedy:
        return logits.argmax(1)
    if settings.disallow_correct:
        logits = logits.scatter(1, targets[:, None], -torch.inf)
    if settings.top_k:
        least = logits.topk(min(settings.top_k, logits.shape[1]), dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return sample_tokens(logits, noise, settings.temperature_at(progress))
