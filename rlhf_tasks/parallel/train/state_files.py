"""Training state on disk: one safetensors file per rank, which any other layout can read.

A file holds the rank's `StateShard`s: ranges of its flattened slices of master weights and moments. Each element is
written by one dp rank only. Nothing is pickled. `StateTransfer` says which part a rank of another
layout reads from which file.

Three things happen at once while a file is written: a piece is hashed and handed to the system, and the pieces before
it are synced and read back. So a hash, and the check that the disk has what was written, cost little beside the
writing itself.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.comm.reallocation import counted, digests
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import StateLayout, StateTransfer
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import StateKind, StateShard
from prefect_rlhf.rlhf_tasks.system.durable import CHUNK_BYTES, ByteCount
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach

KINDS: tuple[StateKind, ...] = ("master", "exp_avg", "exp_avg_sq")
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_SYNC_BYTES = 1 << 26  # synced and read back at a time


class GivenUp(Exception):
    """The file is not needed any more, so it was not written to its end."""


class NotAsWritten(Exception):
    """The disk does not have what was written to it."""


class Written(NamedTuple):
    """A file that is durable on disk, and was read back."""

    size_bytes: int
    sha256: str


def state_size_bytes(shards: Iterable[StateShard]) -> int:
    """Bytes of the tensors in a file, without its header."""
    return sum(shard.tensor.nbytes for shard in shards)


def write_shards(
    path: Path,
    device: int,
    shards: Sequence[StateShard],
    moved: ByteCount | None = None,
    given_up: Event | None = None,
    sums: Mapping[str, int] | None = None,
) -> Written:
    """Write a rank's shards (tensors on the CPU), hash and fsync the file, and check it.

    device    the rank's device id, by which a reader knows the slices
    sums      `state_sums` of what the shards were on the device
    moved     counts the bytes that are durable and checked
    given_up  when it is set, the writing ends soon
    Raises OSError when the disk is full or cannot be written, NotAsWritten when it has other bytes, GivenUp.
    """
    entries: dict[str, Any] = {}
    starts: dict[str, int] = {}
    offset = 0
    for shard in shards:
        key, size_bytes = _key(shard), shard.tensor.nbytes
        entries[key] = {
            "dtype": _NAMES[shard.tensor.dtype],
            "shape": [shard.tensor.numel()],
            "data_offsets": [offset, offset + size_bytes],
        }
        starts[key] = shard.start
        offset += size_bytes
    metadata = {"device": str(device), "starts": json.dumps(starts), "word_sums": json.dumps(sums)}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    return write_checked(path, _chunks(header, shards), moved, given_up)


def write_checked(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    moved: ByteCount | None = None,
    given_up: Event | None = None,
) -> Written:
    """Write a file piece by piece, hash and fsync it, and check it. Otherwise as `write_shards`."""
    size_bytes, digest = 0, hashlib.sha256()
    with (
        path.open("wb") as file,
        _ReadBack(path, moved or ByteCount()) as disk,
        ThreadPoolExecutor(1) as hasher,
    ):
        for data in pieces:
            if given_up is not None and given_up.is_set():
                raise GivenUp(f"{path} is not needed any more.")
            hashed = hasher.submit(digest.update, data)
            file.write(data)
            hashed.result()
            if size_bytes == 0:
                file.flush()
                reach(Point.SHARD_BEGUN)
            size_bytes += len(data)
            disk.written(data)
            if disk.waiting_bytes >= _SYNC_BYTES:
                file.flush()
                disk.follow(file.fileno())
        file.flush()
        reach(Point.SHARD_WRITTEN)
        disk.follow(file.fileno())
        disk.finish()
        os.fsync(file.fileno())
    return Written(size_bytes, digest.hexdigest())


class _ReadBack:
    """Follows the writing of a file in a thread of its own: syncs what is written, reads it back, and compares it.

    waiting_bytes  written, but not followed yet
    Comparing costs much less than a second hash. The bytes come through the system's cache: what a disk loses after
    that is found when a run resumes, by the hash.
    """

    def __init__(self, path: Path, moved: ByteCount) -> None:
        self.waiting_bytes = 0
        self._path = path
        self._moved = moved
        self._waiting: list[bytes | memoryview] = []
        self._file = path.open("rb", buffering=0)
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> "_ReadBack":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        self._file.close()

    def written(self, data: bytes | memoryview) -> None:
        """These bytes were written next. They must not change until they are followed."""
        self._waiting.append(data)
        self.waiting_bytes += len(data)

    def follow(self, descriptor: int) -> None:
        """Follow what is written. Waits for the piece before, so that little is left to sync at the end."""
        self.finish()
        self._last = self._thread.submit(self._sync_and_compare, descriptor, self._waiting)
        self._waiting = []
        self.waiting_bytes = 0

    def finish(self) -> None:
        """Wait until all is synced and compared. Raises NotAsWritten, and the OSError of a sync."""
        if self._last is not None:
            self._last.result()

    def _sync_and_compare(self, descriptor: int, pieces: Sequence[bytes | memoryview]) -> None:
        os.fdatasync(descriptor)
        for piece in pieces:
            there, n_bytes = bytearray(len(piece)), 0
            # A file system may give less than asked for.
            while more := self._file.readinto(memoryview(there)[n_bytes:]):
                n_bytes += more
            if n_bytes != len(piece) or not np.array_equal(_numbers(there), _numbers(piece)):
                raise NotAsWritten(f"{self._path}: the disk does not have the bytes that were written to it.")
            self._moved.add(n_bytes)


def _numbers(data: bytes | bytearray | memoryview) -> "np.ndarray[Any, Any]":
    return np.frombuffer(data, dtype=np.uint8)


def state_sums(layout: Layout, device: int, shards: Iterable[StateShard]) -> Tensor:
    """A device's summands of the checksums of a role's state, which do not depend on the layout: [kinds, parameters]
    int64, kinds and parameters in the order of `sum_keys`, where the shards are.

    shards  all that the device keeps
    """
    on = torch.device("cpu")
    of_kind: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for shard in shards:
        of_kind[shard.kind][shard.name], on = shard.tensor, shard.tensor.device
    pieces, names = counted(layout, device, state=True), list(layout.specs)
    return torch.stack([digests(of_kind[kind], pieces, names, on) for kind in KINDS])


def sum_keys(layout: Layout) -> list[str]:
    """The name of each of the sums of `state_sums`, row after row."""
    return [f"{kind}/{name}" for kind in KINDS for name in layout.specs]


def read_sums(files: Iterable[Path]) -> Counter[str] | None:
    """The sums over all ranks of `state_sums`, as they were when the files were written; None where a file of before
    has none."""
    total = Counter[str]()
    for path in files:
        with safe_open(path, framework="pt") as file:
            sums = json.loads(file.metadata().get("word_sums", "null"))
        if sums is None:
            return None
        total.update(sums)
    return total


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
            yield _read(shard, stored, transfer, device)


def _key(shard: StateShard) -> str:
    """The name of a shard's tensor in a file."""
    return f"{shard.kind}/{shard.name}"


