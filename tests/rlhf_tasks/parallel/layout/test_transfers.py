from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import (
    mini_batch_blocks,
    partition,
    plan_reallocation,
    plan_redistribution,
    reallocation_bound,
    shares,
)
from prefect_rlhf.rlhf_tasks.spec import DataSide


def layout(shape: ModelShape, devices, dp=1, tp=1, pp=1, head="lm", cp=1) -> Layout:
    return Layout(shape, head, Placement(tuple(devices), ParallelStrategy(dp, tp, pp, cp)))


def model(query=6, kv=2, layers=3, tied=False) -> ModelShape:
    return ModelShape(
        "qwen3", 8, layers, query, kv, 2, 10, 17, 64, tied=tied, qkv_bias=True, qk_norm="each head"
    )


@st.composite
def layout_pairs(draw) -> tuple[Layout, Layout]:
    """Two layouts of one model on any devices of 16: disjoint, overlapping or equal meshes, in any order."""
    kv = draw(st.integers(1, 3))
    shape = model(kv * draw(st.integers(1, 3)), kv, draw(st.integers(1, 4)), draw(st.booleans()))
    head = draw(st.sampled_from(["lm", "scalar"]))
    pair = []
    for _ in range(2):
        dp = draw(st.integers(1, 3))
        tp = min(draw(st.integers(1, 4)), shape.query_heads)
        pp = 1 if dp * tp > 8 else min(draw(st.integers(1, 2)), shape.layers)
        cp = 1 if dp * tp * pp > 8 else min(draw(st.integers(1, 2)), shape.query_heads // tp)
        devices = draw(st.permutations(range(16)))[: dp * tp * pp * cp]
        pair.append(layout(shape, devices, dp, tp, pp, head, cp))
    return pair[0], pair[1]


def rows_of(lay: Layout, device: int) -> set[tuple[str, int]]:
    if device not in lay.placement.devices:
        return set()
    return {(name, row) for name, rows in lay.held(device).items() for row in range(*rows)}


def rows_sent(lay: Layout, transfer) -> list[tuple[str, int]]:
    return [
        (name, row)
        for names, rows in transfer.slices
        for name in names
        for row in range(*(rows or (0, lay.specs[name].length)))
    ]


@given(layout_pairs(), st.sampled_from([1, 2, 4, 16]))
def test_a_reallocation_gives_every_device_exactly_what_it_lacks(pair, devices_per_host):
    source, destination = pair
    transfers = plan_reallocation(source, destination, 4, devices_per_host)

    received = {device: Counter() for device in destination.placement.devices}
    for transfer in transfers:
        rows = rows_sent(source, transfer)
        assert set(rows) <= rows_of(source, transfer.source)
        assert transfer.size_bytes == sum(4 * source.specs[name].row_size for name, _ in rows)
        received[transfer.destination].update(rows)
    for device in destination.placement.devices:
        lacking = rows_of(destination, device) - rows_of(source, device)
        assert received[device] == Counter(lacking)
    assert sum(t.size_bytes for t in transfers) == reallocation_bound(source, destination, 4)
    pairs = [(t.source, t.destination) for t in transfers]
    assert pairs == sorted(set(pairs))


@given(layout_pairs(), st.sampled_from([1, 2, 4]))
def test_what_a_host_has_is_never_fetched_from_another(pair, devices_per_host):
    source, destination = pair
    on_host = {}
    for device in source.placement.devices:
        on_host.setdefault(device // devices_per_host, set()).update(rows_of(source, device))
    for t in plan_reallocation(source, destination, 4, devices_per_host):
        host = t.destination // devices_per_host
        if t.source // devices_per_host != host:
            assert not on_host.get(host, set()) & set(rows_sent(source, t))


@pytest.mark.parametrize(("replicas", "copies"), [(4, 1), (4, 2), (3, 2), (2, 4), (4, 3), (2, 1)])
def test_holders_share_the_load(replicas, copies):
    """`replicas` whole models feed `copies` new ones: each sends its share, within 5%."""
    shape = ModelShape("llama", 64, 4, 4, 2, 16, 96, 128, 64)
    source = layout(shape, range(replicas), dp=replicas)
    destination = layout(shape, range(8, 8 + copies), dp=copies)

    sent = Counter()
    for transfer in plan_reallocation(source, destination, 4, 16):
        sent[transfer.source] += transfer.size_bytes

    fair = reallocation_bound(source, destination, 4) / replicas
    assert all(abs(sent[device] / fair - 1) < 0.05 for device in range(replicas)), (sent, fair)


def test_equal_layouts_move_nothing_and_a_narrower_one_neither():
    shape = model()

    def moved(a, b):
        return plan_reallocation(a, b, 4, 4)

    assert moved(layout(shape, [3, 1], tp=2), layout(shape, [3, 1], tp=2)) == ()
    assert moved(layout(shape, range(4), dp=4), layout(shape, range(4), tp=2, dp=2)) == ()
    assert moved(layout(shape, [3, 1], tp=2), layout(shape, [1, 3], tp=2)) != ()


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ((16, 8, 8), (32, 8, 4)),
        ((16, 8, 8), (256, 4, 1)),
        ((1024, 1, 1), (1, 64, 16)),
        ((64, 1, 16), (16, 8, 8)),
    ],
)
def test_a_thousand_ranks_move_the_least_bytes(source, destination):
    llama_70b = ModelShape("llama", 8192, 80, 64, 8, 128, 28672, 32000, 4096)
    before, after = layout(llama_70b, range(1024), *source), layout(llama_70b, range(1024), *destination)

    plan = plan_reallocation(before, after, 2, 8)

    assert sum(transfer.size_bytes for transfer in plan) == reallocation_bound(before, after, 2)


