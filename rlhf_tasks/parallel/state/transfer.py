"""Which part of a role's stored state a rank reads from which rank's file when the layout has changed."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.parallel.layout.slices import Interval
from rlhf_tasks.parallel.train.optimizer import StateShard
from rlhf_tasks.parallel.train.state_layout import Rectangle, StateLayout


class StatePart(NamedTuple):
    """A rectangle of one parameter's state, and the device (id) that has stored it."""

    source: int
    part: Rectangle


class StateTransfer:
    """The parts of a role's state in one layout that devices of another layout need. Pure."""

    def __init__(self, old: StateLayout, new: StateLayout) -> None:
        ours, theirs = new.layout, old.layout
        assert replace(theirs, placement=ours.placement) == ours, "two different models"
        self.old, self.new = old, new

    def taken(self, name: str, destination: int) -> Iterator[StatePart]:
        """The parts of a parameter that a device takes.

        Every element of the device's range comes once. It comes from the device itself if it has it, else from its
        own dp group, else from other holders, where destinations begin with different ones to share the load. So
        replicas keep their own bits.
        """
        if not self.new.range(name, destination).size:
            return
        into, target = self.new.rectangles(name, destination), self.new.columns(name, destination)
        for group, columns in self._givers(name, destination, target.interval):
            for giver in group:
                for part in _common(self.old.rectangles(name, giver), into, columns):
                    yield StatePart(giver, part)

    def _givers(
        self, name: str, destination: int, wanted: Interval
    ) -> Iterator[tuple[Sequence[int], list[Interval]]]:
        """Dp groups of the old layout, each with the columns that a destination gets from it; every column once."""
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


def assemble(
    new: StateLayout, device: int, shard: StateShard, parts: Iterable[tuple[Rectangle, Tensor]], whence: str
) -> StateShard:
    """A shard with a new tensor, assembled from its parts.

    parts   (rectangle, tensor [rows, columns]), together all elements of the shard
    whence  the source of the parts, for the error message
    Raises ValueError when parts are missing.
    """
    target = new.columns(shard.name, device)
    values, lacking = torch.empty_like(shard.tensor), shard.tensor.numel()
    for part, tensor in parts:
        target.view(values, shard.start, part).copy_(tensor)
        lacking -= math.prod(part.shape)
    if lacking:
        raise ValueError(
            f"{whence} lacks {lacking} of {values.numel()} elements of {shard.kind} of {shard.name}"
        )
    return shard._replace(tensor=values)


def _without(piece: Interval, taken: Interval) -> tuple[Interval, Interval]:
    """The parts of `piece` before and after `taken`; either may be empty."""
    before, behind = min(piece.stop, taken.start), max(piece.start, taken.stop)
    return Interval(piece.start, before), Interval(behind, piece.stop)


def _common(
    given: Iterable[Rectangle], wanted: Iterable[Rectangle], columns: Iterable[Interval]
) -> Iterator[Rectangle]:
    """Every non-empty intersection of a given rectangle, a wanted one, and an interval of columns."""
    for theirs, ours, (left, right) in product(given, wanted, columns):
        part = theirs.intersect(ours)
        part = part and part.intersect(part._replace(left=left, right=right))
        if part is not None:
            yield part
