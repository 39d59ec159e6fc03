"""Training state on disk: one safetensors file per rank, which any other layout can read.

A file holds the rank's `StateShard`s: ranges of its flattened slices of master weights and moments. Each element is
written by one dp rank only. Nothing is pickled.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_tasks.parallel.layout.slices import Interval, Layout
from rlhf_tasks.parallel.state.transfer import StateTransfer, assemble
from rlhf_tasks.parallel.train.optimizer import StateShard
from rlhf_tasks.parallel.train.state_layout import Rectangle, StateLayout
from rlhf_tasks.system.failpoints import Point, reach

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_CHUNK_BYTES = 1 << 22  # bytes hashed and written at a time


class Written(NamedTuple):
    """A file that is durable on disk."""

    size_bytes: int
    sha256: str


def state_size_bytes(shards: Iterable[StateShard]) -> int:
    """Bytes of the tensors in a file, without its header."""
    return sum(shard.tensor.nbytes for shard in shards)


def write_shards(path: Path, device: int, shards: Sequence[StateShard]) -> Written:
    """Write a rank's shards (tensors on the CPU), and hash and fsync the file.

    device  the rank's device id, by which a reader knows the slices
    Raises OSError when the disk is full or cannot be written.
    """
    entries: dict[str, Any] = {}
    offset = 0
    for shard in shards:
        span = [offset, offset + shard.tensor.nbytes]
        dtype, shape = _NAMES[shard.tensor.dtype], [shard.tensor.numel()]
        entries[_key(shard.name, shard.kind)] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        offset = span[1]
    starts = {_key(shard.name, shard.kind): shard.start for shard in shards}
    metadata = {"device": str(device), "starts": json.dumps(starts)}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    size_bytes, digest = 0, hashlib.sha256()
    with path.open("wb") as file:
        for data in _chunks(header, shards):
            file.write(data)
            digest.update(data)
            if size_bytes == 0:
                file.flush()
                reach(Point.SHARD_BEGUN)
            size_bytes += len(data)
        file.flush()
        reach(Point.SHARD_WRITTEN)
        os.fsync(file.fileno())
    return Written(size_bytes, digest.hexdigest())


def read_shards(
    files: Iterable[Path], old: Layout, new: Layout, device: int, wanted: Iterable[StateShard]
) -> Iterator[StateShard]:
    """Read some shards of a device in the layout `new` from the files of all ranks of the layout `old`.

    wanted  the shards to read, with dtype and device; their contents are neither read nor changed
    Yields shards with new tensors, one by one. Raises ValueError naming what the files lack.
    """
    with ExitStack() as stack:
        stored: dict[tuple[str, int], _Stored] = {}
        for path in sorted(files):
            file = stack.enter_context(safe_open(path, framework="pt"))
            metadata = file.metadata()
            source = int(metadata["device"])
            for key, start in json.loads(metadata["starts"]).items():
                stop = start + file.get_slice(key).get_shape()[0]
                stored[key, source] = _Stored(file, Interval(start, stop))
        transfer = StateTransfer(_StoredLayout(old, stored), StateLayout(new))
        for shard in wanted:
            yield assemble(
                transfer.new, device, shard, _read(shard, stored, transfer, device), "the checkpoint"
            )


def _key(name: str, kind: str) -> str:
    return f"{kind}/{name}"


def _chunks(header: bytes, shards: Sequence[StateShard]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, piece by piece."""
    yield len(header).to_bytes(8, "little")
    yield header
    for shard in shards:
        data = shard.tensor.contiguous().view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]


class _Stored(NamedTuple):
    """One entry of a file: a range of elements of a flattened slice of the device that wrote it."""

    file: Any  # safetensors' handle
    range: Interval


class _StoredLayout(StateLayout):
    """A layout whose devices keep the ranges that their files contain: the writer may have cut them differently."""

    def __init__(self, layout: Layout, stored: Mapping[tuple[str, int], _Stored]) -> None:
        super().__init__(layout)
        self._stored = stored

    def range(self, name: str, device: int) -> Interval:
        entry = self._stored.get((_key(name, "master"), device))
        return Interval(0, 0) if entry is None else entry.range


def _read(
    shard: StateShard, stored: Mapping[tuple[str, int], _Stored], transfer: StateTransfer, device: int
) -> Iterator[tuple[Rectangle, Tensor]]:
    """The parts of a shard that the files contain."""
    key = _key(shard.name, shard.kind)
    for source, _, part in transfer.taken(shard.name, device):
        if (key, source) in stored:
            file, (start, _) = stored[key, source]
            columns = transfer.old.columns(shard.name, source)
            first, last = columns.span(part)
            data = file.get_slice(key)[first - start : last - start]
            _check_dtype(shard, data)
            yield part, columns.view(data, first, part)


def _check_dtype(shard: StateShard, data: Tensor) -> None:
    if data.dtype != shard.tensor.dtype:
        raise ValueError(
            f"the checkpoint has {shard.kind} of {shard.name} in {data.dtype}, but the run uses "
            f"{shard.tensor.dtype}. Resume with the dtype that the run began with."
        )
