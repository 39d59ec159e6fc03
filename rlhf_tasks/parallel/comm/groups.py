"""Process groups, one for each distinct set of devices, and messages in them. Device id = global rank.

`torch.distributed` requires that *every* rank of the world calls each `new_group`, in the same order. So all ranks
build `ProcessGroups` from the same device sets (of all placements of the plan), sorted, before any call runs.

A set of one device has no group: `groups[(3,)]` is None, and for None the functions here are the identity.
Never pass None to `torch.distributed` itself: there it means the whole world.

A message from rank to rank is one flat buffer of bytes, for tensors of any dtypes and shapes.
"""

import copy
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]

from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement

# torch 2.13 renamed it and warns of the old name; 2.11 has only the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def join_world(store: Store, rank: int, world_size: int, timeout_s: float, device: torch.device) -> None:
    """Join the world of one generation of ranks: NCCL for tensors on CUDA, gloo for tensors on the CPU.

    store      the rendezvous of this generation only (give each generation its own `PrefixStore`)
    rank       this process's device id, 0 .. world_size - 1
    timeout_s  seconds after which a collective of gloo raises on this rank when a peer does not join it
    device     the device of this rank's tensors; a CUDA device becomes the current one
    Raises RuntimeError when this process is still in a world (see `leave_world`).
    """
    if dist.is_initialized():
        raise RuntimeError("this process is still in a world of ranks. Call leave_world() first.")
    if device.type == "cuda":
        # A rank that loses a peer is cleared, and stays. By default torch would end its process, perhaps later.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        torch.cuda.set_device(device)
        # Of torch's attention kernels only cuDNN's may give other bits when it is called again. A run that is killed
        # and continues must draw the tokens that it would have drawn.
        torch.backends.cuda.enable_cudnn_sdp(False)
    # Ranks find each other's groups by a number that each process counts. torch does not reset it after a failed
    # join, so this process would wait for peers that count from 0.
    dist.distributed_c10d._world.group_count = 0
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def leave_world() -> None:
    """Leave the world and all its groups. Does nothing when this process is in no world."""
    if dist.is_initialized():
        dist.destroy_process_group()


