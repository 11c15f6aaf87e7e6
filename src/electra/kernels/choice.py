"""Whether kernels may be used at all. Each kernel's `available` asks here first."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

HAS_TRITON = importlib.util.find_spec("triton") is not None

_wanted = True


def wanted() -> bool:
    return _wanted and HAS_TRITON


@contextmanager
def reference_only() -> Iterator[None]:
    """Plain torch instead of kernels: the slow path that everything is compared with."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before
