"""Which rank keeps the training state of which range of which slice, and how ranges of two layouts overlap.

A rank's parameters are stored one after the other in a flat buffer, in the same order on all ranks of its dp group.
The buffer is cut into buckets, and each dp and cp rank keeps the state of an equal share of every bucket: then a
bucket's gradients can be reduced, and its weights gathered, without the others (ZeRO stage 2, arXiv:1910.02054).
Where weights are sharded (stage 3), a rank holds the same share of them. All this follows from the layout.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, groupby, product
from typing import TYPE_CHECKING, NamedTuple

from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import ParameterSpec
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement

if TYPE_CHECKING:  # the planner, which loads no torch, reads BUCKET and CHUNK
    from torch import Tensor

BUCKET = 1 << 22
"""Elements at which a bucket is full: 16 MB of float32 gradients, of which a message's latency is a small part. A
parameter is never cut, so one that is larger is a bucket of its own. With a layer a bucket ends when it is half full:
sharded weights are gathered layer by layer."""

ALIGNMENT = 16
"""A rank's share of a bucket has a multiple of this many elements.

A fused kernel computes in vectors of at most 16 elements. What is left of a tensor it computes one by one, and rounds
differently there."""

CHUNK = 1 << 22
"""Most elements of state in host memory that are on the device at a time, twice: 50 MB of master weights and moments,
against which the latency of a copy is small. A multiple of ALIGNMENT."""


class BufferRange(NamedTuple):
    """The range of a parameter's local slice in the flat buffer, in elements."""

    name: str
    start: int
    stop: int


class Bucket(NamedTuple):
    """Elements start .. stop - 1 of the flat buffer, of which each dp rank keeps the state of an equal share.

    pieces   the slices in it; after the last one may be a gap
    share    where a dp rank's share begins and ends in the flat tensors of its state
    decayed  weight decay applies: the parameters have more than one dim, and are no biases (of experts)
    whole    some of their rows are on several ranks of a replica, over which their gradients are summed first
    """

    start: int
    stop: int
    pieces: tuple[BufferRange, ...]
    share: Interval
    decayed: bool
    whole: bool

    @property
    def size(self) -> int:
        """Elements of the flat buffer."""
        return self.stop - self.start


class KeptRange(NamedTuple):
    """Elements start .. stop - 1 of a flattened slice, whose state a rank keeps from element `at` of its state on."""

    name: str
    start: int
    stop: int
    at: int


def parts_of(spec: ParameterSpec, layers: int) -> tuple[int, ...]:
    """The parts of a model of one stage that use a parameter: 0, the embedding; 1 to `layers`; then the head."""
    if spec.layer is not None:
        return (1 + spec.layer,)
    return {"first": (0,), "last": (layers + 1,), "ends": (0, layers + 1)}[spec.place]


def parts_of_backward(layout: Layout) -> range:
    """The parts of a model of one stage (`parts_of`) that a backward pass comes to between its head and its end.

    It ends with the first part that has something to train. An embedding needs no weights for its gradient; what
    further inputs of the layers are computed with does.
    """
    shape = layout.shape
    first = min(part for spec in layout.parameters for part in parts_of(spec, shape.layers))
    without = 0 if shape.varied is not None and shape.varied.inputs else 1
    return range(max(first, without), shape.layers + 1)


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

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: "Rectangle") -> "Rectangle | None":
        """The common part; None if it is empty."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Rectangle(top, bottom, left, right) if top < bottom and left < right else None


def rows_of(spec: ParameterSpec, rows: Interval) -> Rectangle:
    """Some rows of a parameter's sharded dim, in its matrix."""
    inner = math.prod(spec.shape[spec.dim + 1 :])
    return Rectangle(0, math.prod(spec.shape[: spec.dim]), rows.start * inner, rows.stop * inner)


