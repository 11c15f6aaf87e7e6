"""Device, precision and compiler of a run, and readable errors when the machine runs out of memory or disk or its GPU fails."""

import ctypes
import gc
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from electra import kernels as switch
from electra.base.batch import Batch
from electra.base.errors import MachineError, MemoryExhaustedError, first_line

log = logging.getLogger(__name__)
Fast = Literal["auto", "on", "off"]
Precision = Literal["auto", "float32", "bfloat16"]

SPACE_FACTOR = 2.2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h

# What torch, its allocators and CUDA's libraries say when memory is short, beside torch.OutOfMemoryError.
MEMORY_SIGNS = ("allocate memory", "out of memory", "STATUS_ALLOC_FAILED")


class Placement(Protocol):
    """Settings that choose the device and the precision."""

    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> str: ...


def choose_device(settings: Placement) -> torch.device:
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError("device cuda was asked for, but torch sees no CUDA device. Use auto or cpu.")
    if settings.precision == "bfloat16" and not has_bfloat16():
        name = torch.cuda.get_device_name()
        raise MachineError(f"precision bfloat16 was asked for, but {name} has none. Use auto or float32.")
    return torch.device("cuda")


def thread_share(workers: int) -> Callable[[], None]:
    """A function for each worker to call when it starts, which gives it its part of this process's threads. With all of
    them each, the workers would wait for each other."""
    return partial(torch.set_num_threads, max(1, torch.get_num_threads() // workers))


def gpu_names(device: str = "auto") -> list[str]:
    """The GPUs of a machine that has several, as CUDA_VISIBLE_DEVICES names them; empty with fewer than two or if `device` is cpu."""
    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return names[:count] if count > 1 else []


def free_memory() -> None:
    """Free networks and graphs that are held only by cycles, and the memory that torch caches, which another process may need."""
    gc.collect()
    torch.cuda.empty_cache()


def keep_freed_memory() -> None:
    """On a CPU, keep what a step frees for the next one. The C library would return it to the kernel, which then has to fill every page
    with zeros again: a fifth of a small network's step. Only glibc has these options; the second without the first does harm."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt and mallopt(M_MMAP_THRESHOLD, 1 << 25):
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def has_bfloat16() -> bool:
    """Whether the GPU has bfloat16 in hardware; emulated, it is slower than float32."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def machine() -> dict[str, Any]:
    """The hardware, for environment.json."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"platform": platform.platform(), "torch_threads": torch.get_num_threads(), "gpu": gpu}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """A context for the precision; "auto" is bfloat16 on GPUs that have it, float32 elsewhere."""
    wanted = precision == "bfloat16" or (precision == "auto" and device.type == "cuda" and has_bfloat16())
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def kernels(enabled: bool) -> AbstractContextManager[None]:
    """A context for everything that is computed: plain torch if our kernels are not enabled."""
    return nullcontext() if enabled else switch.reference_only()


@contextmanager
def inference(precision: Precision, device: torch.device, with_kernels: bool) -> Iterator[None]:
    """A context that computes as an update does, but without gradients."""
    with torch.no_grad(), autocast(precision, device), kernels(with_kernels):
        yield


@contextmanager
def sound_attention(batch: Batch) -> Iterator[None]:
    """Switch off cuDNN's attention where its gradient cannot be trusted. On Hopper, where torch prefers it from 2.11 on,
    gradients are NaN once all scores of a query are below -88, with 64, 192, 320, … keys (pytorch#196678) or a single
    query (cudnn-frontend#1072). Such scores are legitimate: a constant added to all scores of a query changes nothing."""
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    is_sound = not batch.padded and batch.ids.shape[1] % 128 != 64
    is_sound &= not batch.targets  # in fine-tuning, a head that reads only [CLS] leaves its last layer a single query
    torch.backends.cuda.enable_cudnn_sdp(before and is_sound)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def choose_backend(fast: Fast, device: torch.device) -> str | None:
    """torch.compile's backend for the step; None to leave it uncompiled. `log_shortcomings` logs what a GPU's machine lacks for it."""
    if fast == "off" or (fast == "auto" and device.type != "cuda"):
        return None
    missing = switch.trouble(device) if device.type == "cuda" else "there is no CUDA device to compile for"
    if missing and fast == "on":
        raise MachineError(f"train.fast=on, but {missing}. Use train.fast=auto.")
    return None if missing else "inductor"


def log_shortcomings(precision: Precision, device: torch.device) -> None:
    """Log what makes this GPU slower than it could be."""
    if device.type != "cuda":
        return
    if missing := switch.trouble(device):
        log.info("%s, so everything is slower.", missing)
    if precision == "auto" and not has_bfloat16():
        log.info("%s has no bfloat16, so everything is in float32 (slower).", torch.cuda.get_device_name())


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Set torch's own switch only while the run lasts: other work in the same process may want it otherwise."""
    before = torch.are_deterministic_algorithms_enabled()
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_space(folder: Path, checkpoint_bytes: int) -> None:
    needed, free = int(SPACE_FACTOR * checkpoint_bytes), shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"too little space at {folder}: checkpoints need {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free. "
            "Free some space or choose another run folder."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, also where a compiler or the end of a capture wraps the original error."""
    if isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in MEMORY_SIGNS):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and is_out_of_memory(cause)


@contextmanager
def explain_machine(memory_remedy: str, failure_remedy: str) -> Iterator[None]:
    """Turn two kinds of errors into one line with a remedy: out of memory, on the GPU or the host, and a failing GPU (an
    assertion in a kernel, a lost device, a broken driver)."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the host's allocator raises a plain one
        if is_out_of_memory(error):
            raise MemoryExhaustedError(f"out of memory. {memory_remedy}") from None
        reason = first_line(error)
        if reason.lower().startswith(("cuda", "cudnn", "cublas", "triton error")):
            raise MachineError(f"the GPU failed: {reason.rstrip('.')}. {failure_remedy}") from error
        raise
