"""Two ways to point at an answer: transformers' (start and end on their own) and the paper's (end given the start).

A target is a pair of positions; (0, 0), the [CLS], says that the window holds no answer. Only the context and
position 0 can be pointed at. In the original, and so here, "context" includes its closing [SEP], because that is
segment 1 as well; decoding never ends an answer there.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.model.modern import ModernBertSettings
from electra.model.modern_heads import LabelHead

WIDTH = 512
"""Of the hidden layers of the joint head, whatever the size of the encoder."""


def pointable(batch: Batch) -> Bool[Tensor, "batch seq"]:
    """The context (segment 1, no padding) and position 0."""
    allowed = (batch.segments == 1) & batch.is_real
    allowed[:, 0] = True
    return allowed


def widened(logits: Tensor) -> Tensor:
    """At least float32: a sum over 512 positions is nothing for half precision."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class PlainHead(nn.Module):
    """One matrix, two logits a token: its names and weights are ElectraForQuestionAnswering's. The logits leave raw, as
    there; what cannot be pointed at is masked in the loss, as in the original (transformers does not), and in
    decoding."""

    def __init__(self, hidden: int):
        super().__init__()
        self.qa_outputs = nn.Linear(hidden, 2)
        self.qa_outputs.glorot = True  # type: ignore[assignment]

    def forward(self, hidden: Float[Tensor, "batch seq hidden"], batch: Batch) -> dict[str, Tensor]:
        return pointed(self.qa_outputs(hidden), batch)


class ModernBertPlainHead(nn.Module):
    """The same with the head of ModernBertForQuestionAnswering."""

    def __init__(self, settings: ModernBertSettings):
        super().__init__()
        self.label = LabelHead(settings, 2)

    def forward(self, hidden: Float[Tensor, "batch seq hidden"], batch: Batch) -> dict[str, Tensor]:
        return pointed(self.label(hidden), batch)


def pointed(logits: Float[Tensor, "batch seq 2"], batch: Batch) -> dict[str, Tensor]:
    start, end = widened(logits).unbind(-1)
    return {"start_logits": start, "end_logits": end, "allowed": pointable(batch)}


class JointHead(nn.Module):
    """p(start) from one dense layer; p(end | start) from dense(gelu(dense([h_start ; h]))), with the true start while
    training and with each of the `beam` most probable ones otherwise. Where questions may have no answer, a third
    output is the logit of "there is none": dense(gelu(dense([h_0 ; Σ_t p(start = t) h_t]))).

    Every matrix is Glorot's, as in the original. [h_start ; h] is never built: the layer's halves are applied to
    h_start and to h, so that beam × positions vectors cost one sum each."""

    def __init__(self, hidden: int, beam: int, answerability: bool):
        super().__init__()
        self.beam = beam
        self.start = nn.Linear(hidden, 1)
        self.end_hidden = nn.Linear(2 * hidden, WIDTH)
        self.end = nn.Linear(WIDTH, 1)
        parts = [self.start, self.end_hidden, self.end]
        if answerability:
            self.null_hidden = nn.Linear(2 * hidden, WIDTH)
            self.null = nn.Linear(WIDTH, 1)
            parts += [self.null_hidden, self.null]
        self.answerability = answerability
        for part in parts:
            part.glorot = True  # type: ignore[assignment]

    def forward(self, hidden: Float[Tensor, "batch seq hidden"], batch: Batch) -> dict[str, Tensor]:
        """With targets: masked logits of start, and of end given the true start. Without: the beam. `null` in both."""
        allowed = pointable(batch)
        start = widened(self.start(hidden).squeeze(-1)).masked_fill(~allowed, -torch.inf)
        if batch.targets:
            end = self.ends(hidden, batch.targets["start"][:, None], allowed).squeeze(1)
            outputs = {"start_logits": start, "end_logits": end}
        else:
            outputs = self.search(hidden, start, allowed)
        if self.answerability:
            expected = torch.einsum("bs,bsh->bh", start.softmax(-1).to(hidden.dtype), hidden)
            features = self.null_hidden(torch.cat([hidden[:, 0], expected], -1))
            outputs["null"] = widened(self.null(F.gelu(features)).squeeze(-1))
        return outputs

    def ends(
        self,
        hidden: Float[Tensor, "batch seq hidden"],
        starts: Int[Tensor, "batch beam"],
        allowed: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "batch beam seq"]:
        """Masked logits of the end, for each start."""
        of_start, of_end = self.end_hidden.weight.chunk(2, dim=1)
        by_position = F.linear(hidden, of_end, self.end_hidden.bias)
        chosen = hidden.gather(1, starts[..., None].expand(-1, -1, hidden.shape[-1]))
        by_start = F.linear(chosen, of_start)
        logits = [self.end(F.gelu(by_position + one[:, None])).squeeze(-1) for one in by_start.unbind(1)]
        return widened(torch.stack(logits, 1)).masked_fill(~allowed[:, None], -torch.inf)

    def search(
        self,
        hidden: Float[Tensor, "batch seq hidden"],
        start: Float[Tensor, "batch seq"],
        allowed: Bool[Tensor, "batch seq"],
    ) -> dict[str, Tensor]:
        """The `beam` best starts and for each the `beam` best ends, with log p(start) + log p(end | start). Where less
        than `beam` positions can be pointed at, the rest of the beam has end 0 and score 0: no span ends there."""
        width = min(self.beam, start.shape[1])
        start_scores, starts = start.log_softmax(-1).topk(width)
        end_scores, ends = self.ends(hidden, starts, allowed).log_softmax(-1).topk(width)
        scores = start_scores[..., None] + end_scores
        possible = scores > -torch.inf
        return {"starts": starts, "ends": ends.where(possible, 0), "scores": scores.where(possible, 0)}


def span_loss(
    outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor], answerability: float
) -> Float[Tensor, ""]:
    """(CE(start) + CE(end)) / 2, and `answerability` times the BCE of "no answer in this window" where there is such an
    output. Means over the batch; the original sums. It labels a window that misses the answer of
    an answerable question "has an answer"; as the window least sure of "none" decides for the question, ours is "none"."""
    loss = (cross_entropy(outputs, targets, "start") + cross_entropy(outputs, targets, "end")) / 2
    if "null" in outputs:
        none = (targets["start"] == 0).to(outputs["null"].dtype)
        loss = loss + answerability * F.binary_cross_entropy_with_logits(outputs["null"], none)
    return loss


def cross_entropy(outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor], which: str) -> Tensor:
    logits = outputs[f"{which}_logits"]
    if "allowed" in outputs:
        logits = logits.masked_fill(~outputs["allowed"], -torch.inf)
    return F.cross_entropy(logits, targets[which])
