"""The generator's sizes and how its weights relate to the discriminator's."""

from typing import Literal

from pydantic import Field

from electra.config import Settings


class GeneratorSettings(Settings):
    """`width` scales hidden, intermediate and heads; `depth` the layers. `sharing`: "none"; "tied" shares the
    embeddings (word, position, type and their LayerNorm); "all" makes generator and discriminator one encoder with two
    heads, which needs width = depth = 1."""

    width: float = Field(0.25, gt=0, le=1)
    depth: float = Field(1.0, gt=0, le=1)
    sharing: Literal["none", "tied", "all"] = "tied"
