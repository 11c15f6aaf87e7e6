"""What stands on top of an encoder: the generator's distribution over tokens, the discriminator's logit."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from electra.model.electra import LAYER_NORM_EPS, EncoderSettings


class TokenHead(nn.Module):
    """p_G(x_t | x) ∝ exp(e(x_t)ᵀ h(x)_t): dense to the embedding size, GELU, LayerNorm, then the word table (passed in,
    because it belongs to the embeddings) and a bias of its own."""

    def __init__(
        self,
        hidden: int,
        embedding: int,
        vocab_size: int,
        eps: float = LAYER_NORM_EPS,
        has_biases: bool = True,
    ):
        super().__init__()
        self.dense = nn.Linear(hidden, embedding, bias=has_biases)
        self.norm = nn.LayerNorm(embedding, eps, bias=has_biases)
        self.bias = nn.Parameter(Tensor(vocab_size).zero_())

    def states(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows embedding"]:
        return self.norm(F.gelu(self.dense(hidden)))

    def forward(
        self, hidden: Float[Tensor, "*rows hidden"], words: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "*rows vocab"]:
        return F.linear(self.states(hidden), words, self.bias)


class DetectionHead(nn.Module):
    """The logit of "this token was replaced": dense, GELU, one output. D in the paper is the probability of "original",
    that is sigmoid(-logit); the code, like the original's, speaks of "replaced" as the positive class."""

    def __init__(self, settings: EncoderSettings):
        super().__init__()
        self.dense = nn.Linear(settings.hidden, settings.hidden)
        self.output = nn.Linear(settings.hidden, 1)
        self.output.glorot = True  # type: ignore[assignment]

    def forward(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows"]:
        return self.output(F.gelu(self.dense(hidden))).squeeze(-1)


class CandidateHead(nn.Module):
    """A score for each of a few candidate tokens: e(c)ᵀ f(h), f as in TokenHead, over any encoder."""

    def __init__(self, hidden: int, embedding: int):
        super().__init__()
        self.dense = nn.Linear(hidden, embedding)
        self.norm = nn.LayerNorm(embedding, eps=LAYER_NORM_EPS)

    def forward(
        self,
        hidden: Float[Tensor, "*rows hidden"],
        candidates: Int[Tensor, "*rows candidates"],
        words: Float[Tensor, "vocab embedding"],
    ) -> Float[Tensor, "*rows candidates"]:
        states = self.norm(F.gelu(self.dense(hidden)))
        return (F.embedding(candidates, words) @ states[..., None]).squeeze(-1)
