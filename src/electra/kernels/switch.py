"""Whether kernels can and may be used (each kernel's `available` asks here first), and what their device is like."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

_wanted = True


@torch.compiler.assume_constant_result
def wanted(device: torch.device) -> bool:
    return _wanted and device.type == "cuda" and not trouble(device)


@lru_cache
def trouble(device: torch.device) -> str:
    """Why there can be no kernels on this CUDA device; empty where there can. Asked once, by building the smallest one."""
    if not HAS_TRITON:
        return "Triton is not installed (pip install triton)"
    try:
        from electra.kernels.trial_triton import mark

        mark[(1,)](torch.zeros(1, device=device))
    except Exception as error:  # whatever compilers and drivers come up with
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        return f"Triton cannot build kernels, for which it needs a C compiler and Python's headers ({reason})"
    return ""


@contextmanager
def reference_only() -> Iterator[None]:
    """Plain torch instead of kernels: the slow path that everything is compared with."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before


@lru_cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def is_roomy(device: torch.device, needed: int = 160_000) -> bool:
    """Whether a program can have that many bytes of shared memory: 160,000 on A100, 200,000 on H100 and above; gamers'
    cards have less."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= needed  # type: ignore[attr-defined]
