"""The encoder of the paper: BERT's post-norm block behind factorised embeddings.

Differences from the original code, none of which changes a number: queries, keys and values are one matrix product;
attention runs through torch's fused kernel; a batch without padding passes no mask at all. On a GPU in half precision the
layers run in our own kernels (kernels/layer), which round differently.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from electra.base.config import Settings
from electra.kernels import usable
from electra.model.linear import Linear, linear

LAYER_NORM_EPS = 1e-12
TYPES = 2


class ElectraEncoderSettings(Settings):
    """Sizes of the discriminator. `initialisation`: "original" draws the embedding projection and the detection
    output from Glorot's distribution, as the original code does by TensorFlow's default; "normal" draws everything
    from a normal distribution of deviation 0.02, as transformers does. `norm_eps` is BERT's; RoBERTa has another."""

    kind: Literal["electra"] = "electra"
    layers: int = Field(12, ge=1, le=1000)
    hidden: int = Field(256, ge=1, le=65_536)
    heads: int = Field(4, ge=1, le=65_536)
    intermediate: int = Field(1024, ge=1, le=1_000_000)
    embedding: int = Field(128, ge=1, le=65_536)
    positions: int = Field(512, ge=2, le=1_000_000)
    dropout: float = Field(0.1, ge=0, lt=1)
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    initialisation: Literal["original", "normal"] = "original"
    norm_eps: float = Field(LAYER_NORM_EPS, gt=0, le=0.1)

    @model_validator(mode="after")
    def heads_divide_hidden(self) -> "ElectraEncoderSettings":
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self

    def scaled(self, width: float, depth: float) -> "ElectraEncoderSettings":
        """The generator's sizes: hidden, intermediate and heads times `width`, layers times `depth`, rounded.
        The embedding size stays the same, because the table may be shared."""
        hidden, intermediate = round(self.hidden * width), round(self.intermediate * width)
        heads, layers = max(1, round(self.heads * width)), max(1, round(self.layers * depth))
        return self.model_copy(
            update={"hidden": hidden, "intermediate": intermediate, "heads": heads, "layers": layers}
        )


class WordEmbeddings(nn.Module):
    """The word table: the part that generator and discriminator may share.

    With a `source` it is gradient-disentangled (He et al., 2021): E_D = stop_gradient(E_G) + Δ, with Δ = 0 at the start. The
    discriminator reads the generator's word table, but its gradient never reaches it. The source is held in a tuple, so that
    its parameters are registered with the generator only."""

    def __init__(self, vocab_size: int, embedding: int, source: "WordEmbeddings | None" = None):
        super().__init__()
        self._source = () if source is None else (source,)
        if source is None:
            self.words = nn.Embedding(vocab_size, embedding)
        else:
            self.delta = nn.Parameter(torch.zeros(vocab_size, embedding))

    def forward(
        self, ids: Int[Tensor, "batch seq"], segments: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq embedding"]:
        if self._source:
            return F.embedding(ids, self._source[0].table.detach()) + F.embedding(ids, self.delta)
        return self.words(ids)

    @property
    def is_disentangled(self) -> bool:
        return bool(self._source)

    @property
    def table(self) -> Float[Tensor, "vocab embedding"]:
        return self._source[0].table.detach() + self.delta if self._source else self.words.weight


class ElectraEmbeddings(WordEmbeddings):
    """Word + position + type, LayerNorm, dropout. A subclass, so that word tables have the same name in every checkpoint."""

    def __init__(self, settings: ElectraEncoderSettings, vocab_size: int, source: WordEmbeddings | None = None):
        super().__init__(vocab_size, settings.embedding, source)
        self.positions = nn.Embedding(settings.positions, settings.embedding)
        self.types = nn.Embedding(TYPES, settings.embedding)
        self.norm = nn.LayerNorm(settings.embedding, eps=settings.norm_eps)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(
        self, ids: Int[Tensor, "batch seq"], segments: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq embedding"]:
        words = super().forward(ids, segments)
        return self.dropout(
            self.norm(words + self.positions.weight[: ids.shape[1]] + look_up_type(self.types, segments))
        )


def look_up_type(types: nn.Embedding, segments: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq embedding"]:
    """types(segments), with a faster gradient: two sums over all tokens. An embedding's would add every token to one of the
    same two rows, one after the other."""
    first, second = types.weight
    return torch.where(segments[:, :, None] == 1, second, first)


Rows = Bool[Tensor, "rows width"] | None
"""Which tokens of the rows are real, if x is unpadded (the real tokens of all rows concatenated into one row); else None."""


def unpadding(network: nn.Module, is_real: Rows) -> Rows:
    """`is_real` if unpadding pays, else None. It pays in inference on a CPU, which then skips the computation for padding."""
    learns = network.training or torch.is_grad_enabled() or torch.compiler.is_compiling()
    return None if is_real is None or learns or is_real.device.type != "cpu" else is_real


def unpad(x: Float[Tensor, "batch seq size"], rows: Rows) -> Float[Tensor, "one tokens size"]:
    return x if rows is None else x[rows][None]


def pad(x: Float[Tensor, "one tokens size"], rows: Rows) -> Float[Tensor, "batch seq size"]:
    if rows is None:
        return x
    padded = x.new_zeros(*rows.shape, x.shape[2])
    padded[rows] = x[0]
    return padded


class ElectraLayer(nn.Module):
    """x -> LN(x + attention(x)) -> LN(x + feed_forward(x)), with dropout before each sum."""

    def __init__(self, settings: ElectraEncoderSettings):
        super().__init__()
        hidden = settings.hidden
        self.heads = settings.heads
        self.attention_dropout = settings.attention_dropout
        self.query_key_value = Linear(hidden, 3 * hidden, stacked=3)
        self.attention_output = Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=settings.norm_eps)
        self.expand = Linear(hidden, settings.intermediate)
        self.contract = Linear(settings.intermediate, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=settings.norm_eps)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        attend: Bool[Tensor, "#rows 1 #query width"] | None,
        first_only: bool = False,
        rows: Rows = None,
    ) -> Float[Tensor, "batch kept hidden"]:
        """The layer's output. `first_only` computes only the first token's vector, which still attends to all tokens: a
        classifier reads nothing else of the last layer."""
        attention_out = self.attention(x, attend, first_only, rows)
        kept = x[:, :1] if first_only else x
        x = self.attention_norm(kept + self.dropout(self.attention_output(attention_out)))
        return self.output_norm(x + self.dropout(self.contract(F.gelu(self.expand(x)))))

    def in_order(self) -> list[Tensor]:
        """The parameters in the order that `fused_layers` expects."""
        products = self.query_key_value, self.attention_output, self.expand, self.contract
        norms = self.attention_norm, self.output_norm
        return [tensor for part in (*products, *norms) for tensor in (part.weight, part.bias)]

    def attention(
        self,
        x: Float[Tensor, "batch seq hidden"],
        attend: Bool[Tensor, "#rows 1 #query width"] | None,
        first_only: bool,
        rows: Rows,
    ) -> Float[Tensor, "batch kept hidden"]:
        hidden = x.shape[2]
        if first_only:
            weight, bias = self.query_key_value.weight, self.query_key_value.bias
            first = linear(x[:, :1], weight[:hidden], bias[:hidden])
            parts = first, *linear(x, weight[hidden:], bias[hidden:]).chunk(2, dim=2)
        else:
            parts = pad(self.query_key_value(x), rows).chunk(3, dim=2)
        size = hidden // self.heads
        query, key, value = (part.view(*part.shape[:2], self.heads, size).transpose(1, 2) for part in parts)
        dropout = self.attention_dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attend, dropout_p=dropout)
        return unpad(out.transpose(1, 2).flatten(2), rows)


