"""Fast kernels for the GPU, each equal to a plain torch function in model/, and the switch: whether they can and may be used.

A function of model/ first asks `usable`, and only then imports its kernels (layer/, masked_head/), because they need Triton.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from electra.base.errors import first_line
from electra.base.randomness import constant_in_compiled_code

HAS_TRITON = importlib.util.find_spec("triton") is not None

_wanted = True


def usable(x: Tensor) -> bool:
    """Whether the kernels can compute with `x` and are faster: Triton, a CUDA device with tensor cores for bfloat16, and
    matrix products in half precision (tensor cores do not compute exact float32 products)."""
    return (
        wanted(x.device)
        and product_dtype(x) in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_properties(x.device).major >= 8
    )


def product_dtype(x: Tensor) -> torch.dtype:
    """The precision of a matrix product of `x`: autocast's where it is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def wanted(device: torch.device) -> bool:
    """Whether kernels are switched on and possible. The compiler sees the switch being read: what it compiled with kernels does
    not run where they are switched off."""
    return _wanted and device.type == "cuda" and can_build(device)


@constant_in_compiled_code
def can_build(device: torch.device) -> bool:
    return not trouble(device)


@lru_cache
def trouble(device: torch.device) -> str:
    """Why there can be no kernels on this CUDA device; empty if there can. Found out once, by building a small one."""
    if not HAS_TRITON:
        return "Triton is not installed (pip install triton)"
    try:
        from electra.kernels.layer.launch import sum_columns

        sum_columns(torch.zeros(1, 1, device=device))
    except Exception as error:  # compilers and drivers raise all kinds of errors
        reason = f"{type(error).__name__}: {first_line(str(error).strip())}"
        return f"Triton cannot build kernels, which requires a C compiler and Python's headers ({reason})"
    return ""


@contextmanager
def reference_only() -> Iterator[None]:
    """A context that uses plain torch instead of kernels: the slow reference that everything is compared with."""
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
def has_shared_memory(device: torch.device, needed: int = 160_000) -> bool:
    """Whether a program can have `needed` bytes of shared memory: 160,000 on A100, 200,000 on H100 and above; less on consumer GPUs."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= needed  # type: ignore[attr-defined]
