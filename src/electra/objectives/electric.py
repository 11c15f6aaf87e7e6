"""Electric (Clark et al., 2020b): an energy-based cloze model, trained by noise-contrastive estimation.

    p_θ(x_t | x_\\t) = exp(-E_θ(x, t)) / Z(x_\\t),   with Z taken to be 1
    P(noise at t) = sigmoid( E_θ(x, t) + log q(x_t | x_\\t) + log(k / (1 - k)) )

A fraction k of a row's tokens is replaced by samples from a proposal q that scores every position in one pass (two towers).
Unlike in ELECTRA, a sample that equals the original still counts as noise. The network's logit is the energy itself, so -E summed
over a text is its pseudo-log-likelihood, in one pass instead of one pass per token.

As in the original code: q reads the original text, log q is evaluated at the tokens of the corrupted text, its gradient is
stopped, k is masking.share, and q learns by maximum likelihood at all maskable positions. The loss covers every real token,
[CLS] and [SEP] included; those are never noise.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from torch import nn

from electra.base.batch import Batch
from electra.base.ranks import over_ranks
from electra.model import encode
from electra.objectives.corruption import Corrupted, Network, NoiseSettings, ObjectiveBase, ObjectiveInputs, mark
from electra.objectives.losses import Loss, log_likelihood, mean_over, noise_logits
from electra.objectives.metrics import ONE_CLASS, Ratio, detection


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
        yield from noise.sampling.hides_probabilities(self.kind)
        if (noise.sampling.temperature, noise.sampling.start_temperature) != (1, 1):
            yield 'objective.kind = "electric" compares with the generator itself: sampling.temperature and start_temperature must be 1'


class Electric(nn.Module):
    headline = ("mlm_loss", "rtd_loss", "auc")
    extra_metrics = (Ratio("energy_variance", "energy_squares", "real"),)
    # an AUC near one half is no failure: in Electric the noise is meant to look like data
    muted_alarms = (ONE_CLASS,)

    def __init__(self, settings: ElectricSettings, inputs: ObjectiveInputs):
        super().__init__()
        self.settings = settings
        self.discriminator, self.detection_head, self.corruptor = inputs.networks()
        inputs.initialise(self)

    def forward(self, batch: Batch, corrupted: Corrupted | None = None) -> Loss:
        corrupted = corrupted or self.corruptor(batch)
        assert corrupted.generated.everywhere is not None
        energies = self.detection_head(encode(self.discriminator, corrupted.batch))
        log_q = log_likelihood(corrupted.generated.everywhere, corrupted.batch.ids)
        logits = noise_logits(energies, log_q, self.corruptor.masking.share)
        nce_loss, sums = detection(logits, mark(corrupted.chosen), batch.is_real)
        scores = energies.detach().float()
        mean = over_ranks(mean_over(scores, batch.is_real))
        sums["energy_squares"] = ((scores - mean).square() * batch.is_real).sum()
        total = self.settings.generator_weight * corrupted.generator_loss + self.settings.detection_weight * nce_loss
        return Loss(total, corrupted.sums | sums)

    def networks(self) -> dict[str, Network]:
        return {"discriminator": Network(self.discriminator, self.detection_head)}