Direction = Literal["both", "left", "right"]


def attention_mask(
    length: int, is_real: Bool[Tensor, "batch seq"] | None, direction: Direction, device: torch.device
) -> Bool[Tensor, "#batch 1 #query seq"] | None:
    """True where a query may attend to a key. With "left" a token attends to itself and to what precedes it, with "right" to itself and
    to what follows. Nothing attends to padding, except that a one-sided padding token attends to itself: no softmax may be empty."""
    if direction == "both":
        return None if is_real is None else is_real[:, None, None, :]
    square = torch.ones(length, length, dtype=torch.bool, device=device)
    allowed = (square.tril() if direction == "left" else square.triu())[None, None]
    if is_real is None:
        return allowed
    itself = torch.eye(length, dtype=torch.bool, device=device)
    return allowed & (is_real[:, None, None, :] | itself)


class ElectraEncoder(nn.Module):
    """Token ids in, one vector per token out. The embeddings are an argument: to share them, pass them to two encoders."""

    def __init__(self, settings: ElectraEncoderSettings, embeddings: WordEmbeddings, direction: Direction = "both"):
        super().__init__()
        self.settings = settings
        self.embeddings = embeddings
        self.direction: Direction = direction
        projects = settings.embedding != settings.hidden
        self.project = Linear(settings.embedding, settings.hidden, start="glorot") if projects else nn.Identity()
        self.layers = nn.ModuleList(ElectraLayer(settings) for _ in range(settings.layers))

    def forward(
        self,
        ids: Int[Tensor, "batch seq"],
        segments: Int[Tensor, "batch seq"],
        is_real: Bool[Tensor, "batch seq"] | None,
        first_only: bool = False,
    ) -> Float[Tensor, "batch kept hidden"]:
        """One vector per token. `is_real` may be None if no row is padded: attention is faster without a mask. `first_only`
        returns only the first token's vector, with the same values as in the full output (without dropout)."""
        attend = attention_mask(ids.shape[1], is_real, self.direction, ids.device)
        x = self.project(self.embeddings(ids, segments))
        *most, last = self.layers
        if self.direction == "both" and usable(x):
            from electra.kernels.layer import fused_layers

            settings = self.settings
            dropout = (settings.dropout, settings.attention_dropout) if self.training else (0.0, 0.0)
            fused = most if first_only else self.layers
            parameters = [layer.in_order() for layer in fused if isinstance(layer, ElectraLayer)]
            x = fused_layers(x, is_real, parameters, settings.heads, *dropout, settings.norm_eps)
            return last(x, attend, first_only) if first_only else x
        rows = unpadding(self, is_real)
        x = unpad(x, rows)
        for layer in most:
            x = layer(x, attend, rows=rows)
        return last(pad(x, rows), attend, first_only)
