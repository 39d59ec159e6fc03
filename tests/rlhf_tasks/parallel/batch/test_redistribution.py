"""Samples from heads to heads, and from a head to all ranks of its replica."""

import pytest
import torch

from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import heads_set, redistribute, share_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import shares
from prefect_rlhf.rlhf_tasks.spec import DataSide

IDS = range(40, 53)
KEYS = ("input_ids", "response_mask", "columns", "values", "scores", "features")


def at(devices, dp=1, tp=1, pp=1, **how) -> DataSide:
    return DataSide(placement=Placement(tuple(devices), ParallelStrategy(dp, tp, pp)), **how)


def sample(i: int) -> dict[str, torch.Tensor]:
    """Everything about a sample follows from its id; texts may be empty."""
    length = 3 + i * 7 % 5
    generator = torch.Generator().manual_seed(i)
    return {
        "input_ids": torch.arange(length) * i,
        "response_mask": torch.arange(length) > 1,
        "columns": torch.tensor(list(f'{{"answer": "ä{i}"}}'.encode() if i % 3 else b""), dtype=torch.uint8),
        "values": torch.randn(length, generator=generator, dtype=torch.float64),
        "scores": torch.randn(1, generator=generator),
        "features": torch.randn(length, 2, 3, generator=generator).bfloat16(),
    }


def batch(ids, keys=KEYS) -> SampleBatch:
    packed = {key: Packed.of([sample(i)[key] for i in ids]) for key in keys}
    return SampleBatch(tuple(ids), packed)


def lengths() -> dict[int, int]:
    return {i: len(sample(i)["input_ids"]) for i in IDS}


def holds(store: SampleStore, ids, keys=KEYS) -> bool:
    return all(torch.equal(store.get([i], [key])[key].values, sample(i)[key]) for i in ids for key in keys)


def move(rank, world, source, destination) -> tuple[bool, bool, int]:
    """(the destination has what it wants, the source kept what it had, bytes sent)"""
    groups = ProcessGroups([heads_set(source, destination)], 240.0, torch.device("cpu"))
    store = SampleStore()
    had = shares(source, IDS, lengths()).get(rank, [])
    wants = shares(destination, IDS, lengths()).get(rank, [])
    if had:
        store.put(batch(had))
    sent = redistribute(source, destination, IDS, KEYS, store, groups, 2, "input_ids")
    again = redistribute(source, destination, IDS, KEYS, store, groups, 2, "input_ids")
    return holds(store, wants), holds(store, had), sent + again


def lacking_bytes(source, destination) -> int:
    had, wants = shares(source, IDS, lengths()), shares(destination, IDS, lengths())
    lacking = [i for head, ids in wants.items() for i in ids if i not in had.get(head, [])]
    return sum(tensor.nbytes for i in lacking for tensor in sample(i).values())


@pytest.mark.dist
@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (at([0]), at([1])),
        (at(range(4), dp=4), at([2, 0], dp=2)),
        (at([0, 1], dp=2), at(range(4), dp=2, tp=2)),
        (at(range(4), tp=2, pp=2), at([3, 2, 1], dp=3, balance="tokens", mini_batches=2)),
        (at(range(4), dp=4, balance="tokens"), at(range(4), dp=4, mini_batches=3)),
        (at([1, 2], dp=2, balance="tokens"), at([1, 2], dp=2, balance="tokens")),
    ],
    ids=["one-to-one", "fewer", "overlapping", "by-tokens", "same-mesh", "equal"],
)
def test_every_head_gets_its_samples_bit_by_bit_and_nothing_twice(ranks, source, destination):
    results = ranks.run(4, move, source, destination)

    assert [(has, kept) for has, kept, _ in results] == [(True, True)] * 4
    assert sum(sent for _, _, sent in results) == lacking_bytes(source, destination)


def move_partly(rank, world) -> tuple[bool, int]:
    """Head 1 has the tokens already; only what it lacks of the two keys is sent."""
    source, destination = at([0]), at([1])
    groups = ProcessGroups([(0, 1)], 240.0, torch.device("cpu"))
    store = SampleStore()
    store.put(batch(IDS) if rank == 0 else batch(IDS, ["input_ids"]))
    sent = redistribute(source, destination, IDS, ["input_ids", "scores"], store, groups, 2)
    return holds(store, IDS, ["input_ids", "scores"]), sent


@pytest.mark.dist
def test_a_key_that_is_there_is_not_sent(ranks):
    assert ranks.run(2, move_partly) == [(True, 4 * len(IDS)), (True, 0)]


def move_missing(rank, world, held) -> str:
    source, destination = at([0]), at([1])
    groups = ProcessGroups([(0, 1)], 240.0, torch.device("cpu"))
    store = SampleStore()
    if rank == 0 and held:
        store.put(batch(IDS[:-1]))
    try:
        redistribute(source, destination, IDS, ["values"], store, groups, 2)
    except LookupError as error:
        return str(error)
    return ""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("held", "message"),
    [
        (True, "key 'values': no head holds sample 52, which the head on device 1 needs"),
        (False, "key 'values': none of the heads [0, 1] holds a sample of it"),
    ],
)
def test_a_missing_sample_is_an_error_on_every_head(ranks, held, message):
    assert ranks.run(2, move_missing, held) == [message] * 2


def share(rank: int, world: int, placement: Placement) -> SampleBatch:
    groups = ProcessGroups(device_sets(placement), 240.0, torch.device("cpu"))
    mine = mixed(placement.coordinate(rank).dp) if rank in placement.heads else None
    return share_batch(mine, placement, groups)


def mixed(dp_rank: int) -> SampleBatch:
    """Keys of several dtypes, whose bytes do not end where the next dtype may start. dp rank 1 has no samples."""
    ids = () if dp_rank else (7, 8)
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
    placement = Placement((2, 0, 3, 1), ParallelStrategy(dp=2, tp=1, pp=2))
    for rank, shared in enumerate(ranks.run(4, share, placement)):
        whole = mixed(placement.coordinate(rank).dp)
        assert shared.ids == whole.ids
        assert list(shared.data) == list(whole.data)
        for key, packed in whole.data.items():
            assert shared[key].lengths == packed.lengths, key
            torch.testing.assert_close(shared[key].values, packed.values, rtol=0, atol=0)
