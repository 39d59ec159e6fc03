"""Parameters from one layout to another, bit by bit."""

from itertools import permutations

import pytest
import torch
import torch.distributed as dist

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.comm.reallocation import digest, reallocate, union_set
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import StateLayout
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import reallocation_bound
from tests.rlhf_tasks.roles_in_layouts import ADAPTERS, model, place
from tests.tiny_models import held_slices

PLACEMENTS = [
    place([0]),
    place([1, 0], tp=2),
    place([2, 3], pp=2),
    place([0, 1], dp=2),
    place([3, 1, 2], tp=3),
    place(range(4), dp=2, tp=2),
    place([1, 3, 0, 2], tp=2, pp=2),
    place(range(4), tp=4),
    place([3, 2, 1, 0], dp=2, pp=2),
    place([1, 0, 2, 3], tp=2, cp=2),
]
SHARDED = [
    place([0, 1], dp=2, shard="parameters"),
    place([2, 3, 0, 1], dp=2, tp=2, shard="parameters"),
    place(range(4), dp=4, shard="parameters"),
]


def whole_model(
    shape: ModelShape, head: str, dtype=torch.float32, lora: Lora | None = None
) -> dict[str, torch.Tensor]:
    """Random *bits*, so that NaNs, infinities and negative zeros are among the values."""
    generator = torch.Generator().manual_seed(7)
    lay = Layout(shape, head, place([0]), lora)
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    limits = torch.iinfo(bits)
    return {
        spec.name: torch.randint(limits.min, limits.max, spec.shape, dtype=bits, generator=generator).view(
            dtype
        )
        for spec in lay.parameters
    }


def cut(whole: dict[str, torch.Tensor], lay: Layout, device: int) -> dict[str, torch.Tensor] | None:
    """What a device holds: its slices, or its ranges of them."""
    if device not in lay.placement.devices:
        return None
    slices = held_slices(lay, device, whole)
    if lay.weight_shares == 1:
        return slices
    return {
        name: slices[name].flatten()[start:stop] for name, start, stop, _ in StateLayout(lay).kept(device)
    }


def fewest_bytes(source: Layout, destination: Layout, whole: dict[str, torch.Tensor]) -> int:
    """Of elements that the destination's devices lack, told apart by numbers in place of the weights."""
    first, numbered = 0, {}
    for name, values in whole.items():
        numbered[name] = torch.arange(first, first + values.numel()).view(values.shape)
        first += values.numel()

    def has(lay: Layout, device: int) -> set[int]:
        slices = cut(numbered, lay, device) or {}
        return {int(number) for values in slices.values() for number in values.flatten()}

    itemsize = next(iter(whole.values())).itemsize
    places = destination.placement.devices
    return itemsize * sum(len(has(destination, device) - has(source, device)) for device in places)


def same_bits(ours, theirs) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return ours.keys() == theirs.keys() and all(
        ours[n].shape == theirs[n].shape
        and torch.equal(ours[n].flatten().view(torch.uint8), theirs[n].flatten().view(torch.uint8))
        for n in ours
    )


def there_and_back(rank, world, shape, head, placements, dtype, round_bytes, lora=None) -> list[str]:
    """A -> B -> A for every ordered pair. Gives the pairs that went wrong on this rank."""
    layouts = [Layout(shape, head, p, lora) for p in placements]
    sets = {union_set(a, b) for a in placements for b in placements}
    groups = ProcessGroups(sets, 240.0, torch.device("cpu"))
    whole, wrong = whole_model(shape, head, dtype, lora), []

    def fewest(a: Layout, b: Layout) -> int:
        if a.weight_shares > 1 or b.weight_shares > 1:
            return fewest_bytes(a, b, whole)
        return reallocation_bound(a, b, dtype.itemsize)

    for a, b in permutations(layouts, 2):
        if rank not in union_set(a.placement, b.placement):
            continue
        there = reallocate(
            a, b, cut(whole, a, rank), dtype, groups, 2, 5, {"kl": 0.1}, round_bytes=round_bytes
        )
        back = reallocate(b, a, there.slices, dtype, groups, 2, there.version, there.state)
        sent = torch.tensor([there.bytes_sent])
        dist.all_reduce(sent, group=groups[union_set(a.placement, b.placement)])
        good = (
            same_bits(there.slices, cut(whole, b, rank))
            and same_bits(back.slices, cut(whole, a, rank))
            and int(sent) == fewest(a, b)
            and (back.version, back.state) == (5, {"kl": 0.1})
            and there.digest == back.digest
        )
        wrong += [] if good else [f"{a.placement} -> {b.placement} on rank {rank}"]
    return wrong


@pytest.mark.dist
@pytest.mark.parametrize(
    ("shape", "head", "dtype"),
    [
        (model(), "lm", torch.float32),
        pytest.param(model(tied=True), "lm", torch.bfloat16, marks=pytest.mark.whole),
        pytest.param(
            model(tied=True, qkv_bias=True, out_bias=True), "scalar", torch.float32, marks=pytest.mark.whole
        ),
        pytest.param(
            model(family="qwen3_moe", experts=3, experts_per_token=2),
            "lm",
            torch.bfloat16,
            marks=pytest.mark.whole,
        ),
    ],
    ids=["lm", "tied-uneven-bf16", "value-head-biases", "experts-bf16"],
)
def test_a_to_b_to_a_is_bit_equal_and_moves_no_more_than_it_must(ranks, shape, head, dtype):
    assert ranks.run(4, there_and_back, shape, head, PLACEMENTS, dtype, 2**28) == [[]] * 4


