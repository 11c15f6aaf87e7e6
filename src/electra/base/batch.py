"""Batch: what data hands to objectives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TENSORS = ("ids", "segments", "is_real", "samples")


@dataclass(frozen=True)
class SpecialIds:
    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class Batch:
    """Rows of token ids. `samples` is each row's place in the run's endless order: together with `seed` it is the key
    to all randomness about that row. `padded` is known when the batch is built, so that nobody has to ask a device.
    `progress` is the share of the run that is done, for what changes in its course; 1 outside of training. A step that is
    compiled or recorded has it as a tensor: a number would be frozen into it."""

    ids: Int[Tensor, "batch seq"]
    segments: Int[Tensor, "batch seq"]
    is_real: Bool[Tensor, "batch seq"]
    samples: Int[Tensor, "batch"]
    seed: int
    padded: bool
    progress: float | Float[Tensor, ""] = 1.0

    def with_ids(self, ids: Int[Tensor, "batch seq"]) -> "Batch":
        return replace(self, ids=ids)

    def to(self, device: torch.device | str) -> "Batch":
        """What lies there already is not copied, also where "cuda" stands for "cuda:0"."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """In memory from which a GPU copies while the host goes on."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in TENSORS}
        return replace(self, **changed)

    def split(self, parts: int) -> list["Batch"]:
        """Consecutive parts of equal size. Randomness belongs to samples, so a part is corrupted as in the whole."""
        if parts == 1:
            return [self]
        pieces = zip(*(getattr(self, name).chunk(parts) for name in TENSORS), strict=True)
        return [replace(self, **dict(zip(TENSORS, piece, strict=True))) for piece in pieces]
