"""Weights in memory that processes of one host share: who holds them, who reads them, and how both know that they are
the same. The reader may be another interpreter, so little is imported here.

What a rank shares is described in JSON: memories, and pieces of tensors of files, each with its region of the tensor
and its place in a memory. Memory of the host has no name: it is a file descriptor of the process that made it, and
ends with that process, however it ends. Others of the same user open it as /proc/PID/fd/N. Memory of a GPU is opened
where it is, by CUDA's handles (IPC): meanwhile its owner neither frees nor changes it. That has never been run.
"""

import base64
import hashlib
import math
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

ALIGN = 64  # bytes; of each piece's beginning in memory of the host
_WORDS = 1 << 20  # that a digest multiplies at once: 8 MiB stay in the caches of a core
_FACTOR = 6364136223846793005  # odd, so that a product loses nothing (Knuth, MMIX)

Region = tuple[slice, ...]
"""Of a tensor: first, last and step along each dim."""
Parts = Mapping[str, Sequence[tuple[Region, Tensor]]]
"""Name of a tensor of files -> its parts, and the region of each."""


class HostMemory:
    """New memory of the host, into which tensors are copied. where: how others open it"""

    def __init__(self, size: int) -> None:
        self._file, self._end = os.memfd_create("weights"), 0
        os.truncate(self._file, size)
        self.where = {"path": f"/proc/{os.getpid()}/fd/{self._file}", "size": size}
        self._bytes = opened(self.where)

    def begin(self) -> None:
        """What is there is written over from now on."""
        self._end = 0

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in this memory, after the last one."""
        start, self._end = self._end, self._end + -(-tensor.nbytes // ALIGN) * ALIGN
        there = self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return there.copy_(tensor)

    def close(self) -> None:
        """Let go of it. The memory ends when all processes have."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self._file)


class Lent:
    """Memory of this process's GPUs that others read where it is, until `take_back`."""

    def __init__(self) -> None:
        self._lent: list[tuple[Tensor, tuple[Any, ...]]] = []

    def where(self, tensor: Tensor) -> dict[str, Any]:
        """How others open the memory of a tensor. Raises ValueError where they cannot."""
        torch.cuda.synchronize(tensor.device)  # readers wait for none of our streams
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        # torch puts a counter of readers into a storage that is shared, each time a further one. So a second storage
        # of the same memory is shared, and goes when it is taken back; until then it keeps the memory.
        second = torch.from_dlpack(whole)
        handle = second.untyped_storage()._share_cuda_()
        self._lent.append((second, handle))
        return described(str(torch.cuda.get_device_properties(tensor.device).uuid), handle)

    def take_back(self) -> None:
        """Nobody reads it any longer: it is counted out, and torch frees it."""
        for _, (*_, counter, at, _, _) in self._lent:
            torch.UntypedStorage._release_ipc_counter_cuda(counter, at)
        if self._lent:
            self._lent.clear()
            torch.cuda.ipc_collect()


def described(gpu: str, handle: tuple[Any, ...]) -> dict[str, Any]:
    """Memory of a GPU as JSON. gpu: its UUID; handle: what torch's `UntypedStorage._share_cuda_` returns

    Raises ValueError for a handle that another process may be unable to open.
    """
    _, block, size, offset, *_ = handle
    if block[1:2] != b"c":  # not of cudaMalloc (ShareableHandleType in torch's CUDACachingAllocator.cpp)
        raise ValueError(
            "vLLM cannot open weights in expandable segments. Leave them out of PYTORCH_CUDA_ALLOC_CONF and "
            "PYTORCH_ALLOC_CONF."
        )
    return {"gpu": gpu, "block": base64.b64encode(block).decode(), "size": size, "offset": offset}


def opening(where: Mapping[str, Any], gpus: Sequence[str]) -> tuple[Any, ...]:
    """What torch's `UntypedStorage._new_shared_cuda` takes for what is `described`, where these GPUs are seen.

    Processes number GPUs unlike, so they are found by UUID. Raises ValueError where the GPU is none of them.
    """
    if (gpu := where["gpu"]) not in gpus:
        raise ValueError(f"GPU {gpu} has weights, and is none of those that vLLM sees: {', '.join(gpus)}")
    block = base64.b64decode(where["block"], validate=True)
    # The owner alone counts: torch begins at 1 for any number of readers, and frees at exactly 0. A reader that ends
    # finds no file to count in. The owner's streams have ended: there is no event to wait for.
    return gpus.index(gpu), block, where["size"], where["offset"], b"/torch_none", 0, b"", False


