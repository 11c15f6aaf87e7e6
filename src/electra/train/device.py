"""Where to compute and in what, and what a machine says when it runs out of memory, of disk or of luck."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from electra import kernels as switch
from electra.base.errors import MachineError, MemoryExhaustedError

Fast = Literal["auto", "on", "off"]

SPACE_FACTOR = 2.2

# What torch, its allocators and CUDA's libraries say when memory is short, beside torch.OutOfMemoryError.
MEMORY_SIGNS = (
    "allocate memory",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "[CUDA]: out of memory",
    "STATUS_ALLOC_FAILED",
)


class Placement(Protocol):
    """Settings that say where to compute, and in what."""

    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> str: ...


def choose_device(settings: Placement) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise MachineError("device cuda was asked for, but torch sees no CUDA device. Use auto or cpu.")
    cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if cuda and settings.precision == "bfloat16" and not has_bfloat16():
        name = torch.cuda.get_device_name()
        raise MachineError(f"precision bfloat16 was asked for, but {name} has none. Use auto or float32.")
    return torch.device("cuda" if cuda else "cpu")


def has_bfloat16() -> bool:
    """In hardware: an emulated one is slower than float32."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(settings: Placement, device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 on GPUs that have it, float32 elsewhere."""
    wanted = settings.precision == "bfloat16" or (
        settings.precision == "auto" and device.type == "cuda" and has_bfloat16()
    )
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def kernels(fast: Fast) -> AbstractContextManager[None]:
    """Around everything that is computed: "off" leaves no kernel of ours in it."""
    return switch.reference_only() if fast == "off" else nullcontext()


def choose_backend(fast: Fast, device: torch.device, say: Callable[[str], None]) -> str | None:
    """What compiles the step, or None where nothing can. On a GPU the reason is said."""
    if fast == "off" or (fast == "auto" and device.type != "cuda"):
        return None
    missing = switch.trouble(device) if device.type == "cuda" else "there is no CUDA device to compile for"
    if missing and fast == "on":
        raise MachineError(f"train.fast=on, but {missing}. Use train.fast=auto.")
    if remark := kernel_remark(device):
        say(remark)
        return None
    return "inductor"


def kernel_remark(device: torch.device) -> str | None:
    missing = switch.trouble(device) if device.type == "cuda" else ""
    return f"{missing}, so everything is slower." if missing else None


def precision_remark(settings: Placement, device: torch.device) -> str | None:
    """What somebody with such a GPU should know."""
    if device.type != "cuda" or settings.precision != "auto" or has_bfloat16():
        return None
    return f"{torch.cuda.get_device_name()} has no bfloat16, so everything is computed in float32 (slower)."


def check_space(folder: Path, checkpoint_bytes: int) -> None:
    needed, free = int(SPACE_FACTOR * checkpoint_bytes), shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"too little space at {folder}: checkpoints need {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free. "
            "Free some space or choose another run folder."
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
