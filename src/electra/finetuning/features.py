"""Examples -> batches of like lengths.

Nothing is padded beyond its batch, and examples of a batch are alike in length, so little is padded at all: an epoch is
shuffled, cut into chunks of many batches, each chunk sorted by length and cut into batches, and the batches shuffled.
The order is a function of (seed, epoch) alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from electra.base.batch import Batch
from electra.base.randomness import mix, permute
from electra.finetuning import Example, Task

CHUNK_BATCHES = 64


def lengths_of(examples: Sequence[Example]) -> np.ndarray:
    return np.array([len(example.ids) for example in examples], np.int64)


def epoch_order(lengths: np.ndarray, batch: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The examples of each batch. Every example is in exactly one. The very first batch is one of the longest: what does
    not fit into memory fails at once, and nothing later needs more."""
    size = len(lengths)
    shuffled = permute(np.arange(size), size, mix(seed, "examples", epoch))
    batches: list[np.ndarray] = []
    for start in range(0, size, batch * CHUNK_BATCHES):
        chunk = shuffled[start : start + batch * CHUNK_BATCHES]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches += [chunk[first : first + batch] for first in range(0, len(chunk), batch)]
    order = permute(np.arange(len(batches)), len(batches), mix(seed, "batches", epoch))
    ordered = [batches[index] for index in order]
    if epoch == 0:
        widest = max(
            range(len(ordered)), key=lambda index: len(ordered[index]) * lengths[ordered[index]].max()
        )
        ordered[0], ordered[widest] = ordered[widest], ordered[0]
    return ordered


def sorted_order(lengths: np.ndarray, batch: int) -> list[np.ndarray]:
    """Longest first, for evaluation: what does not fit into memory fails at once."""
    order = np.argsort(-lengths, kind="stable")
    return [order[first : first + batch] for first in range(0, len(order), batch)]


def collate(task: Task, examples: Sequence[Example], pad: int, with_targets: bool) -> Batch:
    lengths = lengths_of(examples)
    width = int(lengths.max())
    ids = np.full((len(examples), width), pad, np.int64)
    segments = np.zeros((len(examples), width), np.int64)
    for index, example in enumerate(examples):
        ids[index, : lengths[index]] = example.ids
        segments[index, example.first : lengths[index]] = 1
    is_real = torch.from_numpy(np.arange(width) < lengths[:, None])
    targets = task.targets(examples, width) if with_targets else {}
    return Batch.of_rows(torch.from_numpy(ids), torch.from_numpy(segments), is_real, targets)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Through pinned memory on the GPU, so that the copy waits for nobody."""
    return batch if device.type == "cpu" else batch.pinned().to(device)


def training_batches(
    task: Task,
    examples: Sequence[Example],
    pad: int,
    batch: int,
    epochs: int,
    seed: int,
    device: torch.device,
) -> Iterator[Batch]:
    lengths = lengths_of(examples)
    for epoch in range(epochs):
        for chosen in epoch_order(lengths, batch, seed, epoch):
            part = [examples[index] for index in chosen]
            yield to_device(collate(task, part, pad, with_targets=True), device)
