"""Brings a role's training state from one layout to another, from rank to rank: master weights and both moments."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from rlhf_tasks.parallel.groups import ProcessGroups
from rlhf_tasks.parallel.layout import Interval, Layout
from rlhf_tasks.parallel.messages import Blank, exchange
from rlhf_tasks.parallel.optimizer import StateKind, StateShard
from rlhf_tasks.parallel.state_layout import Rectangle, StateLayout


class StatePart(NamedTuple):
    """A rectangle of one parameter's state, which a destination takes from a source (device ids)."""

    source: int
    destination: int
    part: Rectangle


class StateTransfer:
    """Which device gives which part of a role's state to which, between two layouts. Pure: equal on all ranks."""

    def __init__(self, old: Layout, new: Layout) -> None:
        assert (old.shape, old.head) == (new.shape, new.head), "two different models"
        self.old, self.new = StateLayout(old), StateLayout(new)

    def parts(self, name: str, device: int) -> Iterator[StatePart]:
        """The parts of a parameter that a device gives or takes, in an order in which both ends list them.

        A destination takes every element of its range once: from itself what it has, then from its own dp
        group, then from the others that hold the parameter, where each destination begins with another.
        """
        old, new = self.old.layout.placement.devices, self.new.layout.placement.devices
        destinations: Iterable[int] = (device,) if device in new else ()
        if device in old and self.old.range(name, device).size:
            destinations = [destination for destination, _ in self.new.layout.owners(name)]
        for destination in destinations:
            if not self.new.range(name, destination).size:
                continue
            into, target = self.new.rectangles(name, destination), self.new.columns(name, destination)
            for group, columns in self._givers(name, destination, target.interval):
                for source in group if device == destination else {device}.intersection(group):
                    for part in _common(self.old.rectangles(name, source), into, columns):
                        yield StatePart(source, destination, part)

    def _givers(
        self, name: str, destination: int, wanted: Interval
    ) -> Iterator[tuple[Sequence[int], list[Interval]]]:
        """Dp groups of the old layout, and the columns that a destination takes from each: every column once."""
        layout = self.old.layout
        place, stages = layout.placement, layout.stages(layout.specs[name])
        axes = place.strategy
        at = [(t, p) for p in stages for t in range(axes.tp)]
        groups = [tuple(place.device(d, t, p) for d in range(axes.dp)) for t, p in at]
        first = destination % len(groups)
        left = [wanted]
        for group in sorted(groups[first:] + groups[:first], key=lambda group: destination not in group):
            held = self.old.columns(name, group[0]).interval
            common = [piece.intersect(held) for piece in left]
            yield group, [columns for columns in common if columns.size]
            left = [rest for piece in left for rest in _without(piece, held) if rest.size]


def exchange_state(
    transfer: StateTransfer,
    kept: Iterable[StateShard],
    wanted: Iterable[StateShard],
    groups: ProcessGroups,
    devices: Sequence[int],
) -> Iterator[StateShard]:
    """Give and take one role's state, bit by bit. Collective over both placements.

    kept     this rank's state in the old layout, on any device; none on a rank outside it
    wanted   which shards it takes; their contents are not touched
    devices  whose group has the ranks of both placements in it
    Yields the wanted shards one by one as they come: every rank must go through to the end, one without any
    included. Raises ValueError when elements are lacking.
    """
    held = {(shard.name, shard.kind): shard for shard in kept}
    asked = {(shard.name, shard.kind): shard for shard in wanted}
    if not held and not asked:
        return
    kinds: tuple[StateKind, ...] = get_args(StateKind)
    rank, group = groups.rank, groups[devices]
    for name in transfer.old.layout.specs:
        parts = list(transfer.parts(name, rank))
        gives = [part for part in parts if part.source == rank]
        takes = [part for part in parts if part.destination == rank]
        for kind in kinds if parts else ():
            outgoing = _outgoing(transfer.old, gives, held.get((name, kind)), groups)
            ours = {rank: outgoing.pop(rank, [])}
            shard = asked.get((name, kind))
            arrived = exchange(outgoing, _incoming(takes, shard, rank), group, groups.device) | ours
            if shard is not None:
                yield _assemble(transfer.new, takes, shard, arrived, rank)


def _outgoing(
    old: StateLayout, gives: Iterable[StatePart], held: StateShard | None, groups: ProcessGroups
) -> dict[int, list[Tensor]]:
    """What this rank gives: device (itself included) -> rectangles."""
    tensors: dict[int, list[Tensor]] = defaultdict(list)
    for _, destination, part in gives:
        assert held is not None
        view = old.columns(held.name, groups.rank).view(held.tensor, held.start, part)
        tensors[destination].append(view.to(groups.device))
    return tensors


def _incoming(takes: Iterable[StatePart], asked: StateShard | None, rank: int) -> dict[int, list[Blank]]:
    """What comes from other ranks: device -> blanks."""
    blanks: dict[int, list[Blank]] = defaultdict(list)
    for source, _, part in takes:
        assert asked is not None
        if source != rank:
            blanks[source].append(Blank(asked.tensor.dtype, part.shape))
    return blanks


def _assemble(
    new: StateLayout,
    takes: Iterable[StatePart],
    asked: StateShard,
    arrived: Mapping[int, Iterable[Tensor]],
    rank: int,
) -> StateShard:
    """A shard put together from the rectangles that each device has given, in their order."""
    target = new.columns(asked.name, rank)
    values, lacking = torch.empty_like(asked.tensor), asked.stop - asked.start
    tensors = {source: iter(given) for source, given in arrived.items()}
    for source, _, part in takes:
        target.view(values, asked.start, part).copy_(next(tensors[source]))
        lacking -= math.prod(part.shape)
    if lacking:
        raise ValueError(f"the ranks lack {lacking} elements of {asked.kind} of {asked.name}")
    return asked._replace(tensor=values)


def _without(piece: Interval, taken: Interval) -> tuple[Interval, Interval]:
    """What of an interval lies before another, and what behind it."""
    before, behind = min(piece.stop, taken.start), max(piece.start, taken.stop)
    return Interval(piece.start, before), Interval(behind, piece.stop)


def _common(
    given: Iterable[Rectangle], wanted: Iterable[Rectangle], columns: Iterable[Interval]
) -> Iterator[Rectangle]:
    """The parts that lie in a given rectangle, in a wanted one, and in some columns."""
    for theirs, ours, (left, right) in product(given, wanted, columns):
        part = theirs.intersect(ours)
        part = part and part.intersect(part._replace(left=left, right=right))
        if part is not None:
            yield part