def opened(where: Mapping[str, Any]) -> Tensor:
    """The bytes of another process's memory. What is written to them, every process sees.

    Raises OSError where the other process has ended, or is on another host; ValueError as `opening` does.
    """
    if "path" in where:
        file = os.open(where["path"], os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(file, where["size"]), dtype=torch.uint8)
        finally:
            os.close(file)
    gpus = [str(torch.cuda.get_device_properties(each).uuid) for each in range(torch.cuda.device_count())]
    storage = torch.UntypedStorage._new_shared_cuda(*opening(where, gpus))
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def shared(
    mine: Iterable[tuple[str, Region, Tensor]], where: Callable[[Tensor], Mapping[str, Any]]
) -> dict[str, Any]:
    """What a rank shares, as JSON: `memories`, `pieces` and `digests` (`digests_of`).

    mine   name of a tensor of files, region of it, and what the rank has of that
    where  how others open the memory of a tensor
    """
    memories, pieces, numbers = list[Mapping[str, Any]](), list[list[Any]](), dict[int, int]()
    parts = defaultdict[str, list[tuple[Region, Tensor]]](list)
    for name, region, tensor in mine:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in numbers:
            memories.append(where(tensor))  # torch moves memory of the host that it shares
            numbers[storage.data_ptr()] = len(memories) - 1
        place = [numbers[storage.data_ptr()], tensor.storage_offset(), list(tensor.stride())]
        pieces.append([name, [[each.start, each.stop, each.step] for each in region], *place])
        parts[name].append((region, tensor))
    return {"memories": memories, "pieces": pieces, "digests": digests_of(parts)}


def parts_of(handed: Mapping[str, Any]) -> Parts:
    """What ranks share (`Handover.write`), in memory that is opened for this. Raises as `opened` does."""
    parts = {name: list[tuple[Region, Tensor]]() for name in handed["shapes"]}
    for rank in handed["ranks"]:
        memories = [opened(where).view(getattr(torch, handed["dtype"])) for where in rank["memories"]]
        for name, region, number, start, strides in rank["pieces"]:
            part = memories[number].as_strided([len(range(*each)) for each in region], strides, start)
            parts[name].append((tuple(slice(*each) for each in region), part))
    return parts


def assembled(
    parts: Parts, shapes: Mapping[str, Sequence[int]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of files, one after the other: the part itself where it is all, else a new tensor on `device`.

    Raises ValueError, naming the tensor, where a part of it is missing, or is there twice.
    """
    for name, shape in shapes.items():
        there, wanted = sum(part.numel() for _, part in parts[name]), math.prod(shape)
        if there != wanted:
            raise ValueError(f"{name} has {wanted:,} numbers, and {there:,} were handed over")
        if any(all(map(_meet, *regions)) for regions in combinations([of for of, _ in parts[name]], 2)):
            raise ValueError(f"{name} has numbers that were handed over twice, and others that were not")
        (_, whole), *others = parts[name]
        if others:
            whole = torch.empty(tuple(shape), dtype=whole.dtype, device=device)
            for region, part in parts[name]:
                whole[region].copy_(part)
        yield name, whole


def _meet(one: slice, other: slice) -> bool:
    """Whether parts of a tensor may have an index along a dim in common: not where they take turns."""
    in_turns = one.step == other.step and (one.start - other.start) % one.step
    return max(one.start, other.start) < min(one.stop, other.stop) and not in_turns


def digests_of(parts: Parts) -> dict[str, str]:
    """Of each tensor, by name: 16 hex digits for each part, of its 64-bit words, each times an odd number of its
    place, modulo 2^64."""
    return {name: " ".join(_digest(part) for _, part in of) for name, of in parts.items()}


def _digest(part: Tensor) -> str:
    factors = torch.arange(1, 2 * min(_WORDS, part.nbytes // 8 + 1), 2, device=part.device)
    total = factors.new_zeros(())
    at_once = max(1, 8 * _WORDS * len(part) // part.nbytes)
    for rows in part.split(at_once):  # what lies apart is copied by pieces
        flat = rows.contiguous().view(-1).view(torch.uint8)
        if len(flat) % 8 or flat.storage_offset() % 8:
            flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
        for some in flat.view(torch.int64).split(_WORDS):
            total = total * _FACTOR + (some * factors[: len(some)]).sum()
    return f"{int(total) % 2**64:016x}"


def digest_of_all(digests: Mapping[str, str]) -> str:
    """Of `digests_of`: 16 hex digits."""
    return hashlib.sha256(" ".join(digests.values()).encode()).hexdigest()[:16]
