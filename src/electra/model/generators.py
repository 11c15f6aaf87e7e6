"""The generators. A generator maps a Batch and positions to logits over the vocabulary at those positions.

The two-tower and the autoregressive generator never see the position they predict, so they read the text as it is, without
[MASK], and learn from all of it. `learns` says whether a generator is trained.
"""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.config import Settings
from electra.model import (
    Encoder,
    EncoderSettings,
    build_embeddings,
    build_encoder,
    build_token_head,
    encode,
    gather_rows,
)
from electra.model.heads import Filled, TokenHead, masked_head

Kind = Literal["transformer", "uniform", "unigram", "two_tower", "autoregressive", "frozen"]


class GeneratorSettings(Settings):
    """`width` scales hidden, intermediate and heads; `depth` the layers.

    `kind`: "transformer" is the paper's masked language model; "uniform" draws every token equally often, "unigram" by corpus
    frequency; "two_tower" reads from the left and from the right and scores every position in one pass;
    "autoregressive" reads from the left only; "frozen" is a transformer from an earlier run (`source`) that is not trained further.

    `sharing`: "none"; "tied" shares the embeddings (word, position, type and their LayerNorm); "gdes" lets the
    discriminator read the generator's word table without sending it gradients; "all" makes generator and discriminator one
    encoder with two heads, which needs width = depth = 1.

    `start`: initial weights in a run that starts from another's: "auto" takes the generator saved beside those, or random weights
    if there is none; "fresh" random weights; "discriminator" the first layers of the discriminator, for width = 1."""

    kind: Kind = "transformer"
    width: float = Field(0.25, gt=0, le=1)
    depth: float = Field(1.0, gt=0, le=1)
    sharing: Literal["none", "tied", "gdes", "all"] = "tied"
    source: str = ""
    start: Literal["auto", "fresh", "discriminator"] = "auto"

    def contradictions(self) -> Iterator[str]:
        """Yields what is wrong with these settings, each with its remedy."""
        if self.sharing == "all":
            if (self.width, self.depth) != (1, 1):
                yield 'generator.sharing = "all" needs generator.width=1 and generator.depth=1'
            if self.kind not in ("transformer", "frozen"):  # of a frozen one, below
                one = "makes generator and discriminator one network"
                yield f'generator.sharing = "all" {one}, which generator.kind={self.kind} cannot be. Use generator.sharing=tied'
        if self.kind == "frozen":
            if not self.source:
                first = "Train it first (electra pretrain masked-lm data=… run=runs/masked-lm)"
                then = "then give generator.source=runs/masked-lm"
                yield f'generator.kind = "frozen" needs the run it comes from. {first}, {then}'
            if self.sharing in ("tied", "all"):
                yield f'a frozen generator cannot share weights that learn: generator.sharing={self.sharing}. Use "none" or "gdes"'
        elif self.source:
            yield f'generator.source is only for generator.kind = "frozen" (this one is {self.kind})'
        if self.start == "discriminator" and (self.width != 1 or self.kind != "transformer" or self.sharing == "all"):
            first = "takes the first layers of the discriminator as they are"
            yield f"generator.start=discriminator {first}: give generator.width=1 (generator.depth may be less)"
        if self.sharing == "gdes" and self.kind in ("uniform", "unigram"):
            yield f"generator.kind={self.kind} has no embeddings to share. Use generator.sharing=none"


class TransformerGenerator(nn.Module):
    """p_G(x_t | x^masked), at the chosen positions only."""

    def __init__(self, encoder: Encoder, head: TokenHead, learns: bool = True):
        super().__init__()
        self.encoder, self.head, self.learns = encoder, head, learns
        if not learns:
            self.requires_grad_(False)

    def train(self, mode: bool = True) -> "TransformerGenerator":
        """Like nn.Module.train, but a generator that does not learn stays in eval mode, without dropout."""
        return super().train(mode and self.learns)

    def states(self, batch: Batch, positions: Int[Tensor, "batch count"]) -> Float[Tensor, "batch count hidden"]:
        return gather_rows(encode(self.encoder, batch), positions)

    def logits(self, states: Float[Tensor, "batch count hidden"]) -> Float[Tensor, "batch count vocab"]:
        return self.head(states, self.encoder)

    def forward(self, batch: Batch, positions: Int[Tensor, "batch count"]) -> Float[Tensor, "batch count vocab"]:
        return self.logits(self.states(batch, positions))

    def fill(
        self,
        batch: Batch,
        positions: Int[Tensor, "batch count"],
        targets: Int[Tensor, "batch count"],
        noise: Float[Tensor, "slots 2"],
        temperature: float | Float[Tensor, ""],
        forbid_target: bool,
    ) -> Filled:
        """Log-likelihoods and samples in one pass, for `slots` = batch * count positions, without returning logits."""
        states = self.head.states(self.states(batch, positions), self.encoder).flatten(0, 1)
        table, bias = self.encoder.embeddings.table, self.head.bias
        return masked_head(states, table, bias, targets.flatten(), noise, temperature, forbid_target)


