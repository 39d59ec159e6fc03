"""State is read in another layout: every element once, from nearby where it can, and replicas keep their own bits."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import StateLayout
from prefect_rlhf.rlhf_tasks.parallel.train.state_files import StateTransfer, read_shards, write_shards
from tests.rlhf_tasks.roles_in_layouts import (
    FOUR,
    build,
    fill,
    model,
    place,
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
        takes = list(transfer.taken(name, device))
        taken = [cell for s, part in takes for cell in cells(transfer.old, name, s, part)]
        assert len(taken) == wanted.size
        assert len(set(taken)) == len(taken)
        for _, part in takes:
            cells(transfer.new, name, device, part)


@given(layouts())
def test_what_a_device_has_it_takes_from_itself(pair):
    transfer = StateTransfer(*map(StateLayout, pair))
    for name, device in itertools.product(pair[0].specs, pair[1].placement.devices):
        if device not in pair[0].placement.devices:
            continue
        for source, part in transfer.taken(name, device):
            if device != source and transfer.old.range(name, device).size:
                mine = transfer.old.rectangles(name, device)
                assert [part.intersect(own) for own in mine] == [None] * len(mine)


def test_replicas_take_turns_in_giving():
    """Norms are whole on every tp rank: not one rank alone gives them to all newcomers."""
    old, new = place(range(4), tp=4), place(range(4, 8), pp=2, tp=2)
    transfer = StateTransfer(*(StateLayout(Layout(model(), "lm", placement)) for placement in (old, new)))
    norms = [name for name, spec in transfer.old.layout.specs.items() if spec.unit is None]
    givers = {
        source for name in norms for device in range(4, 8) for source, _ in transfer.taken(name, device)
    }
    assert givers == {0, 1, 2, 3}


def drifted(rank, world, folder, shape, placements) -> list[str]:
    """Replicas whose bits differ, as sums in another order make them. Gives what was wrong on this rank."""
    sets = [range(world), *(s for p in placements for s in device_sets(p))]
    groups = ProcessGroups(sets, 240.0, torch.device("cpu"))
    whole = whole_state(Layout(shape, "lm", placements[0]), torch.float32)
    wrong = []
    for number, placement in enumerate(placements):
        layout, own = Layout(shape, "lm", placement), []
        if rank in placement.devices:
            role = build(layout, groups, torch.float32)
            fill(role, whole)
            own = [s._replace(tensor=s.tensor + rank) for s in role.master.shard_state()]
            write_shards(Path(folder) / f"{number}-{rank}", rank, own)
        dist.barrier()
        files = sorted(Path(folder).glob(f"{number}-*"))
        for mine, read in zip(own, read_shards(files, layout, layout, rank, own), strict=True):
            if not torch.equal(mine.tensor, read.tensor):
                wrong.append(f"{placement}: a replica has another's bits")
    return wrong


@pytest.mark.dist
@pytest.mark.whole
def test_replicas_keep_their_own_bits(ranks, tmp_path):
    """KV heads on several tp ranks, norms on all, and embeddings on both ends of a pipeline."""
    assert ranks.run(4, drifted, str(tmp_path), model(tied=True), FOUR) == [[]] * 4
