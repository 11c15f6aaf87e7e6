"""The encoders there are, and what is built for each of them. A new one adds its arms here, and nowhere else in the model."""

from typing import Annotated

from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.model.electra import (
    Direction,
    ElectraEmbeddings,
    ElectraEncoder,
    ElectraEncoderSettings,
    initialise_electra,
)
from electra.model.heads import ElectraDetectionHead, SequenceLabelHead, TokenHead, TokenLabelHead
from electra.model.modern import (
    NORM_EPS,
    LabelHead,
    ModernDetectionHead,
    ModernEmbeddings,
    ModernEncoder,
    ModernEncoderSettings,
    initialise_modern,
)

EncoderSettings = ElectraEncoderSettings | ModernEncoderSettings
EncoderChoice = Annotated[EncoderSettings, Field(discriminator="kind")]

Encoder = ElectraEncoder | ModernEncoder
Embeddings = ElectraEmbeddings | ModernEmbeddings
DetectionHead = ElectraDetectionHead | ModernDetectionHead


def encode(encoder: Encoder, batch: Batch) -> Float[Tensor, "batch seq hidden"]:
    return encoder(batch.ids, batch.segments, batch.is_real if batch.padded else None)


def gather_rows(
    hidden: Float[Tensor, "batch seq hidden"], positions: Int[Tensor, "batch count"]
) -> Float[Tensor, "batch count hidden"]:
    """The states at some positions of each row."""
    return hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2]))


def compatibility_settings(settings: EncoderSettings) -> dict[str, float]:
    """Settings that must match for pre-trained weights to be valid: tensor shapes, plus options that change the computation
    but no shape. Of ModernBERT's, only what some layer uses."""
    names = ("layers", "hidden", "heads", "intermediate", "embedding")
    values: dict[str, float] = {name: getattr(settings, name) for name in names}
    match settings:
        case ElectraEncoderSettings():
            values["positions"] = settings.positions
        case ModernEncoderSettings():
            values["global_every"] = min(settings.global_every, settings.layers)
            values["global_theta"] = settings.global_theta
            if values["global_every"] > 1:
                values |= {"window": settings.window, "local_theta": settings.local_theta}
    return values


def build_embeddings(settings: EncoderSettings, vocab_size: int, source: Embeddings | None = None) -> Embeddings:
    """With a `source`, embeddings that read its word table without pulling at it."""
    match settings, source:
        case ElectraEncoderSettings(), ElectraEmbeddings() | None:
            return ElectraEmbeddings(settings, vocab_size, source)
        case ModernEncoderSettings(), ModernEmbeddings() | None:
            return ModernEmbeddings(settings, vocab_size, source)
    raise AssertionError("generator and discriminator are of the same kind")


def build_encoder(settings: EncoderSettings, embeddings: Embeddings, direction: Direction = "both") -> Encoder:
    match settings, embeddings:
        case ElectraEncoderSettings(), ElectraEmbeddings():
            return ElectraEncoder(settings, embeddings, direction)
        case ModernEncoderSettings(), ModernEmbeddings():
            return ModernEncoder(settings, embeddings, direction)
    raise AssertionError("embeddings are of the encoder's kind")


def encoder_alone(settings: EncoderSettings, vocab_size: int) -> Encoder:
    """With embeddings of its own."""
    return build_encoder(settings, build_embeddings(settings, vocab_size))


def build_token_head(settings: EncoderSettings, vocab_size: int) -> TokenHead:
    """ModernBertForMaskedLM has no biases but the last, and the same norm as everywhere else."""
    match settings:
        case ElectraEncoderSettings():
            return TokenHead(settings.hidden, settings.embedding, vocab_size)
        case ModernEncoderSettings():
            sizes = settings.hidden, settings.embedding, vocab_size
            return TokenHead(*sizes, NORM_EPS, has_biases=False)


def build_detection_head(settings: EncoderSettings) -> DetectionHead:
    match settings:
        case ElectraEncoderSettings():
            return ElectraDetectionHead(settings)
        case ModernEncoderSettings():
            return ModernDetectionHead(settings)


def sequence_label_head(settings: EncoderSettings, outputs: int) -> nn.Module:
    """[batch hidden], the vectors of [CLS], -> [batch outputs]: the one that transformers' class for it has."""
    match settings:
        case ElectraEncoderSettings():
            return SequenceLabelHead(settings, outputs)
        case ModernEncoderSettings():
            return LabelHead(settings, outputs)


def token_label_head(settings: EncoderSettings, outputs: int) -> nn.Module:
    """[batch seq hidden] -> [batch seq outputs]."""
    match settings:
        case ElectraEncoderSettings():
            return TokenLabelHead(settings, outputs, settings.dropout)
        case ModernEncoderSettings():
            return LabelHead(settings, outputs)


def question_head(settings: EncoderSettings) -> nn.Module:
    """[batch seq hidden] -> [batch seq 2], the logits of an answer's start and end."""
    match settings:
        case ElectraEncoderSettings():
            return TokenLabelHead(settings, 2, dropout=0.0)
        case ModernEncoderSettings():
            return LabelHead(settings, 2)


def initialise(module: nn.Module, settings: EncoderSettings, seed: int) -> None:
    """Weights as a function of the seed, as the encoder's kind draws them. On the meta device there is nothing to draw."""
    if any(parameter.is_meta for parameter in module.parameters()):
        return
    match settings:
        case ElectraEncoderSettings():
            initialise_electra(module, settings, seed)
        case ModernEncoderSettings():
            initialise_modern(module, settings, seed)
