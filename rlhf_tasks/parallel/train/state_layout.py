"""Which rank keeps the training state of which range of which slice, and how ranges of two layouts overlap.

A rank's parameters are stored one after the other in a flat buffer, in the same order on all ranks of its dp group.
Each dp rank keeps the state of an equal share of it (ZeRO stage 1, arXiv:1910.02054). All this follows from the
layout.
"""

import math
from functools import cache
from typing import NamedTuple

from torch import Tensor

from rlhf_tasks.parallel.layout.slices import Interval, Layout

ALIGNMENT = 16
"""The shares of the flat buffer, and its parts with and without weight decay, have a multiple of this many elements.

A fused kernel computes in vectors of at most 16 elements. What is left of a tensor it computes one by one, and rounds
differently there."""


def aligned(elements: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


class BufferRange(NamedTuple):
    """The range of a parameter's local slice in the flat buffer, in elements."""

    name: str
    start: int
    stop: int


# Here a parameter is viewed as a matrix: its dims before the sharded dim make the rows, the sharded dim and all later
# ones the columns. A slice is then a block of columns. A range of a flattened slice is at most three rectangles: the
# end of a row, whole rows, and the beginning of a row.


class Rectangle(NamedTuple):
    """Rows and columns of the whole parameter's matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left

    def intersect(self, other: "Rectangle") -> "Rectangle | None":
        """The common part; None if it is empty."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Rectangle(top, bottom, left, right) if top < bottom and left < right else None


class Columns(NamedTuple):
    """The columns of a slice in the whole parameter's matrix."""

    first: int
    width: int

    @property
    def interval(self) -> Interval:
        return Interval(self.first, self.first + self.width)

    def rectangles(self, start: int, stop: int) -> list[Rectangle]:
        """The rectangles that the elements start .. stop - 1 of the flattened slice form."""
        pieces = []
        while start < stop:
            row, column = divmod(start, self.width)
            if column == 0 and stop - start >= self.width:
                bottom, end = stop // self.width, self.width
            else:
                bottom, end = row + 1, min(self.width, column + stop - start)
            pieces.append(Rectangle(row, bottom, self.first + column, self.first + end))
            start = (bottom - 1) * self.width + end
        return pieces

    def span(self, part: Rectangle) -> tuple[int, int]:
        """(start, stop): the smallest range of elements of the flattened slice that contains a rectangle."""
        left, right = part.left - self.first, part.right - self.first
        return part.top * self.width + left, (part.bottom - 1) * self.width + right

    def view(self, flat: Tensor, start: int, part: Rectangle) -> Tensor:
        """A rectangle as a view [rows, columns] of a flat tensor.

        flat  [elements], the elements of the flattened slice from number `start` on
        """
        begin = flat[self.span(part)[0] - start :]
        return begin.as_strided(part.shape, (self.width, 1), begin.storage_offset())


class StateLayout:
    """Which part of the state each device of a layout keeps. The devices of a dp group keep each element once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._at = {device: layout.placement.coordinate(device) for device in layout.placement.devices}
        self._pieces = cache(self._lay_out)
        self._by_name = cache(lambda pp, tp: {piece.name: piece for piece in self._pieces(pp, tp)})
        self._shares = cache(self._share_out)

    def pieces(self, device: int) -> tuple[BufferRange, ...]:
        """A device's slices in its flat buffer. Norms and biases (one dim) come last: they have no weight decay.

        There is a gap before the first of these, up to a multiple of ALIGNMENT; there are no other gaps.
        """
        at = self._at[device]
        return self._pieces(at.pp, at.tp)

    def share(self, device: int) -> Interval:
        """The elements of the flat buffer whose state a device keeps; the last share may exceed the slices' end."""
        at = self._at[device]
        return self._shares(at.pp, at.tp)[device]

    def range(self, name: str, device: int) -> Interval:
        """The elements of a device's flattened slice whose state it keeps; empty if it holds no slice."""
        at = self._at[device]
        piece = self._by_name(at.pp, at.tp).get(name)
        if piece is None:
            return Interval(0, 0)
        common = Interval(piece.start, piece.stop).intersect(self.share(device))
        return Interval(common.start - piece.start, common.stop - piece.start)

    def columns(self, name: str, device: int) -> Columns:
        """The columns of a device's slice. The device must hold the parameter."""
        spec = self.layout.specs[name]
        rows = self.layout.interval(spec, self._at[device].tp)
        inner = math.prod(spec.shape[spec.dim + 1 :])
        return Columns(rows.start * inner, rows.size * inner)

    def rectangles(self, name: str, device: int) -> list[Rectangle]:
        """The rectangles of the whole parameter whose state a device keeps."""
        return self.columns(name, device).rectangles(*self.range(name, device))

    def _lay_out(self, pp: int, tp: int) -> tuple[BufferRange, ...]:
        layout, pieces, stop = self.layout, list[BufferRange](), 0
        held = layout.held(layout.placement.device(0, tp, pp))
        matrices = [name for name in held if len(layout.specs[name].shape) > 1]
        for names in (matrices, [name for name in held if name not in matrices]):
            stop = aligned(stop)
            for name in names:
                start, stop = stop, stop + held[name].size * layout.specs[name].row_size
                pieces.append(BufferRange(name, start, stop))
        return tuple(pieces)

    def _share_out(self, pp: int, tp: int) -> dict[int, Interval]:
        group = self.layout.placement.dp_group(self.layout.placement.device(0, tp, pp))
        size = aligned(-(-self._pieces(pp, tp)[-1].stop // len(group)))
        in_group = enumerate(sorted(group))  # a process group numbers its ranks by ascending device id
        return {device: Interval(index * size, (index + 1) * size) for index, device in in_group}
