"""A head's batch on all ranks of its replica."""

import pytest
import torch

from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.train.engine import share_batch


def _share(rank: int, world: int, order: tuple[int, ...]):
    placement = Placement(order, ParallelStrategy(dp=2, tp=1, pp=2))
    groups = ProcessGroups(device_sets(placement), 240.0, torch.device("cpu"))
    at = placement.coordinate(rank)
    batches = [_mixed((7, 8)), _mixed(())]
    got = share_batch(batches[at.dp] if rank in placement.heads else None, placement, groups, rank)
    want = batches[at.dp]
    assert got.ids == want.ids
    for key, packed in want.data.items():
        assert got[key].lengths == packed.lengths, key
        assert got[key].values.dtype == packed.values.dtype, key
        assert torch.equal(got[key].values, packed.values), key
    assert list(got.data) == list(want.data)


def _mixed(ids: tuple[int, ...]) -> SampleBatch:
    """Keys of several dtypes, whose bytes do not end where the next dtype may start."""
    n = len(ids)
    data = {
        "mask": Packed(torch.ones(3 * n, dtype=torch.bool), (3,) * n),
        "text": Packed(torch.arange(5 * n).to(torch.uint8), (5,) * n),
        "input_ids": Packed(torch.arange(3 * n), (3,) * n),
        "double": Packed(
            torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n)), (1,) * n
        ),
        "half": Packed(torch.arange(n).to(torch.bfloat16), (1,) * n),
    }
    return SampleBatch(ids, data)


@pytest.mark.dist
def test_a_batch_reaches_all_ranks_of_its_replica_bit_for_bit(ranks) -> None:
    ranks.run(4, _share, (2, 0, 3, 1))
