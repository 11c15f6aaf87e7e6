"""From a row of text to a corrupted one: what ELECTRA and all its relatives share."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from electra.base.batch import Batch, SpecialIds
from electra.base.randomness import uniform
from electra.model.encoders import AnyEncoder, AnySettings
from electra.model.generators import (
    AutoregressiveGenerator,
    Generator,
    GeneratorSettings,
    TransformerGenerator,
    build_pair,
)
from electra.objectives.corruption import (
    Chosen,
    MaskingSettings,
    SamplingSettings,
    choose,
    mask_chosen,
    maskable,
    replace_at,
    sample,
)
from electra.objectives.losses import masked_lm_loss, mean_over
from electra.objectives.metrics import Sums, generator_sums


class Loss(NamedTuple):
    """`total` is what is minimised; `sums` are the counts that figures are made of."""

    total: Tensor
    sums: Sums


@dataclass(frozen=True)
class Material:
    """What an objective is built from, beside its own settings. `continues` and `token_counts` are by token of the
    vocabulary: does it go on with the word before it, and how often does it occur in the corpus."""

    encoder: AnySettings
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

    def pair(self) -> tuple[AnyEncoder, Generator]:
        """The discriminator and its generator."""
        return build_pair(self.encoder, self.generator, self.vocab_size, self.token_counts)


class Corrupted(NamedTuple):
    """`logits` are the generator's at the chosen positions, None where nobody asked to keep them; `everywhere` its logits
    at all positions where it gives those in one pass. `sampled` holds a token for every slot, used or not."""

    batch: Batch
    masked: Batch
    chosen: Chosen
    sampled: Int[Tensor, "batch count"]
    is_replaced: Bool[Tensor, "batch seq"]
    logits: Float[Tensor, "batch count vocab"] | None
    everywhere: Float[Tensor, "batch seq vocab"] | None
    mlm_loss: Float[Tensor, ""]
    sums: Sums


class Corruptor(nn.Module):
    """Chooses, masks, generates and replaces. Holds the generator. `keeps_logits`: for objectives that read them."""

    def __init__(self, material: Material, generator: Generator, keeps_logits: bool = False):
        super().__init__()
        self.keeps_logits = keeps_logits
        self.masking, self.sampling, self.special = material.masking, material.sampling, material.special
        self.generator = generator
        self.register_buffer("continues", material.continues, persistent=False)

    def forward(self, batch: Batch) -> Corrupted:
        """x^masked = REPLACE(x, m, [MASK]);  x̂_i ~ p_G(x_i | x^masked);  x^corrupt = REPLACE(x, m, x̂).
        A sampled token that equals the original is original."""
        assert isinstance(self.continues, Tensor)
        chosen = choose(batch, self.masking, self.special, self.continues)
        masked = mask_chosen(batch, chosen, self.masking, self.special)
        targets = batch.ids.gather(1, chosen.positions)
        draws = uniform(batch.seed, "sample", batch.samples, 2 * targets.shape[1])
        logits, everywhere, used = None, None, chosen.used
        if isinstance(self.generator, TransformerGenerator) and self.fills_at_once():
            heat, forbid_target = self.sampling.temperature_at(batch.progress), self.sampling.disallow_correct
            slots = targets, draws.view(-1, 2), heat, forbid_target
            filled = self.generator.fill(masked, chosen.positions, *slots)
            mlm_loss = mean_over(-filled.log_likelihood, used.flatten())
            sampled, is_best = filled.sampled.view_as(targets), filled.is_best.view_as(targets)
        else:
            logits, everywhere, mlm_loss = self.generate(batch, masked, chosen, targets)
            if isinstance(self.generator, AutoregressiveGenerator) and self.masking.unit != "token":
                sampled = self.sample_in_order(batch, chosen, targets, draws)
            else:
                sampled = self.draw(logits, draws, batch.progress, targets)
            is_best = logits.detach().argmax(2) == targets

        corrupted = batch.with_ids(replace_at(batch.ids, chosen.positions, sampled, used))
        sums = generator_sums(is_best, targets, sampled, used, mlm_loss, len(self.continues))
        is_replaced = corrupted.ids != batch.ids
        return Corrupted(corrupted, masked, chosen, sampled, is_replaced, logits, everywhere, mlm_loss, sums)

    def fills_at_once(self) -> bool:
        """Whether likelihood and draw can come from one pass that keeps no logits."""
        return not (self.keeps_logits or self.sampling.greedy or self.sampling.top_k)

    def generate(
        self, batch: Batch, masked: Batch, chosen: Chosen, targets: Int[Tensor, "batch count"]
    ) -> tuple[Tensor, Tensor | None, Float[Tensor, ""]]:
        """Logits at the chosen positions, everywhere if at all, and the loss."""
        if self.generator.reads_masked:
            logits = self.generator(masked, chosen.positions)
            return logits, None, masked_lm_loss(logits, targets, chosen.used)
        places = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
        everywhere = self.generator(batch, places)
        logits = everywhere.gather(1, chosen.positions[:, :, None].expand(-1, -1, everywhere.shape[2]))
        return logits, everywhere, masked_lm_loss(everywhere, batch.ids, maskable(batch, self.special))

    def fair(self, alarms: dict[str, str]) -> dict[str, str]:
        """What does not learn cannot be blamed for standing still."""
        return {k: v for k, v in alarms.items() if self.generator.learns or k != "generator stands still"}

    def networks(self) -> dict[str, tuple[AnyEncoder, nn.Module]]:
        """The generator, where it is a network that transformers can read."""
        match self.generator:
            case TransformerGenerator():
                return {"generator": (self.generator.encoder, self.generator.head)}
        return {}

    def draw(
        self,
        logits: Float[Tensor, "batch count vocab"],
        draws: Float[Tensor, "batch draws"],
        progress: float | Float[Tensor, ""],
        targets: Int[Tensor, "batch count"],
    ) -> Int[Tensor, "batch count"]:
        flat = logits.flatten(0, 1), draws.reshape(-1, 2), self.sampling, progress, targets.flatten()
        return sample(*flat).view_as(targets)

    @torch.no_grad()
    def sample_in_order(
        self,
        batch: Batch,
        chosen: Chosen,
        targets: Int[Tensor, "batch count"],
        draws: Float[Tensor, "batch draws"],
    ) -> Int[Tensor, "batch count"]:
        """Spans and words from the left to the right: the second token of a span is drawn given the first one drawn. All
        spans of a row grow at the same time, one token a pass, `span_limit` passes; what is longer is drawn in the last
        pass. A span sees the spans to its left as far as they have grown."""
        order = (
            place_in_group(chosen.group).gather(1, chosen.positions).clamp(max=self.masking.span_limit - 1)
        )
        sampled = targets
        for turn in range(self.masking.span_limit):
            now = chosen.used & (order == turn)
            grown = batch.with_ids(replace_at(batch.ids, chosen.positions, sampled, chosen.used))
            logits = self.generator(grown, chosen.positions)
            sampled = torch.where(now, self.draw(logits, draws, batch.progress, targets), sampled)
        return sampled


def place_in_group(group: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """0 for the first token of a group, 1 for the second, and so on."""
    places = torch.arange(group.shape[1], device=group.device).expand_as(group)
    is_first = torch.ones_like(group, dtype=torch.bool)
    is_first[:, 1:] = group[:, 1:] != group[:, :-1]
    return places - torch.where(is_first, places, 0).cummax(1).values
