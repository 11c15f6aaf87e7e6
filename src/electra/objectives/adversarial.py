"""ELECTRA with an adversarial generator (Clark et al., 2020, section 3.3 and appendix F): the generator is rewarded for
what the discriminator gets wrong. Sampling has no gradient, so it learns by REINFORCE, with one sample per position:

    R(x̂_t) = -log P(the discriminator is right about x̂_t)
    ∇ ≈ mean over t in m of (R(x̂_t) - b_t) ∇ log p_G(x̂_t | x^masked),   b_t = -log sigmoid(w·h_G(x^masked)_t)

The baseline b is fitted to R by cross-entropy and only reduces the variance: it reads the generator's states, but no gradient flows
back into them. As in the paper, the effect of a token on the discriminator's other predictions is ignored. `likelihood_weight` adds
the maximum likelihood loss (0, the default, is the paper's pure form). log p_G is that of the distribution the tokens are drawn
from, temperature included.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from electra.base.batch import Batch
from electra.model import encode
from electra.model.generators import TransformerGenerator
from electra.model.heads import widen
from electra.objectives.corruption import Corrupted, Network, NoiseSettings, ObjectiveBase, ObjectiveInputs
from electra.objectives.losses import Loss, baseline_loss, detection_losses, log_likelihood, policy_loss
from electra.objectives.metrics import GENERATOR_STALLS, Ratio, detection


class AdversarialSettings(ObjectiveBase):
    kind: Literal["adversarial"] = "adversarial"
    generator_weight: float = Field(1.0, ge=0)
    likelihood_weight: float = Field(0.0, ge=0)
    detection_weight: float = Field(50.0, ge=0)

    def contradictions(self, noise: NoiseSettings) -> Iterator[str]:
        if noise.generator.kind != "transformer":
            yield f'objective.kind = "adversarial" trains a generator.kind=transformer (got {noise.generator.kind})'
        yield from noise.sampling.hides_probabilities(self.kind)


class Adversarial(nn.Module):
    headline = ("mlm_loss", "rtd_loss", "auc", "reward")
    extra_metrics = (Ratio("reward", "reward", "chosen"),)
    # a generator that learns from rewards has no reason to lower its MLM loss
    muted_alarms = (GENERATOR_STALLS,)

    def __init__(self, settings: AdversarialSettings, inputs: ObjectiveInputs):
        super().__init__()
        self.settings = settings
        self.discriminator, self.detection_head, self.corruptor = inputs.networks(keeps_logits=True)
        assert isinstance(self.corruptor.generator, TransformerGenerator)
        self.baseline = nn.Linear(self.corruptor.generator.encoder.settings.hidden, 1)
        inputs.initialise(self)

    def forward(self, batch: Batch, corrupted: Corrupted | None = None) -> Loss:
        corrupted = corrupted or self.corruptor(batch)
        generated, used = corrupted.generated, corrupted.chosen.used
        logits = self.detection_head(encode(self.discriminator, corrupted.batch))
        rtd_loss, sums = detection(logits, corrupted.is_replaced, batch.is_real)

        reward = detection_losses(logits, corrupted.is_replaced).detach().gather(1, corrupted.chosen.positions)
        assert generated.logits is not None and generated.states is not None
        temperature = self.corruptor.sampling.temperature_at(batch.progress)
        log_probability = log_likelihood(generated.logits / temperature, generated.sampled)
        expected = self.baseline(generated.states.detach()).squeeze(-1)
        generator_loss = policy_loss(log_probability, reward, -F.logsigmoid(widen(expected)), used)

        total = (
            self.settings.detection_weight * rtd_loss
            + self.settings.generator_weight * generator_loss
            + self.settings.likelihood_weight * generated.mlm_loss
            + baseline_loss(expected, reward, used)
        )
        return Loss(total, corrupted.sums | sums | {"reward": torch.where(used, reward, 0).sum()})

    def networks(self) -> dict[str, Network]:
        return {"discriminator": Network(self.discriminator, self.detection_head)} | self.corruptor.networks()
