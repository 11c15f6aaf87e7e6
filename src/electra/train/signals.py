"""What keeps a run safe from outside: room on the disk, signals that save."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from electra.base.errors import (
    MachineError,
    MemoryExhaustedError,
)

SPACE_FACTOR = 2.2


def check_space(folder: Path, checkpoint_bytes: int) -> None:
    needed, free = int(SPACE_FACTOR * checkpoint_bytes), shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"too little space at {folder}: checkpoints need {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free. "
            "Free some space or choose another run folder."
        )


# What torch, its allocators and CUDA's libraries say when memory is short, beside torch.OutOfMemoryError.
MEMORY_SIGNS = (
    "allocate memory",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "[CUDA]: out of memory",
    "STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Also where a compiler or the end of a recording wraps the error that began it."""
    found = isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in MEMORY_SIGNS)
    behind = error.__cause__ or error.__context__
    return found or (behind is not None and is_out_of_memory(behind))


@contextmanager
def explain_memory(remedy: str) -> Iterator[None]:
    """Out of memory, on the GPU or on the host, as one line with a way out."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the host's allocator raises a plain one
        if is_out_of_memory(error):
            raise MemoryExhaustedError(f"out of memory. {remedy}") from None
        raise


@contextmanager
def explain_device(rest: str) -> Iterator[None]:
    """What CUDA says when a GPU fails (an assertion in a kernel, a lost device, a broken driver), as one line. `rest`: what
    is saved, and what to do."""
    try:
        yield
    except RuntimeError as error:
        said = next(iter(str(error).splitlines()), "")
        if is_out_of_memory(error) or not said.lower().startswith(
            ("cuda", "cudnn", "cublas", "triton error")
        ):
            raise
        raise MachineError(f"the GPU failed: {said.rstrip('.')}. {rest}") from error