def pieces_of(data: bytes | memoryview) -> Iterator[memoryview]:
    """The data in pieces of the size that is written at a time."""
    whole = memoryview(data)
    for start in range(0, len(data), CHUNK_BYTES):
        yield whole[start : start + CHUNK_BYTES]


def _chunks(header: bytes, shards: Sequence[StateShard]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, piece by piece."""
    yield len(header).to_bytes(8, "little")
    yield header
    for shard in shards:
        yield from pieces_of(shard.tensor.contiguous().view(torch.uint8).numpy().data)


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
        entry = self._stored.get((f"master/{name}", device))
        return Interval(0, 0) if entry is None else entry.range


def _read(
    shard: StateShard, stored: Mapping[tuple[str, int], _Stored], transfer: StateTransfer, device: int
) -> StateShard:
    """The shard with a new tensor, which is assembled from what the files contain."""
    target = transfer.new.columns(shard.name, device)
    values, lacking = torch.empty_like(shard.tensor), shard.tensor.numel()
    for source, part in transfer.taken(shard.name, device):
        if (_key(shard), source) in stored:
            file, (start, _) = stored[_key(shard), source]
            columns = transfer.old.columns(shard.name, source)
            first, last = columns.span(part)
            data = file.get_slice(_key(shard))[first - start : last - start]
            if data.dtype != values.dtype:
                raise ValueError(
                    f"the checkpoint has {shard.kind} of {shard.name} in {data.dtype}, but the run uses "
                    f"{values.dtype}. Resume with the dtype that the run began with."
                )
            target.view(values, shard.start, part).copy_(columns.view(data, first, part))
            lacking -= math.prod(part.shape)
    if lacking:
        raise ValueError(
            f"the checkpoint lacks {lacking} of {values.numel()} elements of {shard.kind} of {shard.name}"
        )
    return shard._replace(tensor=values)
