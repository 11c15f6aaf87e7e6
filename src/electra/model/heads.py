"""The heads on top of an encoder: token distributions and sampling, detection logits, and the labels of fine-tuning."""

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from electra.kernels import product_dtype, usable
from electra.model.electra import LAYER_NORM_EPS, ElectraEncoderSettings, WordEmbeddings
from electra.model.linear import Linear, linear

Pooling = Literal["cls", "mean"]
WIDEST = 128
SAMPLING_BLOCK = 128


def in_float32(layer: nn.Linear, states: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows outputs"]:
    """Applies the last layer of a head in the precision of its weights, also under autocast: bfloat16 has three digits, and
    rounding would decide between logits that differ by less. It costs next to nothing compared with the whole network."""
    if states.is_meta:  # nothing is computed, and autocast does not know the meta device
        return layer(states)
    with torch.autocast(states.device.type, enabled=False):
        return layer(states.to(layer.weight.dtype))


def widen(values: Tensor) -> Tensor:
    """Half precision as float32, for logarithms and exponentials; float64 stays float64."""
    return values if values.dtype == torch.float64 else values.float()


def pool(
    hidden: Float[Tensor, "batch kept hidden"], is_real: Bool[Tensor, "batch seq"], pooling: Pooling
) -> Float[Tensor, "batch hidden"]:
    """The vector from which a row's label is predicted: that of [CLS], or the mean over real tokens, as in ModernBERT's
    `classifier_pooling`. For "cls", `hidden` may hold just the first vector, as an encoder's `first_only` returns it."""
    if pooling == "cls":
        return hidden[:, 0]
    return (hidden * is_real[:, :, None]).sum(1) / is_real.sum(1, keepdim=True)


@runtime_checkable
class Words(Protocol):
    """What a token head needs of an encoder: its word table, and the projection from words to its layers."""

    @property
    def embeddings(self) -> WordEmbeddings: ...
    @property
    def project(self) -> nn.Module: ...


class TokenHead(nn.Module):
    """p_G(x_t | x) ∝ exp(e(x_t)ᵀ h(x)_t): dense to `width`, GELU, LayerNorm, then the encoder's word table (passed in) and a bias of
    its own. If word vectors have another width, Pᵀ, the transpose of the encoder's projection P, maps the states back to it.
    e(x_t)ᵀ Pᵀ is a row of the table P e, so this is an ordinary head over words as wide as the layers."""

    def __init__(self, hidden: int, width: int, vocab_size: int, eps: float = LAYER_NORM_EPS, has_biases: bool = True):
        super().__init__()
        self.dense = Linear(hidden, width, bias=has_biases)
        self.norm = nn.LayerNorm(width, eps, bias=has_biases)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def states(self, hidden: Float[Tensor, "*rows hidden"], encoder: Words) -> Float[Tensor, "*rows embedding"]:
        states = self.norm(F.gelu(self.dense(hidden)))
        if isinstance(project := encoder.project, nn.Linear) and self.dense.out_features != project.in_features:
            return linear(states, project.weight.T)
        return states

    def forward(self, hidden: Float[Tensor, "*rows hidden"], encoder: Words) -> Float[Tensor, "*rows vocab"]:
        return linear(self.states(hidden, encoder), encoder.embeddings.table, self.bias)


class ElectraDetectionHead(nn.Module):
    """The logit of "this token was replaced": dense, GELU, one output. D in the paper is the probability of "original",
    that is sigmoid(-logit); here, as in the original code, "replaced" is the positive class."""

    def __init__(self, settings: ElectraEncoderSettings):
        super().__init__()
        self.dense = Linear(settings.hidden, settings.hidden)
        self.output = Linear(settings.hidden, 1, start="glorot")

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows"]:
        return in_float32(self.output, F.gelu(self.dense(hidden))).squeeze(-1)


class CandidateHead(nn.Module):
    """A score for each of a few candidate tokens: e(c)ᵀ f(h), f as in TokenHead, over any encoder."""

    def __init__(self, hidden: int, embedding: int):
        super().__init__()
        self.dense = Linear(hidden, embedding)
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
    """Logits of a row's labels from its pooled vector, as in transformers' ElectraClassificationHead: dropout, dense,
    GELU, dropout, output. Glorot initialisation, as for every fine-tuning head of the original."""

    def __init__(self, settings: ElectraEncoderSettings, outputs: int):
        super().__init__()
        self.dropout = nn.Dropout(settings.dropout)
        self.dense = Linear(settings.hidden, settings.hidden, start="glorot")
        self.output = Linear(settings.hidden, outputs, start="glorot")

    def forward(self, first: Float[Tensor, "batch hidden"]) -> Float[Tensor, "batch outputs"]:
        return in_float32(self.output, self.dropout(F.gelu(self.dense(self.dropout(first)))))


class TokenLabelHead(nn.Module):
    """logits_t = W dropout(h_t) + b, as in ElectraForTokenClassification and, without dropout, ElectraForQuestionAnswering.
    Glorot initialisation."""

    def __init__(self, settings: ElectraEncoderSettings, outputs: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = Linear(settings.hidden, outputs, start="glorot")

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows outputs"]:
        return in_float32(self.output, self.dropout(hidden))


class Filled(NamedTuple):
    """log p(target), a token sampled at the requested temperature, and whether the target is the most likely token. Gradients
    flow only through the first."""

    log_likelihood: Float[Tensor, "rows"]
    sampled: Int[Tensor, "rows"]
    is_best: Bool[Tensor, "rows"]


def masked_head(
    states: Float[Tensor, "rows embedding"],
    words: Float[Tensor, "vocab embedding"],
    bias: Float[Tensor, "vocab"],
    targets: Int[Tensor, "rows"],
    noise: Float[Tensor, "rows 2"],
    temperature: float | Float[Tensor, ""] = 1.0,
    forbid_target: bool = False,
) -> Filled:
    """logits = states wordsᵀ + bias;  log_likelihood = log softmax(logits)[target];  sampled ~ softmax(logits /
    temperature), with probability zero for the target under `forbid_target`. `noise` holds uniform numbers in (0, 1),
    float32. A temperature that changes between replays of a captured graph must be a tensor.

    At 1,024 rows of 128 the logits are 19,456 x 30,522 numbers, more than a gigabyte in bfloat16; writing, reading and
    differentiating them in memory costs more than the product that computes them. The kernels never store them and equal the
    plain code below: the same noise gives the same tokens, up to rounding."""
    if can_fuse(states):
        from electra.kernels.masked_head import fused_head

        dtype = product_dtype(states)
        return Filled(*fused_head(states, words, bias, targets, noise, temperature, forbid_target, dtype))
    logits = linear(states, words, bias)
    log_likelihood = -F.cross_entropy(widen(logits), targets, reduction="none")
    logits = logits.detach()
    is_best = logits.argmax(1) == targets
    if forbid_target:
        logits = logits.scatter(1, targets[:, None], -torch.inf)
    return Filled(log_likelihood, sample_tokens(logits, noise, temperature), is_best)


def can_fuse(states: Float[Tensor, "rows embedding"]) -> bool:
    """Whether to use our kernels. They pay if an embedding is narrow enough to fit into one tile: with ELECTRA-Base's 768 the
    matrix product outweighs the memory traffic, and the library's product is faster."""
    return usable(states) and states.shape[1] <= WIDEST


def sample_tokens(
    logits: Float[Tensor, "rows vocab"], noise: Float[Tensor, "rows 2"], temperature: float | Float[Tensor, ""]
) -> Int[Tensor, "rows"]:
    """One token per row from softmax(logits / temperature), by inverting the cumulative distribution.

    In two stages, so that float32 is enough for any vocabulary: first a block of 128 tokens by the blocks' sums, then a
    token within it. This needs two uniform numbers per row; the Gumbel trick needs one per vocabulary token.
    """
    logits = logits.detach().float() / temperature
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    rows, vocab = weights.shape
    blocks = -(-vocab // SAMPLING_BLOCK)
    weights = F.pad(weights, (0, blocks * SAMPLING_BLOCK - vocab)).view(rows, blocks, SAMPLING_BLOCK)
    block = inverse_cdf(weights.sum(2), noise[:, 0])
    within = weights.gather(1, block[:, None, None].expand(-1, 1, SAMPLING_BLOCK)).squeeze(1)
    return block * SAMPLING_BLOCK + inverse_cdf(within, noise[:, 1])


def inverse_cdf(weights: Float[Tensor, "rows n"], noise: Float[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """The first index whose cumulative weight exceeds noise * total. It never has weight zero, because the cumulative weight
    does not grow there; if rounding overshoots the end, it is the last index of positive weight."""
    cumulative = weights.double().cumsum(1)
    target = noise.double() * cumulative[:, -1]
    index = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    last = (weights > 0).long().cumsum(1).argmax(1)
    return torch.minimum(index, last)