class TableGenerator(nn.Module):
    """The same distribution at every position: log p = `scores` up to a constant (unigram: log(1 + count)). The scores are saved
    with the weights, so that loading a checkpoint does not need the corpus."""

    learns = False

    def __init__(self, scores: Float[Tensor, "vocab"]):
        super().__init__()
        self.scores = nn.Parameter(scores, requires_grad=False)

    def forward(self, batch: Batch, positions: Int[Tensor, "batch count"]) -> Float[Tensor, "batch count vocab"]:
        return self.scores.expand(*positions.shape, -1)


class TwoTowerGenerator(nn.Module):
    """q(x_t | x_<t, x_>t): one tower reads from the left, shifted by one, the other from the right, shifted by one the other
    way; dense, GELU, LayerNorm and the word table on top of both (Clark et al., 2020b)."""

    learns = True

    def __init__(self, left: Encoder, right: Encoder, head: TokenHead):
        super().__init__()
        self.left, self.right, self.head = left, right, head

    def forward(self, batch: Batch, positions: Int[Tensor, "batch count"]) -> Float[Tensor, "batch count vocab"]:
        before = F.pad(encode(self.left, batch)[:, :-1], (0, 0, 1, 0))
        right = encode(self.right, batch)
        if batch.padded:  # zeros follow the last real token, as in a row without padding
            right = right * batch.is_real[:, :, None]
        after = F.pad(right[:, 1:], (0, 0, 0, 1))
        both = gather_rows(torch.cat([before, after], dim=2), positions)
        return self.head(both, self.left)


class AutoregressiveGenerator(nn.Module):
    """p_G(x_t | x_<t)."""

    learns = True

    def __init__(self, encoder: Encoder, head: TokenHead):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, batch: Batch, positions: Int[Tensor, "batch count"]) -> Float[Tensor, "batch count vocab"]:
        before = F.pad(encode(self.encoder, batch)[:, :-1], (0, 0, 1, 0))
        return self.head(gather_rows(before, positions), self.encoder)


Generator = TransformerGenerator | TableGenerator | TwoTowerGenerator | AutoregressiveGenerator


def build_pair(
    settings: EncoderSettings, generator: GeneratorSettings, vocab_size: int, token_counts: Float[Tensor, "vocab"]
) -> tuple[Encoder, Generator]:
    """The discriminator and its generator, which share weights as `generator.sharing` says."""
    small = settings.scaled(generator.width, generator.depth)
    own = build_embeddings(settings, vocab_size)
    theirs = own if generator.sharing in ("tied", "all") else build_embeddings(small, vocab_size)
    embeddings = build_embeddings(settings, vocab_size, theirs) if generator.sharing == "gdes" else own
    discriminator = build_encoder(settings, embeddings)
    head = build_token_head(small, vocab_size)
    match generator.kind:
        case "transformer" | "frozen":
            encoder = discriminator if generator.sharing == "all" else build_encoder(small, theirs)
            return discriminator, TransformerGenerator(encoder, head, learns=generator.kind == "transformer")
        case "uniform":
            return discriminator, TableGenerator(torch.zeros(vocab_size))
        case "unigram":
            return discriminator, TableGenerator(token_counts.float().log1p())
        case "two_tower":
            towers = build_encoder(small, theirs, "left"), build_encoder(small, theirs, "right")
            return discriminator, TwoTowerGenerator(*towers, build_token_head(small, vocab_size, towers=2))
        case "autoregressive":
            return discriminator, AutoregressiveGenerator(build_encoder(small, theirs, "left"), head)