class Columns(NamedTuple):
    """The columns of a slice in the whole parameter's matrix."""

    first: int
    width: int

    @property
    def interval(self) -> Interval:
        return Interval(self.first, self.first + self.width)

    def rectangles(self, start: int, stop: int) -> list[Rectangle]:
        """The rectangles that the elements start .. stop - 1 of the flattened slice form."""
        pieces: list[Rectangle] = []
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

    def view(self, flat: "Tensor", start: int, part: Rectangle) -> "Tensor":
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
        self._buckets = cache(self._lay_out)
        self._in_group = cache(self._number_devices)
        self._by_name = cache(self._name_pieces)

    def buckets(self, device: int) -> tuple[Bucket, ...]:
        """A device's flat buffer. Buckets of matrices come first; norms and biases have no weight decay."""
        at = self._at[device]
        return self._buckets(at.pp, at.tp)

    def kept(self, device: int) -> Iterator[KeptRange]:
        """The ranges of a device's slices whose state it keeps, in the order of its state."""
        for bucket in self.buckets(device):
            first = self._first(bucket, device)
            for name, start, _ in bucket.pieces:
                mine = self.range(name, device)
                if mine.size:
                    yield KeptRange(name, *mine, at=bucket.share.start + start + mine.start - first)

    def range(self, name: str, device: int) -> Interval:
        """The elements of a device's flattened slice whose state it keeps; empty if it holds no slice."""
        at = self._at[device]
        by_name = self._by_name(at.pp, at.tp)
        if name not in by_name:
            return Interval(0, 0)
        piece, bucket = by_name[name]
        first = self._first(bucket, device)
        common = Interval(piece.start, piece.stop).intersect(Interval(first, first + bucket.share.size))
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

    def givers(self, group: Sequence[int], destination: int) -> Sequence[int]:
        """The devices of a dp group that give a destination what it lacks of their slice: each has a part of it."""
        return group

    def _first(self, bucket: Bucket, device: int) -> int:
        """The element of the flat buffer at which a device's share of a bucket begins."""
        at = self._at[device]
        return bucket.start + self._in_group(at.pp, at.tp)[device] * bucket.share.size

    def _name_pieces(self, pp: int, tp: int) -> dict[str, tuple[BufferRange, Bucket]]:
        return {piece.name: (piece, bucket) for bucket in self._buckets(pp, tp) for piece in bucket.pieces}

    def _number_devices(self, pp: int, tp: int) -> dict[int, int]:
        group = self.layout.placement.dp_group(self.layout.placement.device(0, tp, pp))
        # as a process group numbers them
        return {device: number for number, device in enumerate(sorted(group))}

    def _lay_out(self, pp: int, tp: int) -> tuple[Bucket, ...]:
        """Matrices before vectors; among these, slices with rows that other ranks hold, too, after all others."""
        layout = self.layout
        copies = layout.placement.strategy.copies
        held = layout.held(layout.placement.device(0, tp, pp))
        whole = self._whole(pp, tp)
        sizes = {name: rows.size * layout.specs[name].row_size for name, rows in held.items()}

        def kind(name: str) -> tuple[bool, bool]:
            return len(layout.specs[name].shape) <= 1 or name.endswith("bias"), name in whole

        buckets: list[Bucket] = []
        for (is_vector, is_whole), names in groupby(sorted(held, key=kind), key=kind):
            for together in _cut(names, sizes, layout.specs):
                start = buckets[-1].stop if buckets else 0
                stops = list(accumulate((sizes[name] for name in together), initial=start))
                pieces = tuple(map(BufferRange, together, stops, stops[1:]))
                aligned = -(-(stops[-1] - start) // (copies * ALIGNMENT)) * ALIGNMENT
                share = Interval(start // copies, start // copies + aligned)
                stop = start + aligned * copies
                buckets.append(Bucket(start, stop, pieces, share, not is_vector, is_whole))
        return tuple(buckets)

    def _whole(self, pp: int, tp: int) -> set[str]:
        """The parameters with rows that several ranks of a replica hold, this one among them."""
        axes = self.layout.placement.strategy
        place = Placement(tuple(range(axes.tp * axes.pp)), ParallelStrategy(1, axes.tp, axes.pp))
        replica = replace(self.layout, placement=place)
        device = place.device(0, tp, pp)
        return {
            name
            for name in replica.held(device)
            if any(device in piece.devices for piece in replica.shared(name, 0))
        }


class HeldLayout(StateLayout):
    """Which part of the *weights* each device holds: its share where they are sharded, else its whole slice.

    devices_per_host  devices with the same id // devices_per_host share a host
    """

    def __init__(self, layout: Layout, devices_per_host: int = 1) -> None:
        super().__init__(layout)
        self._per_host = devices_per_host
        self._is_sharded = layout.weight_shares > 1

    def range(self, name: str, device: int) -> Interval:
        if self._is_sharded:
            return super().range(name, device)
        rows = self.layout.held(device).get(name, Interval(0, 0))
        return Interval(0, rows.size * self.layout.specs[name].row_size)

    def givers(self, group: Sequence[int], destination: int) -> Sequence[int]:
        """Where each device of a group has the whole slice: the destination itself or one of its host, if there are,
        else any. Destinations take different ones."""
        if self._is_sharded:
            return group
        host = destination // self._per_host
        near = [d for d in group if d == destination] or [d for d in group if d // self._per_host == host]
        among = near or group
        return [among[destination % len(among)]]


class StatePart(NamedTuple):
    """A rectangle of one parameter's state, and the device (id) that has stored it."""

    source: int
    part: Rectangle


class StateTransfer:
    """The parts of a role's state, or of its weights, in one layout that devices of another layout need. Pure."""

    def __init__(self, old: StateLayout, new: StateLayout) -> None:
        ours, theirs = new.layout, old.layout
        assert replace(theirs, placement=ours.placement) == ours, "two different models"
        self.old = old
        self.new = new

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
            for giver in self.old.givers(group, destination):
                for part in _common(self.old.rectangles(name, giver), into, columns):
                    yield StatePart(giver, part)

    def _givers(
        self, name: str, destination: int, wanted: Interval
    ) -> Iterator[tuple[Sequence[int], list[Interval]]]:
        """Dp groups of the old layout, each with the columns that a destination gets from it; every column once."""
        layout = self.old.layout
        place, stages = layout.placement, layout.stages(layout.specs[name])
        at = [(t, p) for p in stages for t in range(place.strategy.tp)]
        groups = [place.dp_group(place.device(0, t, p)) for t, p in at]
        first = destination % len(groups)
        left = [wanted]
        for group in sorted(groups[first:] + groups[:first], key=lambda group: destination not in group):
            held = self.old.columns(name, group[0]).interval
            common = [piece.intersect(held) for piece in left]
            yield group, [columns for columns in common if columns.size]
            left = [rest for piece in left for rest in _without(piece, held) if rest.size]


def _without(piece: Interval, taken: Interval) -> tuple[Interval, Interval]:
    """The parts of `piece` before and after `taken`; either may be empty."""
    before = Interval(piece.start, min(piece.stop, taken.start))
    after = Interval(max(piece.start, taken.stop), piece.stop)
    return before, after


def _common(
    theirs: Iterable[Rectangle], wanted: Iterable[Rectangle], columns: Iterable[Interval]
) -> Iterator[Rectangle]:
    """Every non-empty intersection of one of their rectangles, a wanted one, and an interval of columns."""
    for one, other, (left, right) in product(theirs, wanted, columns):
        part = one.intersect(other)
        part = part and part.intersect(part._replace(left=left, right=right))
        if part is not None:
            yield part


def _cut(
    names: Iterable[str], sizes: Mapping[str, int], specs: Mapping[str, ParameterSpec]
) -> Iterator[list[str]]:
    """Parameters in runs. Each ends as soon as it has BUCKET elements, or half as many where a layer ends."""
    run: list[str] = []
    elements = 0
    for name in names:
        ends_layer = bool(run) and specs[run[-1]].layer != specs[name].layer
        if ends_layer and 2 * elements >= BUCKET:
            yield run
            run, elements = [], 0
        run.append(name)
        elements += sizes[name]
        if elements >= BUCKET:
            yield run
            run, elements = [], 0
    if run:
        yield run
