"""Batch: what data hands to objectives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class SpecialIds:
    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class Batch:
    """Rows of token ids. `samples` is each row's place in the run's endless order: together with `seed` it determines
    all randomness about that row. `padded` is set when the batch is built, so that nobody has to read it from a device.
    `progress` is the fraction of the run that is done, for what changes during a run; 1 outside of training. A step that is
    compiled or captured has it as a tensor: a number would be frozen into it. `targets` are what fine-tuning learns, by
    the names that its task gives them; empty in pre-training, which learns from the text itself. If one network learns
    several tasks, `task` is the number of this one."""

    ids: Int[Tensor, "batch seq"]
    segments: Int[Tensor, "batch seq"]
    is_real: Bool[Tensor, "batch seq"]
    samples: Int[Tensor, "batch"]
    seed: int
    padded: bool
    progress: float | Float[Tensor, ""] = 1.0
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    task: int = 0

    @staticmethod
    def of_rows(
        ids: Int[Tensor, "batch seq"],
        segments: Int[Tensor, "batch seq"],
        is_real: Bool[Tensor, "batch seq"],
        targets: Mapping[str, Tensor] | None = None,
    ) -> "Batch":
        """A batch of rows, on the host, outside of a pre-training run: nothing about them is random."""
        samples, padded = torch.arange(len(ids)), not bool(is_real.all())
        return Batch(ids, segments, is_real, samples, 0, padded, targets=targets or {})

    def with_ids(self, ids: Int[Tensor, "batch seq"]) -> "Batch":
        return replace(self, ids=ids)

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on `device`. What is there already is not copied, also if "cuda" means "cuda:0". Only copies to the host block."""
        on_device = torch.device(device).type != "cpu"
        return self._each(lambda tensor: tensor.to(device, non_blocking=on_device))

    def pinned(self) -> "Batch":
        """The batch in pinned memory, from which copies to a GPU are asynchronous."""
        return self._each(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """All tensors with a row for each sequence."""
        return [self.ids, self.segments, self.is_real, self.samples, *self.targets.values()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Batch":
        """The inverse of `tensors`: the same batch from other tensors in the same order."""
        ids, segments, is_real, samples, *targets = tensors
        named = dict(zip(self.targets, targets, strict=True))
        return replace(self, ids=ids, segments=segments, is_real=is_real, samples=samples, targets=named)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return self.with_tensors([change(tensor) for tensor in self.tensors()])

    def split(self, parts: int) -> list["Batch"]:
        """Consecutive parts of equal size. Randomness belongs to samples, so a part is corrupted as in the whole batch."""
        if parts == 1:
            return [self]
        pieces = zip(*(tensor.chunk(parts) for tensor in self.tensors()), strict=True)
        return [self.with_tensors(piece) for piece in pieces]
