"""Objectives in which the main network reads the generator's replacements and predicts the original tokens.

`predict` says where and how:

    "chosen"      Replace MLM (Clark et al., 2020, section 3.4): mean over i in m of -log p(x_i | x^corrupt). Masked
                  language modelling without the [MASK] that fine-tuning never sees.
    "all"         All-Tokens MLM (same place): every token is predicted, with a copy mechanism:
                  p(x_t) = D_t [x^corrupt_t = x_t] + (1 - D_t) softmax_t(x_t).
    "corrective"  Corrective language modelling (COCO-LM, Meng et al., 2021): λ times the detection loss at every token
                  teaches when to copy; the same p(x_t), at the chosen positions only and with no gradient into D, teaches
                  what to correct.

Differences from COCO-LM: no sequence contrast (it costs a second pass), and the generator may have any shape.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.model import build_token_head, encode, gather_rows
from electra.objectives.corruption import Corrupted, Network, ObjectiveBase, ObjectiveInputs
from electra.objectives.losses import Loss, copying_loss, count, masked_lm_loss
from electra.objectives.metrics import Ratio, detection


class TokenRecoverySettings(ObjectiveBase):
    """`copy_weight` is λ; it applies to "corrective" only."""

    kind: Literal["token_recovery"] = "token_recovery"
    predict: Literal["chosen", "all", "corrective"] = "all"
    generator_weight: float = Field(1.0, ge=0)
    recovery_weight: float = Field(1.0, ge=0)
    copy_weight: float = Field(50.0, ge=0)


class TokenRecovery(nn.Module):
    headline = ("mlm_loss", "recovery_loss", "auc")
    extra_metrics = (Ratio("recovery_loss", "recovery_loss", "recoveries"),)

    def __init__(self, settings: TokenRecoverySettings, inputs: ObjectiveInputs):
        super().__init__()
        self.settings = settings
        self.discriminator, detection_head, corruptor = inputs.networks()
        self.token_head = build_token_head(inputs.encoder, inputs.vocab_size)
        self.detection_head = None if settings.predict == "chosen" else detection_head
        self.corruptor = corruptor
        self.muted_alarms = self.corruptor.muted_alarms
        inputs.initialise(self)

    def forward(self, batch: Batch, corrupted: Corrupted | None = None) -> Loss:
        corrupted = corrupted or self.corruptor(batch)
        hidden = encode(self.discriminator, corrupted.batch)
        total, sums = torch.zeros((), device=hidden.device), corrupted.sums

        # if the network may copy its input, the detection head gives the logit of "this token was replaced"
        replaced: Tensor | None = None
        if self.detection_head is not None:
            replaced = self.detection_head(hidden)
            rtd_loss, rtd_sums = detection(replaced, corrupted.is_replaced, batch.is_real)
            sums = sums | rtd_sums
            if self.settings.predict == "corrective":
                total = total + self.settings.copy_weight * rtd_loss
                replaced = replaced.detach()

        # predict the original tokens, at all positions or at the chosen ones
        input_ids, targets, asked = corrupted.batch.ids, batch.ids, batch.is_real
        if self.settings.predict != "all":
            positions, asked, targets, _ = corrupted.chosen
            hidden, input_ids = gather_rows(hidden, positions), input_ids.gather(1, positions)
            replaced = None if replaced is None else replaced.gather(1, positions)
        logits = self.token_head(hidden, self.discriminator)
        if replaced is None:
            recovery = masked_lm_loss(logits, targets, asked)
        else:
            recovery = copying_loss(logits, replaced, input_ids, targets, asked)

        total = total + self.settings.recovery_weight * recovery
        total = total + self.settings.generator_weight * corrupted.generator_loss
        return Loss(total, sums | {"recovery_loss": recovery.detach() * count(asked), "recoveries": asked.sum()})

    def networks(self) -> dict[str, Network]:
        main = {"discriminator": Network(self.discriminator, self.detection_head)} if self.detection_head else {}
        recovery = {"recovery": Network(self.discriminator, self.token_head, "generator")}
        return main | recovery | self.corruptor.networks()
