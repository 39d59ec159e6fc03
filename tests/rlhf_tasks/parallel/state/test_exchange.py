"""State goes from rank to rank: every element once, from nearby where it can, and bit by bit."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.state.exchange import exchange_state
from rlhf_tasks.parallel.state.files import read_shards, write_shards
from rlhf_tasks.parallel.state.transfer import StateTransfer
from rlhf_tasks.parallel.train.state_layout import StateLayout
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
    transfer = StateTransfer(StateLayout(old), StateLayout(new))
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
    transfer = StateTransfer(*map(StateLayout, pair))
    for name, device in itertools.product(pair[0].specs, pair[1].placement.devices):
        if device not in pair[0].placement.devices:
            continue
        for source, destination, part in transfer.parts(name, device):
            if destination == device != source and transfer.old.range(name, device).size:
                mine = transfer.old.rectangles(name, device)
                assert [part.intersect(own) for own in mine] == [None] * len(mine)


@given(layouts())
def test_both_ends_of_a_pair_list_the_same_parts_in_the_same_order(pair):
    transfer = StateTransfer(*map(StateLayout, pair))
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
    old, new = place(range(4), tp=4), place(range(4, 8), pp=2, tp=2)
    transfer = StateTransfer(*(StateLayout(Layout(model(), "lm", placement)) for placement in (old, new)))
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
            kept = list(giver.master.shard_state())
        if rank in after.devices:
            role = build(new, groups, dtype)
        wanted = list(role.master.shard_state()) if role else []
        shards = exchange_state(
            StateTransfer(StateLayout(old), StateLayout(new)), kept, wanted, groups, range(world)
        )
        if role:
            role.master.load_shard_state(shards, 21)
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


def drifted(rank, world, folder, shape, placements) -> list[str]:
    """Replicas whose bits differ, as sums in another order make them. Gives what was wrong on this rank."""
    sets = [range(world), *(s for p in placements for s in device_sets(p))]
    groups = ProcessGroups(sets, 240.0, torch.device("cpu"))
    whole = whole_state(Layout(shape, "lm", placements[0]), torch.float32)
    wrong = []
    for number, (before, after) in enumerate(itertools.product(placements, repeat=2)):
        old, new = Layout(shape, "lm", before), Layout(shape, "lm", after)
        kept, wanted = [], []
        if rank in before.devices:
            giver = build(old, groups, torch.float32)
            fill(giver, whole)
            kept = [s._replace(tensor=s.tensor + rank) for s in giver.master.shard_state()]
            write_shards(Path(folder) / f"{number}-{rank}", rank, kept)
        dist.barrier()
        if rank in after.devices:
            wanted = list(build(new, groups, torch.float32).master.shard_state())
        transfer = StateTransfer(StateLayout(old), StateLayout(new))
        exchanged = list(exchange_state(transfer, kept, wanted, groups, range(world)))
        files = sorted(Path(folder).glob(f"{number}-*"))
        own = {(s.name, s.kind): s.tensor for s in kept}
        read = {(s.name, s.kind): s.tensor for s in read_shards(files, old, new, rank, wanted)}
        for shard in exchanged:
            if not torch.equal(shard.tensor, read[shard.name, shard.kind]):
                wrong.append(f"{before} -> {after}: {shard.name} from ranks and from files")
            if before == after and not torch.equal(shard.tensor, own[shard.name, shard.kind]):
                wrong.append(f"{before}: a replica has another's bits")
    return wrong


@pytest.mark.dist
@pytest.mark.whole
def test_replicas_keep_their_own_bits_and_files_give_what_ranks_give(ranks, tmp_path):
    """KV heads on several tp ranks, norms on all, and embeddings on both ends of a pipeline."""
    assert ranks.run(4, drifted, str(tmp_path), model(tied=True), FOUR) == [[]] * 4
