"""Replaced span detection: contiguous spans are chosen and replaced, and the discriminator is asked twice, token by token
and span by span.

    L = w_G L_MLM + λ L_Disc + μ mean over spans s of BCE( head([h_first(s); h_last(s)]), [any token of s was replaced] )

The row is cut into spans (masking.unit = "span") before any is chosen, so the spans that were left alone are cut by the same
rule and their borders give nothing away. Their lengths give a little away: a span that no longer fits into the share is left
alone, so long ones are chosen less (with the recipe's lengths one of 4 tokens 0.67 times as often as one of 1). Spans of [CLS], [SEP] and padding are not asked about. With
generator.kind = "autoregressive" a span is written from left to right, each token given those just drawn.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from pydantic import Field
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.randomness import mix
from electra.model import build_detection_head, encode, gather_rows, initialise
from electra.objectives.corruption import (
    Corrupted,
    Corruptor,
    Network,
    NoiseSettings,
    ObjectiveBase,
    ObjectiveInputs,
    maskable,
)
from electra.objectives.losses import Loss, detection_loss
from electra.objectives.metrics import Ratio, detection_sums


class Spans(NamedTuple):
    """The spans of a row by number; `exists` marks those that hold text."""

    group: Int[Tensor, "batch seq"]
    first: Int[Tensor, "batch seq"]
    last: Int[Tensor, "batch seq"]
    exists: Bool[Tensor, "batch seq"]

    def any_of(self, marked: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
        return torch.zeros_like(self.group).scatter_add(1, self.group, marked.long()) > 0


def read_spans(group: Int[Tensor, "batch seq"], can_mask: Bool[Tensor, "batch seq"]) -> Spans:
    places = torch.arange(group.shape[1], device=group.device).expand_as(group)
    empty = torch.zeros_like(group)
    first = empty.scatter_reduce(1, group, places, "amin", include_self=False)
    last = empty.scatter_reduce(1, group, places, "amax", include_self=False)
    return Spans(group, first, last, empty.scatter_add(1, group, can_mask.long()) > 0)


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
        self.discriminator, generator = inputs.pair()
        self.detection_head = build_detection_head(inputs.encoder)
        self.span_head = build_detection_head(inputs.encoder.model_copy(update={"hidden": 2 * inputs.encoder.hidden}))
        self.corruptor = Corruptor(inputs, generator)
        self.muted_alarms = self.corruptor.muted_alarms
        initialise(self, inputs.encoder, mix(inputs.seed, "weights"))

    def forward(self, batch: Batch, corrupted: Corrupted | None = None) -> Loss:
        corrupted = corrupted or self.corruptor(batch)
        hidden = encode(self.discriminator, corrupted.batch)
        logits = self.detection_head(hidden)
        rtd_loss = detection_loss(logits, corrupted.is_replaced, batch.is_real)

        spans = read_spans(corrupted.chosen.group, maskable(batch, self.corruptor.special))
        ends = torch.cat([gather_rows(hidden, spans.first), gather_rows(hidden, spans.last)], dim=2)
        span_logits = self.span_head(ends)
        any_replaced = spans.any_of(corrupted.is_replaced)
        span_loss = detection_loss(span_logits, any_replaced, spans.exists)

        total = self.settings.detection_weight * rtd_loss + self.settings.span_weight * span_loss
        if self.corruptor.generator.learns:
            total = total + self.settings.generator_weight * corrupted.generated.mlm_loss
        sums = detection_sums(logits, corrupted.is_replaced, batch.is_real, rtd_loss)
        right = ((span_logits.detach() > 0) == any_replaced) & spans.exists
        more = {
            "spans": spans.exists.sum(),
            "spans_right": right.sum(),
            "span_loss": span_loss.detach() * spans.exists.sum(),
        }
        return Loss(total, corrupted.sums | sums | more)

    def networks(self) -> dict[str, Network]:
        main = Network(self.discriminator, self.detection_head, "discriminator")
        return {"discriminator": main} | self.corruptor.networks()

    def generator_parameters(self) -> Iterator[nn.Parameter]:
        return self.corruptor.own_parameters(self.discriminator)
