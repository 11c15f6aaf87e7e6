"""Heads for classification. Tagging and span heads live with their tasks."""

import torch.nn.functional as F
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.model.electra import EncoderSettings
from electra.model.encoders import AnySettings
from electra.model.modern import ModernBertSettings
from electra.model.modern_heads import LabelHead


class TransformersHead(nn.Module):
    """transformers' ElectraClassificationHead on the vector of [CLS]."""

    reads_first_only = True

    def __init__(self, settings: EncoderSettings, outputs: int):
        super().__init__()
        self.dropout = nn.Dropout(settings.dropout)
        self.dense = nn.Linear(settings.hidden, settings.hidden)
        self.output = nn.Linear(settings.hidden, outputs)
        self.dense.glorot = self.output.glorot = True  # type: ignore[assignment]

    def forward(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        x = F.gelu(self.dense(self.dropout(hidden[:, 0])))
        return {"logits": self.output(self.dropout(x))}


class ModernBertHead(nn.Module):
    """transformers' ModernBertForSequenceClassification on the vector of [CLS]."""

    reads_first_only = True

    def __init__(self, settings: ModernBertSettings, outputs: int):
        super().__init__()
        self.label = LabelHead(settings, outputs)

    def forward(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.label(hidden[:, 0])}


class LinearHead(nn.Module):
    """The original's: dropout, one dense layer."""

    reads_first_only = True

    def __init__(self, settings: AnySettings, outputs: int):
        super().__init__()
        self.dropout = nn.Dropout(settings.dropout)
        self.output = nn.Linear(settings.hidden, outputs)
        self.output.glorot = True  # type: ignore[assignment]

    def forward(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.output(self.dropout(hidden[:, 0]))}
