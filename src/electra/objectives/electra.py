"""ELECTRA (Clark et al., 2020): a small generator fills masked tokens, a discriminator says which were replaced.

    min over θ_G, θ_D of  Σ_x  w_G L_MLM(x, θ_G) + λ L_Disc(x, θ_D)

The generator learns by maximum likelihood, not against the discriminator: nothing flows back through sampling.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.config import Settings
from electra.base.randomness import mix
from electra.model.encoders import AnyEncoder, build_detection_head, initialise
from electra.model.generators import encode
from electra.objectives.corruption import mark
from electra.objectives.corruptor import Corruptor, Loss, Material
from electra.objectives.losses import detection_loss
from electra.objectives.metrics import Figures, alarms, detection_sums, summarise


class ElectraSettings(Settings):
    """`loss_at` = "chosen" is the paper's ELECTRA 15 %: the discriminator learns at the chosen positions only. Its figures
    are over all real tokens all the same, so that they compare."""

    kind: Literal["electra"] = "electra"
    generator_weight: float = Field(1.0, ge=0)
    detection_weight: float = Field(50.0, ge=0)
    loss_at: Literal["all", "chosen"] = "all"

    def build(self, material: Material) -> "Electra":
        return Electra(self, material)


class Electra(nn.Module):
    headline = ("mlm_loss", "rtd_loss", "auc")

    def __init__(self, settings: ElectraSettings, material: Material):
        super().__init__()
        self.settings = settings
        self.discriminator, generator = material.pair()
        self.detection_head = build_detection_head(material.encoder)
        self.corruptor = Corruptor(material, generator)
        initialise(self, material.encoder, mix(material.seed, "weights"))

    def forward(self, batch: Batch) -> Loss:
        corrupted = self.corruptor(batch)
        logits = self.detect(corrupted.batch)
        asked = batch.is_real if self.settings.loss_at == "all" else mark(corrupted.chosen)
        rtd_loss = detection_loss(logits, corrupted.is_replaced, asked)
        total = self.settings.detection_weight * rtd_loss
        if self.corruptor.generator.learns:
            total = total + self.settings.generator_weight * corrupted.mlm_loss
        if self.settings.loss_at == "chosen":
            rtd_loss = detection_loss(logits.detach(), corrupted.is_replaced, batch.is_real)
        sums = detection_sums(logits, corrupted.is_replaced, batch.is_real, rtd_loss)
        return Loss(total, corrupted.sums | sums)

    def detect(self, batch: Batch) -> Float[Tensor, "batch seq"]:
        return self.detection_head(encode(self.discriminator, batch))

    def networks(self) -> dict[str, tuple[AnyEncoder, nn.Module]]:
        return {"discriminator": (self.discriminator, self.detection_head)} | self.corruptor.networks()

    def figures(self, sums: Mapping[str, Tensor]) -> Figures:
        return summarise(sums)

    def alarms(self, history: Sequence[Figures], progress: float, step: int) -> dict[str, str]:
        return self.corruptor.fair(alarms(history, progress, step))
