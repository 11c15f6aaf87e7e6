"""How a model is fine-tuned: the paper's values for the model's size unless others are given."""

from typing import Any, Literal

from pydantic import Field, model_validator

from electra.base.config import Settings
from electra.model import EncoderSettings
from electra.train.optimizers import Beta, OptimizerSettings

DecayKind = Literal["exact", "original"]


class MethodSettings(Settings):
    """The defaults here are those of a small model; `size_defaults` has the paper's for each size. Rates follow
    `schedule` ("original" multiplies warm-up and decay) after `warmup`, a share of all steps. Weight decay is 0 as in the
    paper, where the original code has 0.01. `evaluations` is how often the dev set is scored on the way, for the curve.
    `keep` says which weights are saved, and `patience` stops after so many evaluations without a better headline (0:
    never); with anything but "last" and 0 the dev score has been selected on and is no longer the paper's protocol.
    `pretrained = false` starts from random weights, for comparison. `record = false` launches every kernel of a step on the
    GPU by itself and not as a CUDA graph: slower, for looking for bugs. `optimizer = "muon"` updates the matrices inside the
    layers by Muon, at the same layer-wise rates. A seed is saved every `save_minutes`."""

    batch: int = Field(32, ge=1)
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(3e-4, gt=0)
    layer_decay: float = Field(0.8, gt=0, le=1)
    layer_decay_kind: DecayKind = "exact"
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-6, gt=0)
    bias_correction: bool = False
    clip: float = Field(1.0, gt=0)
    schedule: Literal["original", "linear", "cosine", "constant"] = "original"
    warmup: float = Field(0.1, ge=0, lt=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    evaluations: int = Field(5, ge=1)
    keep: Literal["last", "best"] = "last"
    patience: int = Field(0, ge=0)
    pretrained: bool = True
    save_minutes: float = Field(5.0, gt=0)
    record: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"

    @model_validator(mode="after")
    def patience_fits(self) -> "MethodSettings":
        if self.patience >= self.evaluations:
            raise ValueError(
                f"patience ({self.patience}) must be below evaluations ({self.evaluations}) to stop anything"
            )
        return self

    def optimizer_settings(self) -> OptimizerSettings:
        return OptimizerSettings(
            kind=self.optimizer,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            bias_correction=self.bias_correction,
            clip=self.clip,
        )


# Where a run was computed and how often it was saved do not change what it is: it may go on elsewhere.
FREE_TO_CHANGE = ("device", "record", "save_minutes")


def size_defaults(encoder: EncoderSettings) -> dict[str, Any]:
    """Table 7 of the paper, by the hidden size (small 256, base 768, large 1024). Dropout is the model's own."""
    if encoder.hidden >= 1024:
        lr, decay = 5e-5, 0.9
    elif encoder.hidden >= 768:
        lr, decay = 1e-4, 0.8
    else:
        lr, decay = 3e-4, 0.8
    return {
        "lr": lr,
        "layer_decay": decay,
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
    }
