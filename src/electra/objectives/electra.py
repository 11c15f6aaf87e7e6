"""ELECTRA (Clark et al., 2020): a small generator fills in masked tokens, a discriminator says which were replaced.

    min over θ_G, θ_D of  Σ_x  w_G L_MLM(x, θ_G) + λ L_Disc(x, θ_D)

The generator learns by maximum likelihood, not against the discriminator: no gradient flows back through sampling.
"""

from typing import Literal

from pydantic import Field
from torch import nn

from electra.base.batch import Batch
from electra.model import encode
from electra.objectives.corruption import Corrupted, Network, ObjectiveBase, ObjectiveInputs, mark
from electra.objectives.losses import Loss, detection_loss
from electra.objectives.metrics import detection


class ElectraSettings(ObjectiveBase):
    """`loss_at` = "chosen" is the paper's ELECTRA 15 %: the discriminator learns at the chosen positions only. Its metrics
    still cover all real tokens, so they can be compared with those of "all"."""

    kind: Literal["electra"] = "electra"
    generator_weight: float = Field(1.0, ge=0)
    detection_weight: float = Field(50.0, ge=0)
    loss_at: Literal["all", "chosen"] = "all"


class Electra(nn.Module):
    headline = ("mlm_loss", "rtd_loss", "auc")
    extra_metrics = ()

    def __init__(self, settings: ElectraSettings, inputs: ObjectiveInputs):
        super().__init__()
        self.settings = settings
        self.discriminator, self.detection_head, self.corruptor = inputs.networks()
        self.muted_alarms = self.corruptor.muted_alarms
        inputs.initialise(self)

    def forward(self, batch: Batch, corrupted: Corrupted | None = None) -> Loss:
        corrupted = corrupted or self.corruptor(batch)
        logits = self.detection_head(encode(self.discriminator, corrupted.batch))
        rtd_loss, sums = detection(logits, corrupted.is_replaced, batch.is_real)
        if self.settings.loss_at == "chosen":
            rtd_loss = detection_loss(logits, corrupted.is_replaced, mark(corrupted.chosen))
        total = self.settings.detection_weight * rtd_loss + self.settings.generator_weight * corrupted.generator_loss
        return Loss(total, corrupted.sums | sums)

    def networks(self) -> dict[str, Network]:
        return {"discriminator": Network(self.discriminator, self.detection_head)} | self.corruptor.networks()
