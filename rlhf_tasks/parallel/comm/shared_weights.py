"""Weights in memory that processes of one host share: who writes them, who reads them, and how both know that they
are the same. The reader may be another interpreter with another torch, so little is imported here.

The memory has no name: it is a file descriptor of the process that made it, and ends with that process, however it
ends. Others of the same user open it as /proc/PID/fd/N.
"""

import hashlib
import math
import mmap
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGN = 64  # bytes; of each tensor's beginning
_WORDS = 1 << 20  # that a digest multiplies at once: 8 MiB stay in the caches of a core
_FACTOR = 6364136223846793005  # odd, so that a product loses nothing (Knuth, MMIX)


class Place(NamedTuple):
    """Where a tensor lies. start: bytes from the beginning of the memory"""

    name: str
    shape: tuple[int, ...]
    start: int


def places_of(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> tuple[list[Place], int]:
    """Where tensors lie, one after the other, and the bytes of all."""
    places, start = [], 0
    for name, shape in shapes.items():
        places.append(Place(name, shape, start))
        start += -(-math.prod(shape) * itemsize // ALIGN) * ALIGN
    return places, start


class SharedWeights:
    """A mapping of the memory of `size` bytes.

    path  of another process's memory; None: new memory
    Raises OSError where the other process has ended, or is on another host.
    """

    def __init__(self, size: int, path: str | None = None) -> None:
        self._file = os.memfd_create("weights") if path is None else os.open(path, os.O_RDWR)
        if path is None:
            os.truncate(self._file, size)
            path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.path = path
        self._memory = mmap.mmap(self._file, size)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def tensors(self, places: list[Place], dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors in it, by name. What is written to them, every process sees."""
        return {
            name: self.bytes[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, shape, start in places
        }

    def digests(self, places: list[Place]) -> dict[str, str]:
        """Of each tensor, by name: of its 64-bit words, each times an odd number of its place, modulo 2^64, in 16 hex
        digits. What lies between two tensors counts with the first."""
        words = self.bytes.view(torch.int64)
        stops = [place.start for place in places[1:]] + [len(self.bytes)]
        return {
            place.name: _digest(words[place.start // 8 : stop // 8])
            for place, stop in zip(places, stops, strict=True)
        }

    def close(self) -> None:
        """Let go of it. The memory ends when all processes have."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self._file)


def _digest(words: Tensor) -> str:
    factors = torch.arange(1, 2 * min(_WORDS, len(words)), 2)
    total = 0
    for part in words.split(_WORDS):
        total = (total * _FACTOR + int((part * factors[: len(part)]).sum())) % 2**64
    return f"{total:016x}"


def digest_of_all(digests: Mapping[str, str]) -> str:
    """Of `SharedWeights.digests`: 16 hex digits."""
    return hashlib.sha256(" ".join(digests.values()).encode()).hexdigest()[:16]


def described(places: list[Place]) -> list[list[Any]]:
    """The places as JSON."""
    return [[name, list(shape), start] for name, shape, start in places]


def read_places(described: list[list[Any]]) -> list[Place]:
    """The places from `described`."""
    return [Place(name, tuple(shape), start) for name, shape, start in described]