@pytest.mark.dist
@pytest.mark.parametrize(
    "shape", [model(), pytest.param(model(tied=True, qkv_bias=True), marks=pytest.mark.whole)]
)
def test_shares_of_weights_move_to_any_layout_and_back(ranks, shape):
    some = [PLACEMENTS[i] for i in (0, 3, 5, 6)]

    assert ranks.run(4, there_and_back, shape, "lm", [*SHARDED, *some], torch.bfloat16, 2**28) == [[]] * 4


@pytest.mark.dist
def test_adapters_move_alone(ranks):
    """The same of what trains beside a frozen model: A and B of linear modules, and a value head."""
    how = (PLACEMENTS, torch.bfloat16, 2**28, ADAPTERS)
    assert ranks.run(4, there_and_back, model(), "scalar", *how) == [[]] * 4


@pytest.mark.dist
def test_adapters_are_whole_where_the_weights_below_are_sharded(ranks):
    some = [PLACEMENTS[i] for i in (0, 3, 5)]
    how = ([*SHARDED, *some], torch.bfloat16, 2**28, ADAPTERS)

    assert ranks.run(4, there_and_back, model(), "scalar", *how) == [[]] * 4


@pytest.mark.dist
def test_a_share_may_have_no_element(ranks):
    """Of 24 elements, a first share of 16 leaves none for the last of four ranks."""
    one = {"query_heads": 1, "kv_heads": 1, "layers": 1, "hidden": 1, "head_dim": 2, "intermediate": 1}
    shape = ModelShape(family="llama", vocab=1, context=8, qk_norm=None, **one)
    places = [SHARDED[2], place([0])]

    assert ranks.run(4, there_and_back, shape, "lm", places, torch.float32, 2**28) == [[]] * 4


@pytest.mark.dist
def test_messages_longer_than_a_round(ranks):
    some = [PLACEMENTS[i] for i in (0, 4, 6)]

    assert ranks.run(4, there_and_back, model(), "lm", some, torch.float32, 100) == [[]] * 4


def copy_is_fresh(rank, world) -> bool:
    lay = Layout(model(), "lm", place([0]))
    groups = ProcessGroups([(0,)], 240.0, torch.device("cpu"))
    slices = cut(whole_model(lay.shape, "lm"), lay, 0)
    copied = reallocate(lay, lay, slices, torch.float32, groups, 1)
    return all(copied.slices[n].data_ptr() != slices[n].data_ptr() for n in slices) and not copied.bytes_sent


@pytest.mark.dist
def test_a_copy_on_the_same_placement_shares_no_memory(ranks):
    assert ranks.run(1, copy_is_fresh) == [True]


def replicas_differ(rank, world) -> str:
    """dp rank 1 of the source has drifted from dp rank 0."""
    source, destination = Layout(model(), "lm", place([0, 1], dp=2)), Layout(model(), "lm", place([2]))
    groups = ProcessGroups([(0, 1, 2)], 240.0, torch.device("cpu"))
    slices = cut(whole_model(model(), "lm"), source, rank)
    if rank == 1:
        slices = {name: torch.zeros_like(tensor) for name, tensor in slices.items()}
    try:
        reallocate(source, destination, slices, torch.float32, groups, 4)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_source_replicas_that_differ_are_noticed_on_every_rank(ranks):
    for message in ranks.run(3, replicas_differ):
        assert "has other bits on ranks [2] than on ranks [0, 1], from which it came" in message


def total(whole, lay: Layout) -> int:
    last = lay.placement.strategy
    copy = [
        d
        for d in lay.placement.devices
        if (at := lay.placement.coordinate(d)).dp + 1 == last.dp and at.cp + 1 == last.cp
    ]
    parts = [int(digest(cut(whole, lay, d), lay, d)) for d in copy]
    return sum(parts) % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_depends_on_the_bits_and_not_on_the_layout(dtype):
    shape = model(tied=True)
    whole = whole_model(shape, "lm", dtype)

    digests = {total(whole, Layout(shape, "lm", p)) for p in PLACEMENTS}
    for place_of_shares in SHARDED:
        lay = Layout(shape, "lm", place_of_shares)
        shares = [int(digest(cut(whole, lay, d), lay, d)) for d in place_of_shares.devices]
        digests.add(sum(shares) % 2**64)

    assert len(digests) == 1
    name = "model.layers.1.mlp.down_proj.weight"
    one = Layout(shape, "lm", place([0]))
    other = "model.layers.2.mlp.down_proj.weight"
    flipped = whole[name].clone()
    flipped.view(torch.uint8)[3, 0] ^= 1
    assert total({**whole, name: flipped}, one) not in digests
    assert total({**whole, name: whole[name].flip(one.specs[name].dim)}, one) not in digests
    assert total({**whole, name: whole[other], other: whole[name]}, one) not in digests
