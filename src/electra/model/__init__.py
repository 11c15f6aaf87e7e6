"""The available encoders, and what is built for each of them. A new one adds its arms here and nowhere else in the model."""

import math
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.model.electra import (
    Direction,
    ElectraEmbeddings,
    ElectraEncoder,
    ElectraEncoderSettings,
    Linear,
    WordEmbeddings,
)
from electra.model.heads import ElectraDetectionHead, SequenceLabelHead, TokenHead, TokenLabelHead
from electra.model.modern import NORM_EPS, LabelHead, ModernDetectionHead, ModernEncoder, ModernEncoderSettings

EncoderSettings = ElectraEncoderSettings | ModernEncoderSettings
EncoderChoice = Annotated[EncoderSettings, Field(discriminator="kind")]
Encoder = ElectraEncoder | ModernEncoder
DetectionHead = ElectraDetectionHead | ModernDetectionHead
DEVIATION = 0.02


def encode(encoder: Encoder, batch: Batch, first_only: bool = False) -> Float[Tensor, "batch kept hidden"]:
    return encoder(batch.ids, batch.segments, batch.is_real if batch.padded else None, first_only)


def gather_rows(
    hidden: Float[Tensor, "batch seq hidden"], positions: Int[Tensor, "batch count"]
) -> Float[Tensor, "batch count hidden"]:
    """The hidden states at some positions of each row."""
    return hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2]))


def compatibility_settings(settings: EncoderSettings) -> dict[str, str | float]:
    """Settings that must match for pre-trained weights to be valid: tensor shapes, plus options that change the computation
    but no shape. ModernBERT's attention options are included only if some layer uses them."""
    sizes = settings.model_dump(include={"kind", "layers", "hidden", "heads", "intermediate", "embedding"})
    if isinstance(settings, ElectraEncoderSettings):
        return sizes | {"positions": settings.positions, "norm_eps": settings.norm_eps}
    every = min(settings.global_every, settings.layers)
    local = {"window": settings.window, "local_theta": settings.local_theta} if every > 1 else {}
    counted = settings.global_from if (settings.layers - 1) % every else "first"
    return sizes | {"global_every": every, "global_from": counted, "global_theta": settings.global_theta} | local


def readable_length(settings: EncoderSettings, length: int) -> int:
    """The number of `length` tokens that an encoder can read at once: ELECTRA has a table of positions, rotary positions need
    none."""
    return min(length, settings.positions) if isinstance(settings, ElectraEncoderSettings) else length


def build_embeddings(
    settings: EncoderSettings, vocab_size: int, source: WordEmbeddings | None = None
) -> WordEmbeddings:
    """The embeddings of an encoder. With a `source`, they read its word table without sending it gradients."""
    if isinstance(settings, ElectraEncoderSettings):
        return ElectraEmbeddings(settings, vocab_size, source)
    return WordEmbeddings(vocab_size, settings.embedding, source)


def build_encoder(settings: EncoderSettings, embeddings: WordEmbeddings, direction: Direction = "both") -> Encoder:
    if isinstance(settings, ElectraEncoderSettings):
        return ElectraEncoder(settings, embeddings, direction)
    return ModernEncoder(settings, embeddings, direction)


def encoder_alone(settings: EncoderSettings, vocab_size: int) -> Encoder:
    """An encoder with embeddings of its own."""
    return build_encoder(settings, build_embeddings(settings, vocab_size))


def build_token_head(settings: EncoderSettings, vocab_size: int, towers: int = 1) -> TokenHead:
    """The head that predicts tokens. With `towers` it reads the concatenated states of that many encoders. As in
    ModernBertForMaskedLM, ModernBERT's has no bias but the last, and the same norm as everywhere else."""
    inputs, width = towers * settings.hidden, token_head_width(settings)
    if isinstance(settings, ElectraEncoderSettings):
        return TokenHead(inputs, width, vocab_size, settings.norm_eps)
    return TokenHead(inputs, width, vocab_size, NORM_EPS, has_biases=False)


def token_head_width(settings: EncoderSettings) -> int:
    is_tied = isinstance(settings, ModernEncoderSettings) and settings.token_head == "tied"
    return settings.hidden if is_tied else settings.embedding


def build_detection_head(settings: EncoderSettings) -> DetectionHead:
    if isinstance(settings, ElectraEncoderSettings):
        return ElectraDetectionHead(settings)
    return ModernDetectionHead(settings)


def sequence_label_head(settings: EncoderSettings, outputs: int) -> nn.Module:
    """[batch hidden], pooled by `pool`, -> [batch outputs]: the same head as in transformers' class for this task."""
    if isinstance(settings, ElectraEncoderSettings):
        return SequenceLabelHead(settings, outputs)
    return LabelHead(settings, outputs)


def token_label_head(settings: EncoderSettings, outputs: int) -> nn.Module:
    """[batch seq hidden] -> [batch seq outputs]."""
    if isinstance(settings, ElectraEncoderSettings):
        return TokenLabelHead(settings, outputs, settings.dropout)
    return LabelHead(settings, outputs)


def question_head(settings: EncoderSettings) -> nn.Module:
    """[batch seq hidden] -> [batch seq 2], the logits that an answer starts or ends there."""
    if isinstance(settings, ElectraEncoderSettings):
        return TokenLabelHead(settings, 2, dropout=0.0)
    return LabelHead(settings, 2)


@torch.no_grad()
def truncated_normal_(weight: Tensor, deviation: float, generator: torch.Generator) -> None:
    """Fills `weight` in place; values beyond two deviations are drawn again. Torch's own changed its draws between 2.11 and 2.13."""
    weight.normal_(std=deviation, generator=generator)
    while (outside := weight.abs() > 2 * deviation).any():
        weight.copy_(torch.where(outside, torch.empty_like(weight).normal_(std=deviation, generator=generator), weight))


def initialise(module: nn.Module, settings: EncoderSettings, seed: int) -> None:
    """Draws all weights as a function of the seed: normal with deviation 0.02, truncated at two deviations; Glorot uniform where
    ELECTRA's original code uses it, and for ModernBERT's embedding projection (at 0.02 the words would vanish beside the norm's
    epsilon); biases zero. The two products of a ModernBERT layer that are added to the residual stream: 0.02 / sqrt(2 layers)."""
    if any(parameter.is_meta for parameter in module.parameters()):  # nothing to draw
        return
    is_plain = isinstance(settings, ElectraEncoderSettings) and settings.initialisation == "normal"
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        match part:
            case nn.Linear() | nn.Embedding() if is_plain:
                nn.init.normal_(part.weight, std=DEVIATION, generator=generator)
            case Linear(start="glorot"):
                nn.init.xavier_uniform_(part.weight, generator=generator)
            case nn.Linear() | nn.Embedding():
                adds = isinstance(part, Linear) and part.start == "residual"
                deviation = DEVIATION * (1 / math.sqrt(2 * settings.layers) if adds else 1.0)
                truncated_normal_(part.weight, deviation, generator)
            case nn.LayerNorm():
                nn.init.ones_(part.weight)
        if isinstance(part, nn.Linear | nn.LayerNorm) and part.bias is not None:
            nn.init.zeros_(part.bias)
