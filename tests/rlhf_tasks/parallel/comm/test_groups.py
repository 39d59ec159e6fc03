"""Process groups over two gloo ranks, and the device sets of a placement."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import (
    ProcessGroups,
    all_reduce,
    device_sets,
    group_size,
    join_world,
    leave_world,
    stage_set,
    tied_set,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement

CPU = torch.device("cpu")


def test_device_sets_of_a_placement():
    placement = Placement(tuple(range(8)), ParallelStrategy(dp=2, tp=2, pp=2))
    sets = device_sets(placement)
    assert sets == sorted(set(sets))
    for expected in [(0, 1), (0, 2), (0, 4), (0, 1, 4, 5), (2, 3, 6, 7), tuple(range(8))]:
        assert expected in sets
    assert (0, 3) not in sets


def test_the_groups_of_two_hosts_of_eight():
    """By hand: (dp, tp, pp) = (2, 4, 2), a stage on each host; and (4, 2, 2), whose tp groups are pairs."""
    two_hosts = Placement(tuple(range(16)), ParallelStrategy(dp=2, tp=4, pp=2))

    def groups(placement: Placement, kind: str) -> list[list[int]]:
        return sorted(map(list, {getattr(placement, kind)(device) for device in placement.devices}))

    assert groups(two_hosts, "tp_group") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups(two_hosts, "dp_group") == [
        [0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]
    ]  # fmt: skip
    assert groups(two_hosts, "pp_group") == [
        [0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]
    ]  # fmt: skip
    pairs = Placement(tuple(range(16)), ParallelStrategy(dp=4, tp=2, pp=2))
    assert groups(pairs, "tp_group") == [[device, device + 1] for device in range(0, 16, 2)]
    assert groups(pairs, "dp_group") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert groups(pairs, "pp_group") == [[device, device + 8] for device in range(8)]


def test_the_groups_of_ranks_that_divide_the_tokens_of_their_samples():
    """By hand: (dp, tp, pp, cp) = (2, 2, 1, 2). To parameters a cp rank is a dp rank, to samples it is a tp rank."""
    placement = Placement(tuple(range(8)), ParallelStrategy(dp=2, tp=2, cp=2))
    assert placement.tp_group(6) == (6, 7)
    assert placement.cp_group(6) == (4, 6)
    assert placement.dp_group(6) == (0, 2, 4, 6)
    assert (placement.replica(1), placement.heads) == ((4, 5, 6, 7), (0, 4))
    assert all(placement.device(at.dp, at.tp, at.pp, at.cp) == device
               for device in placement.devices for at in [placement.coordinate(device)])  # fmt: skip
    assert {(0, 2), (4, 6), (0, 2, 4, 6), (0, 1, 2, 3)} <= set(device_sets(placement))
    stages = Placement(tuple(range(8)), ParallelStrategy(pp=2, cp=4))
    assert (stages.cp_group(5), stages.pp_group(5), stages.heads) == ((4, 5, 6, 7), (1, 5), (4,))


def test_the_tied_set_is_the_ends_of_the_pipelines_of_a_tp_rank():
    placement = Placement((3, 1, 0, 2), ParallelStrategy(pp=4))
    assert tied_set(placement, 1) == (2, 3)
    placement = Placement(tuple(range(12)), ParallelStrategy(dp=2, tp=2, pp=3))
    assert tied_set(placement, 0) == tied_set(placement, 10) == (0, 2, 8, 10)
    assert stage_set(placement, 5) == (4, 5, 6, 7)
    assert tied_set(Placement((5,), ParallelStrategy()), 5) == (5,)


def test_a_group_of_one_is_the_identity():
    tensor = torch.tensor([3.0])
    assert all_reduce(tensor, None) is tensor
    assert group_size(None) == 1


def _groups_of_two(rank: int, world: int) -> tuple[float, ProcessGroup | None, int, list[str]]:
    """A sum, the group of one, the size of the group of two, and what is said of sets without a group."""
    # Each rank names the sets in another order; the ranks must agree nevertheless.
    sets = [(1, 0), (0,), (1,), [0, 1]]
    groups = ProcessGroups(sets if rank == 0 else reversed(sets), 240.0, CPU)
    total = float(all_reduce(torch.tensor([rank + 1.0]), groups[[1, 0]]))
    refused = []
    for foreign in [(1 - rank,), (0, 7)]:
        with pytest.raises(KeyError) as error:
            groups[foreign]
        refused.append(str(error.value))
    alone, size = groups[(rank,)], group_size(groups[(0, 1)])
    view = groups.view("call of one", [(rank,)])
    assert view[(rank,)] is None
    with pytest.raises(KeyError) as error:
        view[(0, 1)]
    refused.append(str(error.value))
    groups.close()
    return total, alone, size, refused


@pytest.mark.dist
def test_groups_over_two_ranks(ranks):
    for rank, (total, alone, size, refused) in enumerate(ranks.run(2, _groups_of_two)):
        assert (total, alone, size) == (3.0, None, 2)
        assert all(f"rank {rank} has no group" in said for said in refused)
        assert "call of one: rank" in refused[-1]


def test_all_groups_are_aborted_at_once():
    """NCCL ends none while kernels of another run, which only that one's abort ends."""
    together = threading.Barrier(3)
    groups = object.__new__(ProcessGroups)
    aborts = SimpleNamespace(abort=lambda: together.wait(10.0))
    groups._groups = cast(Any, {(0,): None} | {(0, peer): aborts for peer in (1, 2, 3)})
    groups.abort()
    assert not together.broken


def _worlds(rank: int, world: int, path: str) -> tuple[str, int, int]:
    with pytest.raises(RuntimeError) as refused:
        join_world(dist.HashStore(), 0, 1, 1.0, CPU)
    leave_world()
    join_world(dist.FileStore(path, world), rank, world, 240.0, CPU)
    place = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a peer that still connects would find us gone
    leave_world()
    leave_world()
    return str(refused.value), *place


@pytest.mark.dist
def test_a_world_is_joined_after_the_last_one_was_left(ranks, tmp_path: Path):
    for rank, (refused, *place) in enumerate(ranks.run(2, _worlds, str(tmp_path / "store"))):
        assert "leave_world" in refused
        assert place == [rank, 2]


def _after_a_failure(rank: int, world: int, path: str) -> int:
    leave_world()
    if rank == 0:
        with pytest.raises(RuntimeError):
            join_world(dist.HashStore(), 0, 2, 0.5, CPU)  # nobody else comes
    join_world(dist.FileStore(path, world), rank, world, 30.0, CPU)
    dist.barrier()
    return dist.get_world_size()


@pytest.mark.dist
def test_a_world_is_joined_after_a_join_that_failed(ranks, tmp_path: Path):
    """By one that has tried and one that has not: a lost rank's successor is a new process."""
    assert ranks.run(2, _after_a_failure, str(tmp_path / "store")) == [2, 2]
