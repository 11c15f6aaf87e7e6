"""The encoder of ModernBERT (Warner et al., 2024): pre-norm, rotary positions, GeGLU, no biases, and attention that is
local in most layers. Loads as transformers' ModernBertModel (interop/formats.py).

Differences from ModernBERT: the word table may be of another width than the layers, with a projection between them, so
that generator and discriminator can share it (attention may also be one-sided, for generators). The projection stands
before the first norm: both are linear in the word, so that their product is a table of ModernBERT's own kind and
nothing is lost in an export. Segments are not read.

Rows of different lengths need no padding: `encode_packed` takes them end to end.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from electra.base.config import Settings
from electra.model.electra import Direction, attention_mask
from electra.model.packed import has_varlen, mix_row_by_row, mix_varlen, nearby_mask

NORM_EPS = 1e-5
DEVIATION = 0.02


class ModernBertSettings(Settings):
    """Every `global_every`-th layer, the first included, sees the whole row; the others see `window` tokens, half of
    them on either side. `positions` is a promise, not a table: rotary positions have none. `dropout` is on embeddings
    and between the feed-forward products, `attention_dropout` on attention weights and on what attention adds."""

    kind: Literal["modernbert"] = "modernbert"
    layers: int = Field(12, ge=1)
    hidden: int = Field(256, ge=2)
    heads: int = Field(4, ge=1)
    intermediate: int = Field(384, ge=1)
    embedding: int = Field(256, ge=1)
    positions: int = Field(512, ge=2)
    dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    window: int = Field(128, ge=2)
    global_every: int = Field(3, ge=1)
    global_theta: float = Field(160_000.0, gt=0)
    local_theta: float = Field(10_000.0, gt=0)

    @model_validator(mode="after")
    def sizes_divide(self) -> "ModernBertSettings":
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden ({self.hidden}) must be an even multiple of heads ({self.heads}): positions turn pairs of "
                "units"
            )
        if self.window % 2:
            raise ValueError(
                f"window ({self.window}) must be an even number: half of it is on either side. "
                f"{self.window - 1} would see the same"
            )
        return self

    def scaled(self, width: float, depth: float) -> "ModernBertSettings":
        """The generator's sizes: hidden, intermediate and heads times `width`, layers times `depth`; hidden to the
        nearest even multiple of heads. The embedding size stays, because the table may be shared."""
        heads = max(1, round(self.heads * width))
        return self.model_copy(
            update={
                "hidden": 2 * heads * max(1, round(self.hidden * width / (2 * heads))),
                "intermediate": max(1, round(self.intermediate * width)),
                "heads": heads,
                "layers": max(1, round(self.layers * depth)),
            }
        )

    def is_local(self, layer: int) -> bool:
        return layer % self.global_every != 0


class Embeddings(nn.Module):
    """The word table: the part that generator and discriminator may share."""

    def __init__(self, settings: ModernBertSettings, vocab_size: int):
        super().__init__()
        self.words = nn.Embedding(vocab_size, settings.embedding)

    def forward(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq embedding"]:
        return self.words(ids)

    @property
    def table(self) -> Float[Tensor, "vocab embedding"]:
        return self.words.weight


class DisentangledEmbeddings(nn.Module):
    """As encoder.DisentangledEmbeddings: the generator's word table, which is read and never pulled at, plus Δ."""

    def __init__(self, settings: ModernBertSettings, vocab_size: int, source: Embeddings):
        super().__init__()
        self._source = (source,)
        self.delta = nn.Parameter(torch.zeros(vocab_size, settings.embedding))

    def forward(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq embedding"]:
        return F.embedding(ids, self._source[0].table.detach()) + F.embedding(ids, self.delta)

    @property
    def table(self) -> Float[Tensor, "vocab embedding"]:
        return self._source[0].table.detach() + self.delta


Rotation = tuple[Float[Tensor, "seq 1 size"], Float[Tensor, "seq 1 size"]]
# Queries, keys and values of a layer, [batch seq heads size] each, and whether it is local -> mixed values.
Mix = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def rotation(positions: Int[Tensor, "seq"], size: int, theta: float) -> Rotation:
    """cos and sin of position * theta^(-2i / size), in float32, for the pairs of units (i, i + size / 2)."""
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float) / size
    angles = positions[:, None, None].float() * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "batch seq heads size"], by: Rotation) -> Float[Tensor, "batch seq heads size"]:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = by
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Layer(nn.Module):
    """x -> x + attention(LN(x)) -> x + GeGLU(LN(x)). The first layer has no LN before attention: the embeddings end
    with one."""

    def __init__(self, settings: ModernBertSettings, number: int):
        super().__init__()
        hidden = settings.hidden
        self.heads = settings.heads
        self.is_local = settings.is_local(number)
        self.attention_norm = nn.LayerNorm(hidden, NORM_EPS, bias=False) if number else nn.Identity()
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_output = nn.Linear(hidden, hidden, bias=False)
        self.feed_forward_norm = nn.LayerNorm(hidden, NORM_EPS, bias=False)
        self.expand = nn.Linear(hidden, 2 * settings.intermediate, bias=False)
        self.contract = nn.Linear(settings.intermediate, hidden, bias=False)
        self.dropout = nn.Dropout(settings.dropout)
        self.attention_dropout = nn.Dropout(settings.attention_dropout)
        self.query_key_value.stacked, self.expand.stacked = 3, 2  # type: ignore[assignment]
        self.attention_output.adds = self.contract.adds = True  # type: ignore[assignment]

    def forward(
        self, x: Float[Tensor, "batch seq hidden"], by: Rotation, mix: Mix, first_only: bool = False
    ) -> Float[Tensor, "batch kept hidden"]:
        """`first_only`: as in encoder.Layer, the vector of the first token alone, which looks at all others."""
        batch, seq, hidden = x.shape
        kept = 1 if first_only else seq
        projected = self.query_key_value(self.attention_norm(x))
        query, key, value = projected.view(batch, seq, 3, self.heads, hidden // self.heads).unbind(2)
        mixed = mix(rotate(query, by)[:, :kept], rotate(key, by), value, self.is_local)
        x = x[:, :kept] + self.attention_dropout(self.attention_output(mixed.reshape(batch, kept, hidden)))
        value, gate = self.expand(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.contract(self.dropout(F.gelu(value) * gate))


class ModernBert(nn.Module):
    """Token ids in, one vector a token out, as encoder.Encoder. The embeddings arrive as an argument."""

    def __init__(
        self,
        settings: ModernBertSettings,
        embeddings: Embeddings | DisentangledEmbeddings,
        direction: Direction = "both",
    ):
        super().__init__()
        self.settings = settings
        self.embeddings: Embeddings | DisentangledEmbeddings = embeddings
        self.direction: Direction = direction
        projects = settings.embedding != settings.hidden
        self.project = (
            nn.Linear(settings.embedding, settings.hidden, bias=False) if projects else nn.Identity()
        )
        self.project.glorot = True  # type: ignore[assignment]
        self.norm = nn.LayerNorm(settings.hidden, NORM_EPS, bias=False)
        self.dropout = nn.Dropout(settings.dropout)
        self.layers = nn.ModuleList(Layer(settings, number) for number in range(settings.layers))
        self.final_norm = nn.LayerNorm(settings.hidden, NORM_EPS, bias=False)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"],
        segments: Int[Tensor, "batch seq"],
        is_real: Bool[Tensor, "batch seq"] | None,
        first_only: bool = False,
    ) -> Float[Tensor, "batch kept hidden"]:
        """`is_real` may be None where no row is padded: attention over the whole row is faster without a mask.
        `first_only` gives the first token's vector alone, the same as in the whole (without dropout)."""
        length, reach = ids.shape[1], self.settings.window // 2
        positions = torch.arange(length, device=ids.device)
        everywhere = attention_mask(length, is_real, self.direction, ids.device)
        nearby = everywhere if length <= reach + 1 else nearby_mask(everywhere, length, reach, ids.device)
        dropout = self.settings.attention_dropout if self.training else 0.0

        def mix(query: Tensor, key: Tensor, value: Tensor, is_local: bool) -> Tensor:
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            mask = nearby if is_local else everywhere
            mask = None if mask is None else mask[:, :, : q.shape[2]]
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).transpose(1, 2)

        return self.encode(ids, positions, mix, first_only)

    def encode_packed(
        self, ids: Int[Tensor, "tokens"], starts: Int[Tensor, "rows_and_one"], longest: int
    ) -> Float[Tensor, "tokens hidden"]:
        """Rows end to end: row i is ids[starts[i]:starts[i + 1]], so `starts` begins with 0 and ends with the number of
        tokens; `longest` is the length of the longest row, or more. Equals `forward` on the padded rows.

        On CUDA in half precision torch's variable-length kernel does it, without asking the device for anything. That
        kernel has no dropout; with attention_dropout in training, and everywhere else, rows are mixed one by one."""
        assert self.direction == "both", "packed rows are read from both sides"
        places = torch.arange(len(ids), device=ids.device)
        row = torch.searchsorted(starts, places, right=True) - 1
        reach = self.settings.window // 2
        dropout = self.settings.attention_dropout if self.training else 0.0

        def mix(query: Tensor, key: Tensor, value: Tensor, is_local: bool) -> Tensor:
            parts = query[0], key[0], value[0]
            limit = reach if is_local else -1
            if not dropout and has_varlen(query.device, query.dtype, is_local):
                return mix_varlen(*parts, starts, longest, limit)[None]
            return mix_row_by_row(*parts, starts.tolist(), limit, dropout)[None]

        return self.encode(ids[None], places - starts[row], mix)[0]

    def encode(
        self, ids: Int[Tensor, "batch seq"], positions: Int[Tensor, "seq"], mix: Mix, first_only: bool = False
    ) -> Float[Tensor, "batch kept hidden"]:
        settings = self.settings
        size = settings.hidden // settings.heads
        whole = rotation(positions, size, settings.global_theta)
        near = rotation(positions, size, settings.local_theta)
        x = self.dropout(self.norm(self.project(self.embeddings(ids))))
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x = layer(x, near if layer.is_local else whole, mix, first_only and number == last)
        return self.final_norm(x)


def initialise(module: nn.Module, settings: ModernBertSettings, seed: int) -> None:
    """Weights as a function of the seed: normal with deviation 0.02, cut at two deviations; 0.02 / sqrt(2 layers) for
    the two products of a layer whose results are added up (they carry `adds = True`). The embedding projection
    (`glorot = True`) keeps the words' size: at 0.02 they would vanish beside the norm's epsilon."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        match part:
            case nn.Linear() if getattr(part, "glorot", False):
                nn.init.xavier_uniform_(part.weight, generator=generator)
            case nn.Linear() | nn.Embedding():
                share = 1 / math.sqrt(2 * settings.layers) if getattr(part, "adds", False) else 1.0
                deviation = DEVIATION * share
                cut = 2 * deviation
                nn.init.trunc_normal_(part.weight, std=deviation, a=-cut, b=cut, generator=generator)
            case nn.LayerNorm():
                nn.init.ones_(part.weight)
        if isinstance(part, nn.Linear | nn.LayerNorm) and part.bias is not None:
            nn.init.zeros_(part.bias)
