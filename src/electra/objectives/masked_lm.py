"""Masked language modelling: one encoder, one head over the vocabulary, the loss at the chosen positions.

    L = mean over i in m of -log p(x_i | x^masked)

As in the original code when it trains BERT, chosen tokens become [MASK] or stay (masking.mask_token_share). `random_share`, 0 by
default, is the fraction replaced by random words, as BERT does: mask_token_share = 0.8 and random_share = 0.1 give BERT's own
80 / 10 / 10.
"""

from collections.abc import Iterator
from typing import Literal

from jaxtyping import Bool
from pydantic import Field
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.randomness import uniform
from electra.model import build_token_head, encode, encoder_alone, gather_rows
from electra.objectives.corruption import (
    Chosen,
    Network,
    NoiseSettings,
    ObjectiveBase,
    ObjectiveInputs,
    choose,
    mask_chosen,
    replace_at,
)
from electra.objectives.losses import Loss, masked_lm_loss
from electra.objectives.metrics import generator_sums


class MaskedLMSettings(ObjectiveBase):
    kind: Literal["masked_lm"] = "masked_lm"
    random_share: float = Field(0.0, ge=0, le=1)

    def contradictions(self, noise: NoiseSettings) -> Iterator[str]:
        if noise.generator.kind == "frozen":
            yield 'objective.kind = "masked_lm" has no generator, so generator.kind = "frozen" has no effect. Drop one of the two'
        if noise.masking.mask_token_share + self.random_share > 1:
            yield (
                f"masking.mask_token_share ({noise.masking.mask_token_share}) and objective.random_share ({self.random_share}) are "
                "shares of the same tokens: together at most 1"
            )


class MaskedLM(nn.Module):
    continues: Bool[Tensor, "vocab"]
    headline = ("mlm_loss", "mlm_accuracy")
    extra_metrics = ()
    muted_alarms = ()
    corruptor = None

    def __init__(self, settings: MaskedLMSettings, inputs: ObjectiveInputs):
        super().__init__()
        self.settings, self.masking, self.special = settings, inputs.masking, inputs.special
        self.encoder = encoder_alone(inputs.encoder, inputs.vocab_size)
        self.token_head = build_token_head(inputs.encoder, inputs.vocab_size)
        self.register_buffer("continues", inputs.continues, persistent=False)
        inputs.initialise(self)

    def forward(self, batch: Batch, corrupted: None = None) -> Loss:
        chosen = choose(batch, self.masking, self.special, self.continues)
        masked = mask_chosen(batch, chosen, self.masking, self.special)
        if self.settings.random_share:
            masked = self.insert_random_words(masked, chosen)
        states = gather_rows(encode(self.encoder, masked), chosen.positions)
        logits = self.token_head(states, self.encoder)
        loss = masked_lm_loss(logits, chosen.targets, chosen.used)
        return Loss(loss, generator_sums(logits.detach().argmax(2) == chosen.targets, chosen.used, loss))

    def insert_random_words(self, masked: Batch, chosen: Chosen) -> Batch:
        """Replaces the fraction `random_share` by random words: the upper end of the draws whose lower end became [MASK]."""
        count = chosen.positions.shape[1]
        random = uniform(masked.seed, "mask", masked.samples, count) >= 1 - self.settings.random_share
        words = (uniform(masked.seed, "random word", masked.samples, count) * len(self.continues)).long()
        return masked.with_ids(replace_at(masked.ids, chosen.positions, words, chosen.used & random))

    def networks(self) -> dict[str, Network]:
        return {"generator": Network(self.encoder, self.token_head, "generator")}