# Samples


def side(*devices: int, **how) -> DataSide:
    """Samples on heads of one device each."""
    return DataSide(placement=Placement(devices, ParallelStrategy(dp=len(devices))), **how)


@given(
    st.integers(0, 20),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["count", "tokens"]),
    st.data(),
)
def test_a_partition_deals_each_group_once_and_mini_batches_evenly(n, dp, mini_batches, size, balance, data):
    first = 60 * size
    ids = range(first, first + n * size)
    lengths = {i: data.draw(st.integers(1, 50)) for i in ids}

    dealt = partition(ids, dp, balance, mini_batches, lengths, size)

    assert sorted(i for share in dealt for i in share) == list(ids)
    for block in mini_batch_blocks(ids, mini_batches, size):
        of_block = [[i for i in share if i in block] for share in dealt]
        assert all(share == sorted(share) for share in of_block)
        groups = [Counter(i // size for i in share) for share in of_block]
        assert all(count == size for of_rank in groups for count in of_rank.values())
        if balance == "count":
            assert max(map(len, groups)) - min(map(len, groups)) <= 1
        else:
            tokens = [sum(lengths[i] for i in share) for share in of_block]
            largest = max(
                (sum(lengths[i] for i in block[at : at + size]) for at in range(0, len(block), size)),
                default=0,
            )
            assert max(tokens) - min(tokens) <= largest


def test_who_gets_which_sample():
    """The rule of docs/architecture.md, on numbers."""
    assert partition(range(10, 20), 2) == [[10, 12, 14, 16, 18], [11, 13, 15, 17, 19]]
    assert partition(range(10, 20), 2, "count", 3) == [[10, 12, 13, 15, 16, 18], [11, 14, 17, 19]]
    lengths = {0: 9, 1: 1, 2: 4, 3: 5}
    assert partition(range(4), 2, "tokens", 1, lengths) == [[0, 1], [2, 3]]
    assert mini_batch_blocks(range(5), 2) == [[0, 1], [2, 3, 4]]


def test_groups_stay_whole():
    assert partition(range(10, 20), 2, group_size=2) == [[10, 11, 14, 15, 18, 19], [12, 13, 16, 17]]
    assert mini_batch_blocks(range(10), 2, 2) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    lengths = {0: 9, 1: 1, 2: 4, 3: 5, 4: 9, 5: 9, 6: 1, 7: 1}
    assert partition(range(8), 2, "tokens", 1, lengths, 2) == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_an_equal_side_needs_no_transfer():
    equal = side(2, 5, 3, mini_batches=2)
    held = shares(equal, range(20))

    assert set(held) == {2, 5, 3}
    assert plan_redistribution(held, shares(equal, range(20)), 4, "a key") == []


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(1, 8))
def test_a_redistribution_brings_each_head_what_it_lacks(n, dp_from, dp_to, first, devices_per_host):
    held = shares(side(*range(dp_from)), range(n))
    newcomers = side(*range(first, first + dp_to), balance="tokens", mini_batches=2)
    wanted = shares(newcomers, range(n), {i: i + 1 for i in range(n)})

    got = {device: Counter(set(held.get(device, ())) & set(ids)) for device, ids in wanted.items()}
    for transfer in plan_redistribution(held, wanted, devices_per_host, "a key"):
        assert set(transfer.ids) <= set(held[transfer.source])
        got[transfer.destination].update(transfer.ids)

    assert got == {device: Counter(ids) for device, ids in wanted.items()}


def test_a_sample_on_several_heads_comes_from_the_same_host():
    held = {0: [7, 8], 4: [7, 8]}

    assert {t.source for t in plan_redistribution(held, {5: [7, 8]}, 4, "a key")} == {4}
    assert [(t.source, t.ids) for t in plan_redistribution(held, {9: [7, 8]}, 4, "a key")] == [
        (0, (7,)),
        (4, (8,)),
    ]


def test_a_sample_that_no_head_holds_is_named():
    with pytest.raises(LookupError, match="sample 3, which the head on device 1 needs"):
        plan_redistribution({0: [1, 2]}, {1: [2, 3]}, 4, "a key")
