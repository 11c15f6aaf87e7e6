"""What stands on top of an encoder: the generator's distribution over tokens, the discriminator's logit."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from electra.model.electra import LAYER_NORM_EPS, EncoderSettings


def in_float32(layer: nn.Linear, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows outputs"]:
    """The last layer of a head in the precision of its weights, also under autocast: bfloat16 has three digits, and what
    differs by less would be decided by rounding. Of a whole network it costs nothing."""
    if states.is_meta:  # nothing is computed, and autocast knows no such device
        return layer(states)
    with torch.autocast(states.device.type, enabled=False):
        return layer(states.to(layer.weight.dtype))


class TokenHead(nn.Module):
    """p_G(x_t | x) ∝ exp(e(x_t)ᵀ h(x)_t): dense to the embedding size, GELU, LayerNorm, then the word table (passed in,
    because it belongs to the embeddings) and a bias of its own."""

    def __init__(
        self,
        hidden: int,
        embedding: int,
        vocab_size: int,
        eps: float = LAYER_NORM_EPS,
        has_biases: bool = True,
    ):
        super().__init__()
        self.dense = nn.Linear(hidden, embedding, bias=has_biases)
        self.norm = nn.LayerNorm(embedding, eps, bias=has_biases)
        self.bias = nn.Parameter(Tensor(vocab_size).zero_())

    def states(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows embedding"]:
        return self.norm(F.gelu(self.dense(hidden)))

    def forward(
        self, hidden: Float[Tensor, "*rows hidden"], words: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "*rows vocab"]:
        return F.linear(self.states(hidden), words, self.bias)


class DetectionHead(nn.Module):
    """The logit of "this token was replaced": dense, GELU, one output. D in the paper is the probability of "original",
    that is sigmoid(-logit); the code, like the original's, speaks of "replaced" as the positive class."""

    def __init__(self, settings: EncoderSettings):
        super().__init__()
        self.dense = nn.Linear(settings.hidden, settings.hidden)
        self.output = nn.Linear(settings.hidden, 1)
        self.output.glorot = True  # type: ignore[assignment]

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows"]:
        return self.output(F.gelu(self.dense(hidden))).squeeze(-1)


class CandidateHead(nn.Module):
    """A score for each of a few candidate tokens: e(c)ᵀ f(h), f as in TokenHead, over any encoder."""

    def __init__(self, hidden: int, embedding: int):
        super().__init__()
        self.dense = nn.Linear(hidden, embedding)
        self.norm = nn.LayerNorm(embedding, eps=LAYER_NORM_EPS)

    def forward(
        self,
        hidden: Float[Tensor, "*rows hidden"],
        candidates: Int[Tensor, "*rows candidates"],
        words: Float[Tensor, "vocab embedding"],
    ) -> Float[Tensor, "*rows candidates"]:
        states = self.norm(F.gelu(self.dense(hidden)))
        return (F.embedding(candidates, words) @ states[..., None]).squeeze(-1)


class SequenceLabelHead(nn.Module):
    """Logits of a row's labels from the vector of [CLS], as transformers' ElectraClassificationHead has them: dropout,
    dense, GELU, dropout, output. Glorot's distribution at the start, as every fine-tuning head of the original."""

    def __init__(self, settings: EncoderSettings, outputs: int):
        super().__init__()
        self.dropout = nn.Dropout(settings.dropout)
        self.dense = nn.Linear(settings.hidden, settings.hidden)
        self.output = nn.Linear(settings.hidden, outputs)
        self.dense.glorot = self.output.glorot = True  # type: ignore[assignment]

    def forward(self, first: Float[Tensor, "batch hidden"]) -> Float[Tensor, "batch outputs"]:
        x = F.gelu(self.dense(self.dropout(first)))
        return in_float32(self.output, self.dropout(x))


class TokenLabelHead(nn.Module):
    """logits_t = W dropout(h_t) + b, as in ElectraForTokenClassification and, without dropout, ElectraForQuestionAnswering;
    Glorot's distribution at the start."""

    def __init__(self, settings: EncoderSettings, outputs: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(settings.hidden, outputs)
        self.output.glorot = True  # type: ignore[assignment]

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows outputs"]:
        return in_float32(self.output, self.dropout(hidden))
