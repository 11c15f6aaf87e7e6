"""The encoder of ModernBERT (Warner et al., 2024): pre-norm, rotary positions, GeGLU, no biases, and attention that is
local in most layers. Loads as transformers' ModernBertModel (interop/formats.py).

Differences from ModernBERT: the word table may have another width than the layers, with a projection between them, so
that generator and discriminator can share it (attention may also be one-sided, for generators). The projection comes
before the first norm, directly after the table: both are linear in the word, so their product is a table like ModernBERT's
own, and exports are exact. Segments are not read.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from electra.base.config import Settings
from electra.kernels import usable
from electra.model.electra import Direction, Rows, WordEmbeddings, attention_mask, pad, unpad, unpadding
from electra.model.heads import in_float32
from electra.model.linear import Linear

NORM_EPS = 1e-5
FUSED_SIZES = 32, 64  # units per head that our attention kernel supports


class ModernEncoderSettings(Settings):
    """Every `global_every`-th layer, counting from the first or the last one inclusive (`global_from`), attends to the whole row;
    the others to `window` tokens, half of them on either side. `positions` is only the longest row allowed: rotary positions
    need no table. `dropout` applies to embeddings and between the feed-forward products, `attention_dropout` to attention weights
    and to attention's output. `token_head`: a generator's head ends at the width of the words ("narrow", as in ELECTRA), or at that
    of the layers and returns to the words through the transposed projection ("tied", which is ModernBERT's at every width)."""

    kind: Literal["modernbert"] = "modernbert"
    layers: int = Field(12, ge=1, le=1000)
    hidden: int = Field(256, ge=2, le=65_536)
    heads: int = Field(4, ge=1, le=65_536)
    intermediate: int = Field(384, ge=1, le=1_000_000)
    embedding: int = Field(256, ge=1, le=65_536)
    positions: int = Field(512, ge=2, le=1_000_000)
    dropout: float = Field(0.0, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    window: int = Field(128, ge=2, le=1_000_000)
    global_every: int = Field(3, ge=1)
    global_from: Literal["first", "last"] = "first"
    global_theta: float = Field(160_000.0, gt=0)
    local_theta: float = Field(10_000.0, gt=0)
    token_head: Literal["narrow", "tied"] = "narrow"

    @model_validator(mode="after")
    def sizes_divide(self) -> "ModernEncoderSettings":
        if self.hidden % (2 * self.heads):
            why = f"must be an even multiple of heads ({self.heads}): rotary positions rotate pairs of units"
            raise ValueError(f"hidden ({self.hidden}) {why}")
        if self.window % 2:
            why = f"half of it lies on either side. Use {self.window - 1}, which has the same effect"
            raise ValueError(f"window ({self.window}) must be an even number: {why}")
        return self

    def scaled(self, width: float, depth: float) -> "ModernEncoderSettings":
        """The generator's sizes: hidden, intermediate and heads times `width`, layers times `depth`; hidden is rounded to the
        nearest even multiple of heads. The embedding size stays the same, because the table may be shared."""
        heads, layers = max(1, round(self.heads * width)), max(1, round(self.layers * depth))
        hidden = 2 * heads * max(1, round(self.hidden * width / (2 * heads)))
        intermediate = max(1, round(self.intermediate * width))
        return self.model_copy(
            update={"hidden": hidden, "intermediate": intermediate, "heads": heads, "layers": layers}
        )

    def is_local(self, layer: int) -> bool:
        distance = layer if self.global_from == "first" else self.layers - 1 - layer
        return distance % self.global_every != 0


Rotation = tuple[Float[Tensor, "width 1 size"], Float[Tensor, "width 1 size"]]


def nearby_mask(
    attend: Bool[Tensor, "#batch 1 #query length"] | None, length: int, reach: int, device: torch.device
) -> Bool[Tensor, "#batch 1 #query length"] | None:
    """The attention mask of a local layer: tokens attend to those at most `reach` apart. A padding token still attends to itself,
    because a softmax over nothing is nan in some kernels."""
    if not torch.compiler.is_exporting() and length <= reach + 1:
        return attend
    positions = torch.arange(length, device=device)
    near = ((positions[:, None] - positions[None, :]).abs() <= reach)[None, None]
    return near if attend is None else (near & attend) | torch.eye(length, dtype=torch.bool, device=device)


def rotation(positions: Int[Tensor, "width"], size: int, theta: float, dtype: torch.dtype = torch.float) -> Rotation:
    """cos and sin of position * theta^(-2i / size) for the pairs of units (i, i + size / 2). Half precision is too coarse a
    `dtype` for angles."""
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=dtype) / size
    angles = positions[:, None, None].to(dtype) * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "batch width heads size"], by: Rotation) -> Float[Tensor, "batch width heads size"]:
    cos, sin = by
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class ModernLayer(nn.Module):
    """x -> x + attention(LN(x)) -> x + GeGLU(LN(x)). The first layer has no LN before attention: the embeddings end
    with one."""

    def __init__(self, settings: ModernEncoderSettings, number: int):
        super().__init__()
        hidden = settings.hidden
        self.heads = settings.heads
        self.is_local = settings.is_local(number)
        self.attention_norm = nn.LayerNorm(hidden, NORM_EPS, bias=False) if number else nn.Identity()
        self.query_key_value = Linear(hidden, 3 * hidden, bias=False, stacked=3)
        self.attention_output = Linear(hidden, hidden, bias=False, start="residual")
        self.feed_forward_norm = nn.LayerNorm(hidden, NORM_EPS, bias=False)
        self.expand = Linear(hidden, 2 * settings.intermediate, bias=False, stacked=2)
        self.contract = Linear(settings.intermediate, hidden, bias=False, start="residual")
        self.dropout = nn.Dropout(settings.dropout)
        self.attention_dropout = nn.Dropout(settings.attention_dropout)

    def weights(self) -> list[Tensor]:
        """The weights of its products, in the order that `fused_modern_layers` expects."""
        return [part.weight for part in (self.query_key_value, self.attention_output, self.expand, self.contract)]

    def norm_weights(self) -> list[Tensor]:
        return [n.weight for n in (self.attention_norm, self.feed_forward_norm) if isinstance(n, nn.LayerNorm)]

    def forward(
        self,
        x: Float[Tensor, "batch seq hidden"],
        by: Rotation,
        attend: Bool[Tensor, "#rows 1 #query width"] | None,
        first_only: bool = False,
        rows: Rows = None,
    ) -> Float[Tensor, "batch kept hidden"]:
        """The layer's output. `first_only`, as in ElectraLayer: only the first token's vector, which still attends to all tokens."""
        projected = pad(self.query_key_value(self.attention_norm(x)), rows)
        batch, seq, _ = projected.shape
        kept = 1 if first_only else seq
        query, key, value = projected.view(batch, seq, 3, self.heads, -1).unbind(2)
        parts = rotate(query, by)[:, :kept], rotate(key, by), value
        query, key, value = (part.transpose(1, 2) for part in parts)
        attend = None if attend is None else attend[:, :, :kept]
        dropout = self.attention_dropout.p if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attend, dropout_p=dropout)
        out = self.attention_output(unpad(out.transpose(1, 2).flatten(2), rows))
        x = (x[:, :1] if first_only else x) + self.attention_dropout(out)
        value, gate = self.expand(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.contract(self.dropout(F.gelu(value) * gate))


class ModernEncoder(nn.Module):
    """Token ids in, one vector per token out, like ElectraEncoder. The embeddings are an argument."""

    def __init__(self, settings: ModernEncoderSettings, embeddings: WordEmbeddings, direction: Direction = "both"):
        super().__init__()
        self.settings = settings
        self.embeddings = embeddings
        self.direction: Direction = direction
        projects = settings.embedding != settings.hidden
        project = Linear(settings.embedding, settings.hidden, bias=False, start="glorot") if projects else nn.Identity()
        self.project = project
        self.norm = nn.LayerNorm(settings.hidden, NORM_EPS, bias=False)
        self.dropout = nn.Dropout(settings.dropout)
        self.layers = nn.ModuleList(ModernLayer(settings, number) for number in range(settings.layers))
        self.final_norm = nn.LayerNorm(settings.hidden, NORM_EPS, bias=False)

    def forward(
        self,
        ids: Int[Tensor, "batch seq"],
        segments: Int[Tensor, "batch seq"],
        is_real: Bool[Tensor, "batch seq"] | None,
        first_only: bool = False,
    ) -> Float[Tensor, "batch kept hidden"]:
        """One vector per token. `is_real` may be None if no row is padded: attention over the whole row is faster without a mask.
        `first_only` returns only the first token's vector, with the same values as in the full output (without dropout)."""
        settings, length = self.settings, ids.shape[1]
        positions, size = torch.arange(length, device=ids.device), settings.hidden // settings.heads
        everywhere = attention_mask(length, is_real, self.direction, ids.device)
        nearby = nearby_mask(everywhere, length, settings.window // 2, ids.device)
        wide = torch.promote_types(self.norm.weight.dtype, torch.float)
        whole = rotation(positions, size, settings.global_theta, wide)
        near = rotation(positions, size, settings.local_theta, wide)
        x = self.dropout(self.norm(self.projected(self.embeddings(ids, segments))))
        *most, last = self.layers
        if self.direction == "both" and usable(x) and self.holds(size):
            if not first_only:
                return self.fused(x, is_real, len(self.layers), (whole, near))
            x = self.fused(x, is_real, len(most), (whole, near))
        else:
            rows = unpadding(self, is_real)
            x = unpad(x, rows)
            for layer in most:
                by, attend = (near, nearby) if layer.is_local else (whole, everywhere)
                x = layer(x, by, attend, rows=rows)
            x = pad(x, rows)
        by, attend = (near, nearby) if last.is_local else (whole, everywhere)
        return self.final_norm(last(x, by, attend, first_only))

    def projected(self, words: Float[Tensor, "batch seq embedding"]) -> Float[Tensor, "batch seq hidden"]:
        """Projects words to the width of the layers. On the CPU in float32 also under autocast: norms and sums keep their input's
        precision there, so the whole residual stream would be in half precision. CUDA's norms return float32 themselves."""
        if isinstance(self.project, nn.Linear) and words.device.type == "cpu":
            return in_float32(self.project, words)
        return self.project(words)

    def holds(self, size: int) -> bool:
        """Whether our kernels support heads of this size. They have no dropout."""
        drops = self.training and max(self.settings.dropout, self.settings.attention_dropout) > 0
        return size in FUSED_SIZES and not drops

    def fused(
        self, x: Float[Tensor, "batch seq hidden"], is_real: Bool[Tensor, "batch seq"] | None, count: int,
        by: tuple[Rotation, Rotation],
    ) -> Float[Tensor, "batch seq hidden"]:  # fmt: skip
        """Runs the first `count` layers in kernels/layer, and the final norm if they are all the layers."""
        from electra.kernels.layer.modern import fused_modern_layers

        layers = [layer for layer in self.layers[:count] if isinstance(layer, ModernLayer)]
        weights = [weight for layer in layers for weight in layer.weights()]
        norms = [weight for layer in layers for weight in layer.norm_weights()]
        if count == len(self.layers):
            norms.append(self.final_norm.weight)
        half = by[0][0].shape[2] // 2
        angles = torch.stack([torch.stack(turn)[:, :, 0, :half] for turn in by])
        reaches = [self.settings.window // 2 if layer.is_local else 0 for layer in layers]
        return fused_modern_layers(x, is_real, weights, norms, angles, self.settings.heads, reaches, NORM_EPS)


class LabelHead(nn.Module):
    """Logits of labels, for a token or for a row, in the form that all of transformers' ModernBert classes with labels
    share: dense, GELU, norm, dropout, output. After a norm the output layer is not drawn from Glorot's distribution, as ELECTRA's
    is: logits would start with a deviation of one, and their loss is multiplied by fifty."""

    def __init__(self, settings: ModernEncoderSettings, outputs: int):
        super().__init__()
        self.dense = Linear(settings.hidden, settings.hidden, bias=False)
        self.norm = nn.LayerNorm(settings.hidden, NORM_EPS, bias=False)
        self.dropout = nn.Dropout(settings.dropout)
        self.output = Linear(settings.hidden, outputs)

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows outputs"]:
        return in_float32(self.output, self.dropout(self.norm(F.gelu(self.dense(hidden)))))


class ModernDetectionHead(nn.Module):
    """Like ElectraDetectionHead, in the form of ModernBertForTokenClassification with one label."""

    def __init__(self, settings: ModernEncoderSettings):
        super().__init__()
        self.label = LabelHead(settings, 1)

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows"]:
        return self.label(hidden).squeeze(-1)