class ProcessGroups:
    """The groups of a plan on this rank.

    device_sets  every set of devices that will communicate, the same on all ranks; order and repeats do not matter
    timeout_s    of every collective on these groups, in seconds
    device       the device of this rank's tensors

    Building is collective over the world. It ends with one small all-reduce in each group, so that connections exist
    before the first call and a wrong set is detected here. Group ranks follow *ascending device id*, which may differ
    from the order of a placement: name peers by device (`src=`, `dst=`), not by group rank.
    """

    def __init__(self, device_sets: Iterable[Iterable[int]], timeout_s: float, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self._user = ""
        self._groups: dict[tuple[int, ...], ProcessGroup | None] = {}
        for devices in sorted({tuple(sorted(set(devices))) for devices in device_sets}):
            if len(devices) > 1:
                group = dist.new_group(list(devices), timeout=timedelta(seconds=timeout_s))
            else:
                group = None
            if self.rank in devices:
                assert group is None or isinstance(group, ProcessGroup)
                self._groups[devices] = group
        for devices, group in self._groups.items():
            for place in dict.fromkeys([torch.device("cpu"), self.device]):  # the same order on every rank
                ones = all_reduce(torch.ones(1, device=place), group)
                assert int(ones) == len(devices), f"group {devices} counted {int(ones)} ranks"

    def __getitem__(self, devices: Iterable[int]) -> ProcessGroup | None:
        """The group of a set of devices; None for a set of one.

        Raises KeyError when there is no group of this set, this rank is not in it, or the view does not have it.
        """
        key = tuple(sorted(set(devices)))
        if key not in self._groups:
            user = f"{self._user}: " if self._user else ""
            raise KeyError(
                f"{user}rank {self.rank} has no group of devices {list(key)} here; it has {list(self._groups)}"
            )
        return self._groups[key]

    def view(self, user: str, device_sets: Iterable[Iterable[int]]) -> Self:
        """Some of these groups, for one user: what a call or node reaches is what the plan says of it.

        user  what its errors begin with, such as "call actor_train"
        Views share the groups; only the whole is closed.
        """
        view = copy.copy(self)
        wanted = {tuple(sorted(set(devices))) for devices in device_sets}
        view._user = user
        view._groups = {devices: group for devices, group in self._groups.items() if devices in wanted}
        return view

    def abort(self) -> None:
        """Make collectives that other threads wait for raise soon. Afterwards the groups can only be closed.

        This works with NCCL only. With gloo a waiting thread raises when its peer dies or after the timeout.
        All are aborted at once: to free what one has on the device, NCCL waits for the kernels of the others, too.
        """
        groups = [group for group in self._groups.values() if group is not None]
        aborts = [threading.Thread(target=group.abort, daemon=True) for group in groups]
        for each in aborts:
            each.start()
        for each in aborts:
            each.join()

    def close(self) -> None:
        """Destroy the groups (not the world). All their ranks must call it."""
        assert not self._user, f"{self._user} has a view: the groups are closed as a whole"
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()


def device_sets(placement: Placement) -> list[tuple[int, ...]]:
    """The sets of devices in which an engine on this placement communicates.

    These are its tp, cp, dp and pp groups, its replicas, its stages, the whole mesh, and the holders of tied
    embeddings.
    """
    sets = [tuple(sorted(placement.devices))]
    sets += [tuple(sorted(placement.replica(dp_rank))) for dp_rank in range(placement.strategy.dp)]
    for device in placement.devices:
        sets += [placement.tp_group(device), placement.cp_group(device)]
        sets += [placement.dp_group(device), placement.pp_group(device)]
        sets += [stage_set(placement, device), tied_set(placement, device)]
    return sorted({tuple(sorted(devices)) for devices in sets})


def stage_set(placement: Placement, device: int) -> tuple[int, ...]:
    """All devices of this device's stage."""
    return tuple(sorted(d for other in placement.tp_group(device) for d in placement.dp_group(other)))


def tied_set(placement: Placement, device: int) -> tuple[int, ...]:
    """The devices of this device's tp rank on the first and last stages, in all dp and cp ranks.

    With tied embeddings these are the holders of a slice of them.
    """
    stages = placement.pp_group(device)
    return tuple(sorted({d for end in (stages[0], stages[-1]) for d in placement.dp_group(end)}))


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in a group; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def all_reduce(
    tensor: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce a tensor of any shape over a group in place, and return it; the identity for a group of one (None)."""
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class Blank(NamedTuple):
    """Dtype and shape of a tensor to be received."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def exchange(
    outgoing: Mapping[int, Sequence[Tensor]],
    incoming: Mapping[int, Sequence[Blank]],
    group: ProcessGroup | None,
    device: torch.device,
) -> dict[int, list[Tensor]]:
    """Send each peer its tensors and receive from each peer, all at once (`batch_isend_irecv`).

    outgoing  peer (global rank) -> tensors of any dtypes and shapes
    incoming  peer -> blanks: the dtypes and shapes that this peer sends, in the same order
    group     contains this rank and all its peers; ranks without messages need not call
    Returns peer -> tensors, which are views of the peer's message. Bits are never converted.
    """
    packed = {peer: pack(tensors) for peer, tensors in sorted(outgoing.items())}
    buffers = {
        peer: torch.empty(sum(blank.size_bytes for blank in blanks), dtype=torch.uint8, device=device)
        for peer, blanks in sorted(incoming.items())
    }
    operations = [dist.P2POp(dist.isend, data, peer, group) for peer, data in packed.items() if data.numel()]
    operations += [
        dist.P2POp(dist.irecv, data, peer, group) for peer, data in buffers.items() if data.numel()
    ]
    if operations:
        assert group is not None, "messages without a group"
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return {peer: unpack(buffer, incoming[peer]) for peer, buffer in buffers.items()}


def broadcast_json(value: Any, source: int, group: ProcessGroup | None, device: torch.device) -> Any:
    """Broadcast the JSON-able value of rank `source` to a group and return it; without a group, `value` itself."""
    if group is None:
        return value
    encoded = json.dumps(value).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=source, group=group)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if encoded:
        data.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    dist.broadcast(data, src=source, group=group)
    return json.loads(bytes(data.tolist()))


def _order(dtypes: Sequence[torch.dtype]) -> list[int]:
    """Indices in the order of a message: wider elements first, so that every tensor is aligned for its dtype."""
    return sorted(range(len(dtypes)), key=lambda index: -dtypes[index].itemsize)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of some tensors, one after the other: [bytes] uint8."""
    order = _order([tensor.dtype for tensor in tensors])
    return torch.cat([tensors[index].contiguous().view(-1).view(torch.uint8) for index in order])


def unpack(buffer: Tensor, blanks: Sequence[Blank]) -> list[Tensor]:
    """The tensors of a message [bytes] uint8, as views."""
    tensors: list[Tensor] = [buffer] * len(blanks)
    offset = 0
    for index in _order([blank.dtype for blank in blanks]):
        blank = blanks[index]
        data = buffer[offset : offset + blank.size_bytes]
        tensors[index] = data.view(blank.dtype).view(blank.shape)
        offset += blank.size_bytes
    return tensors
