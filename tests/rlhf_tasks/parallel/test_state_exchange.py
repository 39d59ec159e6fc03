"""State goes from rank to rank: every element once, from nearby where it can, and bit by bit."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_tasks.parallel.groups import ProcessGroups, device_sets
from rlhf_tasks.parallel.layout import Layout
from rlhf_tasks.parallel.state_exchange import StateTransfer, exchange_state
from tests.rlhf_tasks.roles_in_layouts import (
    FOUR,
    build,
    fill,
    mismatches,
    model,
    place,
    precise,
    whole_state,
)


@st.composite
def layouts(draw):
    """Two layouts of one model on some of 8 devices, in any order."""
    shape, head = model(tied=draw(st.booleans())), draw(st.sampled_from(["lm", "scalar"]))
    pair = []
    for _ in range(2):
        dp, tp, pp = draw(
            st.sampled_from(
                [s for s in itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2, 3)) if s[0] * s[1] * s[2] <= 8]
            )
        )
        devices = draw(st.permutations(range(8)))[: dp * tp * pp]
        pair.append(Layout(shape, head, place(devices, dp, tp, pp)))
    return pair


def cells(layout, name, device, part):
    """The elements (row, column) of the whole parameter that a rectangle has, if the device has their state."""
    columns, held = layout.columns(name, device), layout.range(name, device)
    found = set(itertools.product(range(part.top, part.bottom), range(part.left, part.right)))
    for row, column in found:
        at = row * columns.width + column - columns.first
        assert columns.first <= column < columns.interval.stop, "outside the slice"
        assert held.start <= at < held.stop, "another dp rank's share"
    return found


@given(layouts())
def test_every_element_of_a_new_share_is_taken_once_from_a_device_that_has_it(pair):
    old, new = pair
    transfer = StateTransfer(old, new)
    for name, device in itertools.product(old.specs, new.placement.devices):
        wanted = transfer.new.range(name, device)
        takes = [part for part in transfer.parts(name, device) if part.destination == device]
        taken = [cell for s, _, part in takes for cell in cells(transfer.old, name, s, part)]
        assert len(taken) == wanted.size
        assert len(set(taken)) == len(taken)
        for _, _, part in takes:
            cells(transfer.new, name, device, part)


@given(layouts())
def test_what_a_device_has_it_takes_from_itself(pair):
    transfer = StateTransfer(*pair)
    for name, device in itertools.product(pair[0].specs, pair[1].placement.devices):
        if device not in pair[0].placement.devices:
            continue
        for source, destination, part in transfer.parts(name, device):
            if destination == device != source and transfer.old.range(name, device).size:
                mine = transfer.old.rectangles(name, device)
                assert [part.intersect(own) for own in mine] == [None] * len(mine)


@given(layouts())
def test_both_ends_of_a_pair_list_the_same_parts_in_the_same_order(pair):
    transfer = StateTransfer(*pair)
    for name in pair[0].specs:
        listed = {
            device: list(transfer.parts(name, device))
            for device in {*pair[0].placement.devices, *pair[1].placement.devices}
        }
        for source, destination in itertools.product(listed, repeat=2):
            ends = [
                [part for part in listed[end] if part[:2] == (source, destination)]
                for end in (source, destination)
            ]
            assert ends[0] == ends[1]


def test_replicas_take_turns_in_giving():
    """Norms are whole on every tp rank: not one rank alone gives them to all newcomers."""
    transfer = StateTransfer(
        Layout(model(), "lm", place(range(4), tp=4)), Layout(model(), "lm", place(range(4, 8), pp=2, tp=2))
    )
    norms = [name for name, spec in transfer.old.layout.specs.items() if spec.unit is None]
    givers = {
        source for name in norms for device in range(4, 8) for source, _, _ in transfer.parts(name, device)
    }
    assert givers == {0, 1, 2, 3}


def moved(rank, world, shape, head, dtype, placements) -> list[str]:
    """Go from each layout to the next. Gives what was wrong on this rank."""
    sets = [range(world), *(s for p in placements for s in device_sets(p))]
    groups = ProcessGroups(sets, 240.0, torch.device("cpu"))
    whole = whole_state(Layout(shape, head, placements[0]), precise(dtype))
    wrong = []
    for before, after in itertools.pairwise(placements):
        old, new = Layout(shape, head, before), Layout(shape, head, after)
        kept, role = [], None
        if rank in before.devices:
            giver = build(old, groups, dtype)
            fill(giver, whole)
            kept = list(giver.optimizer.shard_state())
        if rank in after.devices:
            role = build(new, groups, dtype)
        wanted = list(role.optimizer.shard_state()) if role else []
        shards = exchange_state(StateTransfer(old, new), kept, wanted, groups, range(world))
        if role:
            role.optimizer.load_shard_state(shards, 21)
            wrong += mismatches(role, whole, rank)
        else:
            assert list(shards) == []
    return wrong


@pytest.mark.dist
@pytest.mark.parametrize(
    ("shape", "head", "dtype"),
    [
        (model(), "lm", torch.float32),
        (model(tied=True), "lm", torch.bfloat16),
        (model(tied=True, qkv_bias=True, out_bias=True), "scalar", torch.float64),
    ],
    ids=["untied", "tied-bf16", "value-head"],
)
def test_state_arrives_bit_by_bit_in_any_layout(ranks, shape, head, dtype):
    there_and_back = [*FOUR, *FOUR[::-2], FOUR[0]]
    assert ranks.run(4, moved, shape, head, dtype, there_and_back) == [[]] * 4


def lacking(rank, world):
    groups = ProcessGroups([range(world)], 240.0, torch.device("cpu"))
    layout = Layout(model(layers=1), "lm", place([0]))
    role = build(layout, groups, torch.float32)
    wanted = [shard._replace(stop=shard.stop + 5) for shard in role.optimizer.shard_state()]
    transfer = StateTransfer(layout, layout)
    try:
        list(exchange_state(transfer, role.optimizer.shard_state(), wanted, groups, range(world)))
    except ValueError as error:
        return str(error)


def test_elements_that_no_rank_has_are_named(ranks):
    (said,) = ranks.run(1, lacking)
    assert said == "the ranks lack 5 elements of master of model.embed_tokens.weight"
