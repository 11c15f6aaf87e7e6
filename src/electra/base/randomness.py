"""All randomness is a function of (seed, purpose, sample): nothing is drawn in sequence, so nothing has to be saved.

`mix` makes seeds from integers and names; `uniform` gives each (sample, slot) its own number on the tensor's device;
`permute` shuffles indices without holding the shuffled list. All three rest on the finaliser of splitmix64.
"""

import hashlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

Function = TypeVar("Function", bound=Callable[..., object])


def constant_in_compiled_code(function: Function) -> Function:
    """Do what torch.compiler.assume_constant_result does, without importing the compiler, which takes as long as importing torch."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_compiled_code
def mix(*parts: int | str) -> int:
    """One 63-bit integer from many parts: the same on every machine, unlike `hash`. In compiled code it is a constant."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _scramble(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """splitmix64's finaliser. int64 wraps as uint64 does; the mask makes the shift a logical one."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_FIRST)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_SECOND)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniform(seed: int, purpose: str, samples: Int[Tensor, "batch"], count: int) -> Float[Tensor, "batch {count}"]:
    """Numbers in (0, 1), float32, one for each sample and slot; never 0 and never 1."""
    # torch's compiler multiplies a bare range as if it had 32 bits; after `^ 0` it is a tensor like any other.
    slots = torch.arange(count, device=samples.device) ^ 0
    key = _scramble(samples * _signed(_GOLDEN) + _signed(mix(seed, purpose)))
    bits = _scramble(key[:, None] + slots * _signed(_GOLDEN)) >> 41 & ((1 << 23) - 1)
    return (bits.float() + 0.5) * 2.0**-23


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """A pseudo-random bijection of range(size): four Feistel rounds on the next even number of bits, repeated for what falls
    outside range(size) until it is inside (cycle walking). Memory is that of `indices`, whatever `size` is."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = [np.uint64(mix(key, number)) for number in range(4)]

    def encipher(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & low
        for own in keys:
            noise = _scramble_array(right + own)
            left, right = right, left ^ (noise & low)
        return (left << shift) | right

    result = encipher(indices.astype(np.uint64))
    while (outside := result >= size).any():
        result[outside] = encipher(result[outside])
    return result.astype(np.int64)


def _scramble_array(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
        return x ^ (x >> np.uint64(31))
