"""Triton's interpreter, made right where it is wrong."""

import os

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def bfloat16_is_a_number(monkeypatch):
    """Triton's interpreter multiplies matrices of bfloat16 as if their bits were integers."""
    if INTERPRETED:
        import triton.language as tl
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        multiply = InterpreterBuilder.create_dot

        def widen(handle):
            if handle.dtype.scalar.name != "bf16":
                return handle
            return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

        monkeypatch.setattr(
            InterpreterBuilder, "create_dot", lambda self, a, b, *rest: multiply(self, widen(a), widen(b), *rest)
        )
