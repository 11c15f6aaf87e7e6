"""ELECTRA (Clark et al., 2020): a small generator fills masked tokens, a discriminator says which were replaced.

    min over θ_G, θ_D of  Σ_x  w_G L_MLM(x, θ_G) + λ L_Disc(x, θ_D)

The generator learns by maximum likelihood, not against the discriminator: nothing flows back through sampling.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from electra.batch import Batch, SpecialIds
from electra.config import Settings
from electra.model.encoder import Embeddings, Encoder, EncoderSettings, initialise
from electra.model.generator import GeneratorSettings
from electra.model.heads import DetectionHead, TokenHead
from electra.objectives.corruption import choose_positions, maskable, replace_at, sample_tokens
from electra.objectives.figures import Figures, Sums, alarms, detection_sums, generator_sums, summarise
from electra.objectives.losses import detection_loss, masked_lm_loss
from electra.randomness import mix, uniform


class ElectraSettings(Settings):
    """`mask_share` of a row is chosen; of the chosen, `mask_token_share` become [MASK] and the rest stay as they are
    (never random words, unlike BERT).

    The sampling temperature falls in a straight line from `start_temperature` to `temperature` over the first `cooling`
    of the run: samples of a hot generator are easier to catch, which starts a discriminator that would else stand at
    chance for long. Equal temperatures, the default, are the paper's constant. Evaluation is at `temperature`."""

    kind: Literal["electra"] = "electra"
    mask_share: float = Field(0.15, gt=0, lt=1)
    mask_token_share: float = Field(0.85, ge=0, le=1)
    generator_weight: float = Field(1.0, ge=0)
    detection_weight: float = Field(50.0, ge=0)
    temperature: float = Field(1.0, gt=0)
    start_temperature: float = Field(1.0, gt=0)
    cooling: float = Field(0.5, gt=0, le=1)
    disallow_correct: bool = False


class Loss(NamedTuple):
    """`total` is what is minimised; `sums` are the counts that figures are made of."""

    total: Tensor
    sums: Sums


class Corrupted(NamedTuple):
    batch: Batch
    positions: Int[Tensor, "batch count"]
    used: Bool[Tensor, "batch count"]
    is_replaced: Bool[Tensor, "batch seq"]
    mlm_loss: Float[Tensor, ""]
    sums: Sums


class Electra(nn.Module):
    headline = ("mlm_loss", "rtd_loss", "auc")

    def __init__(
        self,
        settings: ElectraSettings,
        encoder: EncoderSettings,
        generator: GeneratorSettings,
        vocab_size: int,
        special: SpecialIds,
        seed: int,
    ):
        super().__init__()
        self.settings, self.special, self.vocab_size = settings, special, vocab_size
        self.discriminator = Encoder(encoder, Embeddings(encoder, vocab_size))
        self.detection_head = DetectionHead(encoder)
        small = encoder.scaled(generator.width, generator.depth)
        match generator.sharing:
            case "all":
                self.generator = self.discriminator
            case "tied":
                self.generator = Encoder(small, self.discriminator.embeddings)
            case "none":
                self.generator = Encoder(small, Embeddings(small, vocab_size))
        self.token_head = TokenHead(small, vocab_size)
        initialise(self, encoder, mix(seed, "weights"))

    def forward(self, batch: Batch) -> Loss:
        corrupted = self.corrupt(batch)
        logits = self.detect(corrupted.batch)
        rtd_loss = detection_loss(logits, corrupted.is_replaced, batch.is_real)
        total = (
            self.settings.generator_weight * corrupted.mlm_loss + self.settings.detection_weight * rtd_loss
        )
        sums = detection_sums(logits, corrupted.is_replaced, batch.is_real, rtd_loss)
        return Loss(total, corrupted.sums | sums)

    def corrupt(self, batch: Batch) -> Corrupted:
        """x^masked = REPLACE(x, m, [MASK]);  x̂_i ~ p_G(x_i | x^masked);  x^corrupt = REPLACE(x, m, x̂).
        A sampled token that equals the original is original."""
        noise = uniform(batch.seed, "choose", batch.samples, batch.ids.shape[1])
        can_mask = maskable(batch, self.special)
        positions, used = choose_positions(can_mask, batch.is_real, self.settings.mask_share, noise)
        count = positions.shape[1]

        becomes_mask = uniform(batch.seed, "mask", batch.samples, count) < self.settings.mask_token_share
        masks = torch.full_like(positions, self.special.mask)
        masked = batch.with_ids(replace_at(batch.ids, positions, masks, used & becomes_mask))

        logits = self.generate(masked, positions).flatten(0, 1)
        targets = batch.ids.gather(1, positions).flatten()
        mlm_loss = masked_lm_loss(logits, targets, used.flatten())

        draws = uniform(batch.seed, "sample", batch.samples, 2 * count).view(-1, 2)
        forbidden = targets if self.settings.disallow_correct else None
        sampled = sample_tokens(logits, draws, self.temperature(batch.progress), forbidden)
        corrupted = batch.with_ids(replace_at(batch.ids, positions, sampled.view_as(positions), used))
        sums = generator_sums(logits.detach(), targets, sampled, used.flatten(), mlm_loss)
        return Corrupted(corrupted, positions, used, corrupted.ids != batch.ids, mlm_loss, sums)

    def temperature(self, progress: float) -> float:
        start, end = self.settings.start_temperature, self.settings.temperature
        return start + (end - start) * min(1.0, progress / self.settings.cooling)

    def generate(
        self, masked: Batch, positions: Int[Tensor, "batch count"]
    ) -> Float[Tensor, "batch count vocab"]:
        """The generator's logits at the chosen positions only."""
        hidden = self.generator(masked.ids, masked.segments, masked.is_real if masked.padded else None)
        chosen = hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2]))
        return self.token_head(chosen, self.generator.embeddings.words.weight)

    def detect(self, batch: Batch) -> Float[Tensor, "batch seq"]:
        hidden = self.discriminator(batch.ids, batch.segments, batch.is_real if batch.padded else None)
        return self.detection_head(hidden)

    def figures(self, sums: Mapping[str, Tensor]) -> Figures:
        return summarise(sums)

    def alarms(self, history: Sequence[Figures], progress: float) -> dict[str, str]:
        return alarms(history, progress)
