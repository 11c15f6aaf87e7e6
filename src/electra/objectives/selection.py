"""Multi-word selection beside replaced token detection (TEAMS, Shen et al., 2021): at each chosen position the
discriminator also picks the original among k + 1 candidates, the k others sampled from the generator.

    L_MWS = mean over i in m of -log [ exp(e(x_i)ᵀ f(h_i)) / Σ over candidates c of exp(e(c)ᵀ f(h_i)) ]
    L = w_G L_MLM + λ L_Disc + μ L_MWS

f is dense, GELU, LayerNorm; only k + 1 dot products per position are needed, so it costs next to nothing.
The candidates never include the original and are drawn with replacement (TEAMS: without; a token drawn twice counts twice in
the sum). Also unlike TEAMS, both tasks read the same last layer, and generator and discriminator share no layers.
"""

from typing import Literal

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.randomness import uniform
from electra.model import encode, gather_rows
from electra.model.heads import CandidateHead, sample_tokens
from electra.objectives.corruption import Corrupted, Network, ObjectiveBase, ObjectiveInputs
from electra.objectives.losses import Loss, selection_loss
from electra.objectives.metrics import Ratio, detection


class SelectionSettings(ObjectiveBase):
    """`candidates` is k, the number of sampled candidates: with the original, 4 make TEAMS' five. `selection_weight` is μ; its
    ratio to `detection_weight` is that of TEAMS' code (2 to 5)."""

    kind: Literal["selection"] = "selection"
    candidates: int = Field(4, ge=1)
    generator_weight: float = Field(1.0, ge=0)
    detection_weight: float = Field(50.0, ge=0)
    selection_weight: float = Field(20.0, ge=0)


class Selection(nn.Module):
    headline = ("mlm_loss", "rtd_loss", "auc", "selection_accuracy")
    extra_metrics = (Ratio("selection_accuracy", "selected", "chosen"),)

    def __init__(self, settings: SelectionSettings, inputs: ObjectiveInputs):
        super().__init__()
        self.settings = settings
        self.discriminator, self.detection_head, self.corruptor = inputs.networks(keeps_logits=True)
        self.selection_head = CandidateHead(inputs.encoder.hidden, inputs.encoder.embedding)
        self.muted_alarms = self.corruptor.muted_alarms
        inputs.initialise(self)

    def forward(self, batch: Batch, corrupted: Corrupted | None = None) -> Loss:
        corrupted = corrupted or self.corruptor(batch)
        hidden = encode(self.discriminator, corrupted.batch)
        rtd_loss, sums = detection(self.detection_head(hidden), corrupted.is_replaced, batch.is_real)

        states, words = gather_rows(hidden, corrupted.chosen.positions), self.discriminator.embeddings.table
        scores = self.selection_head(states, self.candidates(batch, corrupted), words)
        mws_loss = selection_loss(scores, corrupted.chosen.used)
        right = (scores.detach()[..., 1:] < scores.detach()[..., :1]).all(-1) & corrupted.chosen.used

        total = self.settings.detection_weight * rtd_loss + self.settings.selection_weight * mws_loss
        total = total + self.settings.generator_weight * corrupted.generator_loss
        return Loss(total, corrupted.sums | sums | {"selected": right.sum()})

    def candidates(self, batch: Batch, corrupted: Corrupted) -> Int[Tensor, "batch count candidates"]:
        """The original token first, then k sampled tokens other than it."""
        targets, others = corrupted.chosen.targets, self.settings.candidates
        assert corrupted.generated.logits is not None
        logits = corrupted.generated.logits.detach().flatten(0, 1)
        logits = logits.scatter(1, targets.flatten()[:, None], -torch.inf)
        draws = uniform(batch.seed, "candidates", batch.samples, 2 * others * targets.shape[1])
        temperature = self.corruptor.sampling.temperature_at(batch.progress)
        drawn = [sample_tokens(logits, draw, temperature) for draw in draws.view(-1, others, 2).unbind(1)]
        return torch.stack([targets, *(tokens.view_as(targets) for tokens in drawn)], dim=2)

    def networks(self) -> dict[str, Network]:
        return {"discriminator": Network(self.discriminator, self.detection_head)} | self.corruptor.networks()
