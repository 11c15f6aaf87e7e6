"""Heads on ModernBERT, in the forms that transformers' ModernBert classes have."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from electra.model import heads
from electra.model.modern import NORM_EPS, ModernBertSettings


class TokenHead(heads.TokenHead):
    """As heads.TokenHead, in the form that ModernBertForMaskedLM has: no biases but the last, and the same norm as
    everywhere else."""

    def __init__(self, settings: ModernBertSettings, vocab_size: int):
        super().__init__(settings.hidden, settings.embedding, vocab_size, NORM_EPS, has_biases=False)


class LabelHead(nn.Module):
    """Logits of labels, for a token or for a row, in the one form that all of transformers' ModernBert classes with
    labels have: dense, GELU, norm, dropout, output. Behind a norm the output is not drawn from Glorot's distribution,
    as ELECTRA's is: logits would start at a deviation of one, and fifty times their loss with them."""

    def __init__(self, settings: ModernBertSettings, outputs: int):
        super().__init__()
        self.dense = nn.Linear(settings.hidden, settings.hidden, bias=False)
        self.norm = nn.LayerNorm(settings.hidden, NORM_EPS, bias=False)
        self.dropout = nn.Dropout(settings.dropout)
        self.output = nn.Linear(settings.hidden, outputs)

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows outputs"]:
        return heads.in_float32(self.output, self.dropout(self.norm(F.gelu(self.dense(hidden)))))


class DetectionHead(nn.Module):
    """As heads.DetectionHead, in the form of ModernBertForTokenClassification with one label."""

    def __init__(self, settings: ModernBertSettings):
        super().__init__()
        self.label = LabelHead(settings, 1)

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows"]:
        return self.label(hidden).squeeze(-1)
