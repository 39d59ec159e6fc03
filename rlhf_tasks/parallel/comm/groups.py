"""Process groups: one for each distinct set of devices. Device id = global rank.

`torch.distributed` requires that *every* rank of the world calls each `new_group`, in the same order. So all ranks
build `ProcessGroups` from the same device sets (of all placements of the plan), sorted, before any call runs.

A set of one device has no group: `groups[(3,)]` is None, and for None the functions here are the identity.
Never pass None to `torch.distributed` itself: there it means the whole world.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]

from rlhf_tasks.parallel.layout.topology import Placement


def join_world(store: Store, rank: int, world_size: int, timeout_s: float, device: torch.device) -> None:
    """Join the world of one generation of ranks: NCCL for tensors on CUDA, gloo for tensors on the CPU.

    store      the rendezvous of this generation only (give each generation its own `PrefixStore`)
    rank       this process's device id, 0 .. world_size - 1
    timeout_s  seconds after which a collective raises on this rank when a peer does not join it
    device     the device of this rank's tensors; a CUDA device becomes the current one
    Raises RuntimeError when this process is still in a world (see `leave_world`).
    """
    if dist.is_initialized():
        raise RuntimeError("this process is still in a world of ranks. Call leave_world() first.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Of torch's attention kernels only cuDNN's may give other bits when it is called again. A run that is killed
        # and goes on must draw the tokens that it would have drawn.
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
        self._groups: dict[tuple[int, ...], ProcessGroup | None] = {}
        for devices in sorted({tuple(sorted(set(devices))) for devices in device_sets}):
            if len(devices) > 1:
                group = dist.new_group(list(devices), timeout=timedelta(seconds=timeout_s))
            else:
                group = None
            if self.rank in devices:
                assert group is None or isinstance(group, ProcessGroup)
                self._groups[devices] = group
        self._warm_up()

    def _warm_up(self) -> None:
        for devices, group in self._groups.items():
            for place in dict.fromkeys([torch.device("cpu"), self.device]):  # the same order on every rank
                ones = all_reduce(torch.ones(1, device=place), group)
                assert int(ones) == len(devices), f"group {devices} counted {int(ones)} ranks"

    def __getitem__(self, devices: Iterable[int]) -> ProcessGroup | None:
        """The group of a set of devices; None for a set of one.

        Raises KeyError when the groups were built without this set or this rank is not in it.
        """
        key = tuple(sorted(set(devices)))
        if key not in self._groups:
            raise KeyError(
                f"rank {self.rank} has no group of devices {list(key)}; it has {list(self._groups)}"
            )
        return self._groups[key]

    def __contains__(self, devices: Iterable[int]) -> bool:
        return tuple(sorted(set(devices))) in self._groups

    def abort(self) -> None:
        """Make collectives that other threads wait for raise soon. Afterwards the groups can only be closed.

        This works with NCCL only. With gloo a waiting thread raises when its peer dies or after the timeout.
        """
        for group in self._groups.values():
            if group is not None:
                group.abort()

    def close(self) -> None:
        """Destroy the groups (not the world). All their ranks must call it."""
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()


def device_sets(placement: Placement) -> list[tuple[int, ...]]:
    """The sets of devices in which an engine on this placement communicates.

    These are its tp, dp and pp groups, its replicas, its stages, the whole mesh, and the holders of tied embeddings.
    """
    sets = [tuple(sorted(placement.devices))]
    sets += [tuple(sorted(placement.replica(dp_rank))) for dp_rank in range(placement.strategy.dp)]
    for device in placement.devices:
        sets += [placement.tp_group(device), placement.dp_group(device), placement.pp_group(device)]
        sets += [stage_set(placement, device), tied_set(placement, device)]
    return sorted({tuple(sorted(devices)) for devices in sets})


def stage_set(placement: Placement, device: int) -> tuple[int, ...]:
    """The devices of all tp and dp ranks on this device's stage."""
    return tuple(sorted(d for other in placement.tp_group(device) for d in placement.dp_group(other)))


def tied_set(placement: Placement, device: int) -> tuple[int, ...]:
    """The devices of this device's tp rank on the first and last stages, in all dp ranks.

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
