"""Replaced span detection: contiguous spans are chosen and replaced, and the discriminator predicts twice, per token and
per span.

    L = w_G L_MLM + λ L_Disc + μ mean over spans s of BCE( head([h_first(s); h_last(s)]), [any token of s was replaced] )

The row is cut into spans (masking.unit = "span") before any is chosen, so unreplaced spans are cut by the same rule and the
borders give nothing away. The lengths give a little away: a span that no longer fits into masking.share is not chosen, so
long ones are chosen less often (with the recipe's lengths, one of 4 tokens 0.67 times as often as one of 1). Spans of
[CLS], [SEP] and padding have no loss. With generator.kind = "autoregressive" a span is sampled from left to right, each
token given those just drawn.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Bool, Int
from pydantic import Field
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.model import build_detection_head, encode, gather_rows
from electra.objectives.corruption import Corrupted, Network, NoiseSettings, ObjectiveBase, ObjectiveInputs, maskable
from electra.objectives.losses import Loss, count, detection_loss
from electra.objectives.metrics import Ratio, detection


def span_end(group: Int[Tensor, "batch seq"], which: Literal["amin", "amax"]) -> Int[Tensor, "batch seq"]:
    """The position of the first ("amin") or last ("amax") token of each span, indexed by the span's number."""
    places = torch.arange(group.shape[1], device=group.device).expand_as(group)
    return torch.zeros_like(group).scatter_reduce(1, group, places, which, include_self=False)


def any_in_span(group: Int[Tensor, "batch seq"], marked: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    return torch.zeros_like(group).scatter_add(1, group, marked.long()) > 0


class ReplacedSpanSettings(ObjectiveBase):
    kind: Literal["replaced_span"] = "replaced_span"
    generator_weight: float = Field(1.0, ge=0)
    detection_weight: float = Field(50.0, ge=0)
    span_weight: float = Field(10.0, ge=0)

    def contradictions(self, noise: NoiseSettings) -> Iterator[str]:
        if noise.masking.unit != "span":
            yield 'objective.kind = "replaced_span" needs masking.unit=span'


class ReplacedSpan(nn.Module):
    headline = ("mlm_loss", "rtd_loss", "auc", "span_accuracy")
    extra_metrics = (Ratio("span_accuracy", "spans_right", "spans"), Ratio("span_loss", "span_loss", "spans"))

    def __init__(self, settings: ReplacedSpanSettings, inputs: ObjectiveInputs):
        super().__init__()
        self.settings = settings
        self.discriminator, self.detection_head, corruptor = inputs.networks()
        self.span_head = build_detection_head(inputs.encoder.model_copy(update={"hidden": 2 * inputs.encoder.hidden}))
        self.corruptor = corruptor
        self.muted_alarms = self.corruptor.muted_alarms
        inputs.initialise(self)

    def forward(self, batch: Batch, corrupted: Corrupted | None = None) -> Loss:
        corrupted = corrupted or self.corruptor(batch)
        hidden = encode(self.discriminator, corrupted.batch)
        rtd_loss, sums = detection(self.detection_head(hidden), corrupted.is_replaced, batch.is_real)

        group = corrupted.chosen.group
        has_text = any_in_span(group, maskable(batch, self.corruptor.special))
        any_replaced = any_in_span(group, corrupted.is_replaced)
        ends = [gather_rows(hidden, span_end(group, which)) for which in ("amin", "amax")]
        logits = self.span_head(torch.cat(ends, dim=2))
        span_loss = detection_loss(logits, any_replaced, has_text)
        right, spans = ((logits.detach() > 0) == any_replaced) & has_text, has_text.sum()

        total = self.settings.detection_weight * rtd_loss + self.settings.span_weight * span_loss
        total = total + self.settings.generator_weight * corrupted.generator_loss
        sums |= {"spans": spans, "spans_right": right.sum(), "span_loss": span_loss.detach() * count(has_text)}
        return Loss(total, corrupted.sums | sums)

    def networks(self) -> dict[str, Network]:
        return {"discriminator": Network(self.discriminator, self.detection_head)} | self.corruptor.networks()
