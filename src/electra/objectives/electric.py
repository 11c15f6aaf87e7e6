"""Electric (Clark et al., 2020b): an energy-based cloze model, trained by noise-contrastive estimation.

    p_θ(x_t | x_\\t) = exp(-E_θ(x, t)) / Z(x_\\t),   with Z taken to be 1
    P(noise at t) = sigmoid( E_θ(x, t) + log q(x_t | x_\\t) + log(k / (1 - k)) )

k of a row's tokens are replaced by samples of a proposal q that scores every position in one pass (two towers). Unlike
ELECTRA, a sample that equals the original is noise all the same. The network's logit is the energy itself, so -E summed
over a text is its pseudo-log-likelihood, in one pass instead of one a token.

As the original code has it: q reads the original text, log q is that of the token which stands in the corrupted text,
its gradient is stopped, k is the asked share, and q learns by maximum likelihood at all maskable positions. The loss is
taken at every real token, [CLS] and [SEP] included; those are never noise.
"""

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from torch import nn

from electra.base.batch import Batch
from electra.base.randomness import mix
from electra.model import build_detection_head, encode, initialise
from electra.objectives.corruption import (
    Corrupted,
    Corruptor,
    Network,
    NoiseSettings,
    ObjectiveBase,
    ObjectiveInputs,
    mark,
    need_probabilities,
)
from electra.objectives.losses import Loss, log_likelihood, noise_contrastive_loss
from electra.objectives.metrics import ONE_CLASS, detection_sums


class ElectricSettings(ObjectiveBase):
    kind: Literal["electric"] = "electric"
    generator_weight: float = Field(1.0, ge=0)
    detection_weight: float = Field(50.0, ge=0)

    def contradictions(self, noise: NoiseSettings) -> Iterator[str]:
        if noise.masking.unit != "token":
            yield 'objective.kind = "electric" needs masking.unit=token: words and spans are not drawn from the proposal token by token'
        if noise.generator.kind not in ("two_tower", "autoregressive"):
            yield (
                f'objective.kind = "electric" needs a generator that scores every position in one pass, and '
                f"generator.kind={noise.generator.kind} cannot. Use generator.kind=two_tower"
            )
        yield from need_probabilities(self.kind, noise.sampling)
        if (noise.sampling.temperature, noise.sampling.start_temperature) != (1, 1):
            yield 'objective.kind = "electric" compares with the generator itself: sampling.temperature and start_temperature must be 1'


class Electric(nn.Module):
    headline = ("mlm_loss", "rtd_loss", "auc")
    extra_metrics = ()
    # noise that looks like data is what Electric strives for: an AUC near one half is no failure
    muted_alarms = (ONE_CLASS,)

    def __init__(self, settings: ElectricSettings, inputs: ObjectiveInputs):
        super().__init__()
        self.settings, self.share = settings, inputs.masking.share
        self.discriminator, generator = inputs.pair()
        self.detection_head = build_detection_head(inputs.encoder)
        self.corruptor = Corruptor(inputs, generator)
        initialise(self, inputs.encoder, mix(inputs.seed, "weights"))

    def forward(self, batch: Batch, corrupted: Corrupted | None = None) -> Loss:
        corrupted = corrupted or self.corruptor(batch)
        assert corrupted.generated.everywhere is not None
        energies = self.detection_head(encode(self.discriminator, corrupted.batch))
        log_q = log_likelihood(corrupted.generated.everywhere, corrupted.batch.ids)
        is_noise = mark(corrupted.chosen)
        nce_loss = noise_contrastive_loss(energies, log_q, is_noise, batch.is_real, self.share)
        total = (
            self.settings.generator_weight * corrupted.generated.mlm_loss + self.settings.detection_weight * nce_loss
        )
        logits = (energies + log_q).detach() + math.log(self.share / (1 - self.share))
        sums = detection_sums(logits, is_noise, batch.is_real, nce_loss)
        return Loss(total, corrupted.sums | sums)

    def networks(self) -> dict[str, Network]:
        return {"discriminator": Network(self.discriminator, self.detection_head, "discriminator")}

    def generator_parameters(self) -> Iterator[nn.Parameter]:
        return self.corruptor.own_parameters(self.discriminator)
