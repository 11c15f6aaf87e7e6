"""The encoders there are, and what is built for each of them. A new one adds its arms here."""

from typing import Annotated

from pydantic import Field
from torch import nn

from electra.model import electra as electra
from electra.model import heads
from electra.model import modern as modernbert
from electra.model import modern_heads as modernbert_heads
from electra.model.electra import Direction, Encoder, EncoderSettings
from electra.model.modern import ModernBert, ModernBertSettings

AnySettings = EncoderSettings | ModernBertSettings
EncoderChoice = Annotated[AnySettings, Field(discriminator="kind")]

AnyEncoder = Encoder | ModernBert
Embeddings = electra.Embeddings | modernbert.Embeddings
DisentangledEmbeddings = electra.DisentangledEmbeddings | modernbert.DisentangledEmbeddings
TokenHead = heads.TokenHead
DetectionHead = heads.DetectionHead | modernbert_heads.DetectionHead


def bound_settings(settings: AnySettings) -> dict[str, float]:
    """Those that trained weights mean something with: their shapes, and what the states depend on without any shape
    that shows it. Of ModernBERT's, only what some layer uses."""
    found: dict[str, float] = {
        name: getattr(settings, name) for name in ("layers", "hidden", "heads", "intermediate", "embedding")
    }
    match settings:
        case EncoderSettings():
            found["positions"] = settings.positions
        case ModernBertSettings():
            found["global_every"] = min(settings.global_every, settings.layers)
            found["global_theta"] = settings.global_theta
            if found["global_every"] > 1:
                found |= {"window": settings.window, "local_theta": settings.local_theta}
    return found


def build_embeddings(settings: AnySettings, vocab_size: int) -> Embeddings:
    match settings:
        case EncoderSettings():
            return electra.Embeddings(settings, vocab_size)
        case ModernBertSettings():
            return modernbert.Embeddings(settings, vocab_size)


def disentangle(settings: AnySettings, vocab_size: int, source: Embeddings) -> DisentangledEmbeddings:
    """Embeddings that read the word table of others without pulling at it."""
    match settings, source:
        case EncoderSettings(), electra.Embeddings():
            return electra.DisentangledEmbeddings(settings, vocab_size, source)
        case ModernBertSettings(), modernbert.Embeddings():
            return modernbert.DisentangledEmbeddings(settings, vocab_size, source)
    raise AssertionError("generator and discriminator are of the same kind")


def build_encoder(
    settings: AnySettings, embeddings: Embeddings | DisentangledEmbeddings, direction: Direction = "both"
) -> AnyEncoder:
    match settings, embeddings:
        case EncoderSettings(), electra.Embeddings() | electra.DisentangledEmbeddings():
            return Encoder(settings, embeddings, direction)
        case ModernBertSettings(), modernbert.Embeddings() | modernbert.DisentangledEmbeddings():
            return ModernBert(settings, embeddings, direction)
    raise AssertionError("embeddings are of the encoder's kind")


def encoder_alone(settings: AnySettings, vocab_size: int) -> AnyEncoder:
    """With embeddings of its own."""
    return build_encoder(settings, build_embeddings(settings, vocab_size))


def build_token_head(settings: AnySettings, vocab_size: int) -> TokenHead:
    match settings:
        case EncoderSettings():
            return TokenHead(settings.hidden, settings.embedding, vocab_size)
        case ModernBertSettings():
            return modernbert_heads.TokenHead(settings, vocab_size)


def build_detection_head(settings: AnySettings) -> DetectionHead:
    match settings:
        case EncoderSettings():
            return heads.DetectionHead(settings)
        case ModernBertSettings():
            return modernbert_heads.DetectionHead(settings)


def sequence_label_head(settings: AnySettings, outputs: int) -> nn.Module:
    """[batch hidden], the vectors of [CLS], -> [batch outputs]: the one that transformers' class for it has."""
    match settings:
        case EncoderSettings():
            return heads.SequenceLabelHead(settings, outputs)
        case ModernBertSettings():
            return modernbert_heads.LabelHead(settings, outputs)


def token_label_head(settings: AnySettings, outputs: int) -> nn.Module:
    """[batch seq hidden] -> [batch seq outputs]."""
    match settings:
        case EncoderSettings():
            return heads.TokenLabelHead(settings, outputs, settings.dropout)
        case ModernBertSettings():
            return modernbert_heads.LabelHead(settings, outputs)


def question_head(settings: AnySettings) -> nn.Module:
    """[batch seq hidden] -> [batch seq 2], the logits of an answer's start and end."""
    match settings:
        case EncoderSettings():
            return heads.TokenLabelHead(settings, 2, dropout=0.0)
        case ModernBertSettings():
            return modernbert_heads.LabelHead(settings, 2)


def initialise(module: nn.Module, settings: AnySettings, seed: int) -> None:
    """Weights as a function of the seed, as the encoder's kind draws them."""
    match settings:
        case EncoderSettings():
            electra.initialise(module, settings, seed)
        case ModernBertSettings():
            modernbert.initialise(module, settings, seed)
