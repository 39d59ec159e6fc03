"""Counter-based random numbers: each is a pure function of its seed, purpose and counters. No torch, no state.

The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) with
random access: number i of the stream with key k is `mix(k + (i + 1) * GOLDEN)`. Using the numbers of one stream as
the keys of others gives one number per (key, sample id, position). The 64-bit arithmetic wraps around. It uses only
operators that NumPy int64 arrays and torch int64 tensors share, so that both give the same bits on every device.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as an unsigned number."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def stream_key(seed: int, purpose: str, iteration: int) -> int:
    """The key (int64) of the stream for one purpose in one iteration or epoch."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{iteration}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift_right(x: Any, bits: int) -> Any:
    """Logical right shift; the operator >> of int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def stream(key: Any, index: Any) -> Any:
    """Number `index` of the stream `key`: 64 random bits.

    key    int, or int64 array or tensor (one stream per element)
    index  int64 array or tensor that broadcasts with key
    Returns int64 of the broadcast shape.
    """
    x = (index + 1) * _GOLDEN + key
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def counter_bits(seed: int, purpose: str, iteration: int, sample_ids: Any, positions: Any) -> Any:
    """53 random bits per (sample id, position): int64 in [0, 2**53), of the broadcast shape.

    sample_ids, positions  int64 arrays or tensors whose shapes broadcast
    """
    per_sample = stream(stream_key(seed, purpose, iteration), sample_ids)
    return _shift_right(stream(per_sample, positions), 11)


def permutation(n: int, seed: int, purpose: str, epoch: int) -> NDArray[np.int64]:
    """A random order of 0 .. n - 1, [n] int64: the same on every machine for the same arguments."""
    return np.argsort(stream(stream_key(seed, purpose, epoch), np.arange(n)), kind="stable")
