"""Moves a role's parameters from one layout to another, slice by slice; no rank ever holds the whole model."""

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.comm.checksums import (
    WORD_BYTES,
    checksum_of_columns,
    sums_of_segments,
    width_of_rows,
)
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import (
    Blank,
    ProcessGroups,
    all_reduce,
    broadcast_json,
    exchange,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.shares import ShareTransfer, plan_shares
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import HeldLayout, Rectangle, StateLayout, rows_of
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import SliceTransfer, plan_reallocation
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach
from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError

ROUND_BYTES = 256 * 2**20
"""A message is sent in rounds of about this many bytes. That bounds the buffers: at most one round per peer."""


class Reallocated(NamedTuple):
    """A rank's result of a reallocation.

    slices          parameter name -> new tensor; of sharded weights, as `Stage.held_weights` gives them; None on a
                    rank outside the destination
    version, state  of the role, equal on every rank of both placements
    bytes_sent      by this rank
    digest          of the model's bits: equal on every rank, and for equal models in any layout
    """

    slices: dict[str, Tensor] | None
    version: int
    state: dict[str, Any]
    bytes_sent: int
    digest: str


def union_set(source: Placement, destination: Placement) -> tuple[int, ...]:
    """The set of devices in which a reallocation communicates. It must be among the sets of `ProcessGroups`."""
    return tuple(sorted({*source.devices, *destination.devices}))


def reallocate(
    source: Layout,
    destination: Layout,
    slices: Mapping[str, Tensor] | None,
    dtype: torch.dtype,
    groups: ProcessGroups,
    devices_per_host: int,
    version: int = 0,
    state: Mapping[str, Any] | None = None,
    round_bytes: int = ROUND_BYTES,
) -> Reallocated:
    """Copy a model from one layout to another, bit by bit. Collective over both placements.

    slices          parameter name -> this rank's slice in the source layout; of sharded weights the range of the
                    flattened slice that it has; None on a rank outside the source
    dtype           of all parameters
    groups          must have the group of `union_set`
    version, state  the role's version and its JSON-able state; used only on the source's first device
    round_bytes     bytes of one message's round (see ROUND_BYTES)
    Raises InvariantError on every rank when a dp rank of the destination holds other bits than the source.
    """
    rank = groups.rank
    group = groups[union_set(source.placement, destination.placement)]
    ours = _WeightsHere(source, rank, slices or {})
    new = _blank(destination, rank, dtype, groups.device)
    fresh = _WeightsHere(destination, rank, new)
    is_sharded = source.weight_shares > 1 or destination.weight_shares > 1
    planned = plan_shares if is_sharded else plan_reallocation
    plan: Sequence[Message] = planned(source, destination, dtype.itemsize, devices_per_host)
    here = [message for message in plan if message.source == message.destination == rank]
    for name, part in (
        chain.from_iterable(map(_parts, here, repeat(source))) if is_sharded else _in_both(ours, fresh)
    ):
        fresh.part(name, part).copy_(ours.part(name, part))
    plan = [message for message in plan if message.source != message.destination]
    sends = _rounds(source, ((t.destination, t) for t in plan if t.source == rank), dtype, round_bytes)
    receives = _rounds(source, ((t.source, t) for t in plan if t.destination == rank), dtype, round_bytes)
    for number in range(max([*sends, *receives], default=-1) + 1):
        outgoing = {peer: [ours.part(*part) for part in parts] for peer, parts in sends[number].items()}
        into = {peer: [fresh.part(*part) for part in parts] for peer, parts in receives[number].items()}
        blanks = {peer: [Blank(dtype, tuple(t.shape)) for t in views] for peer, views in into.items()}
        for peer, tensors in exchange(outgoing, blanks, group, groups.device).items():
            for view, tensor in zip(into[peer], tensors, strict=True):
                view.copy_(tensor)
    reach(Point.REALLOCATION)
    model_digest = _verify(ours, fresh, groups)
    role = {"version": version, "state": dict(state or {})}
    role = broadcast_json(role, source.placement.devices[0], group, groups.device)
    bytes_sent = sum(t.size_bytes for t in plan if t.source == rank)
    arrived = new if rank in destination.placement.devices else None
    return Reallocated(arrived, role["version"], role["state"], bytes_sent, model_digest)


Message: TypeAlias = SliceTransfer | ShareTransfer


@dataclass(frozen=True)
class _WeightsHere:
    """What one rank has of the weights in one layout; nothing if the rank is not in the layout."""

    layout: Layout
    rank: int
    slices: Mapping[str, Tensor]

    @cached_property
    def extents(self) -> HeldLayout:
        """Which part of each flattened slice is here."""
        return HeldLayout(self.layout)

    def part(self, name: str, part: Rectangle) -> Tensor:
        """A view of a rectangle of a parameter."""
        flat, start = self.slices[name].detach().view(-1), self.extents.range(name, self.rank).start
        return self.extents.columns(name, self.rank).view(flat, start, part)


def _blank(layout: Layout, rank: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """New tensors for what a rank has of the weights in a layout."""
    if rank not in layout.placement.devices:
        return {}
    extents, is_sharded = HeldLayout(layout), layout.weight_shares > 1
    shapes = {
        name: (extents.range(name, rank).size,) if is_sharded else layout.slice_shape(name, rank)
        for name in layout.held(rank)
    }
    # A rank has no share of a parameter that other ranks' shares of a bucket cover.
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, shape in shapes.items()
        if shape != (0,)
    }


def _in_both(ours: _WeightsHere, fresh: _WeightsHere) -> Iterator[tuple[str, Rectangle]]:
    """The rows that this rank holds in both layouts."""
    for name in ours.slices.keys() & fresh.slices.keys():
        rows = ours.layout.held(ours.rank)[name].intersect(fresh.layout.held(fresh.rank)[name])
        if rows.size:
            yield name, rows_of(ours.layout.specs[name], rows)


def _parts(message: Message, layout: Layout) -> Iterator[tuple[str, Rectangle]]:
    """The (parameter, rectangle) pairs of a message, in its order."""
    if isinstance(message, ShareTransfer):
        yield from message.parts
        return
    for names, rows in message.slices:
        for spec in (layout.specs[name] for name in names):
            yield spec.name, rows_of(spec, rows or Interval(0, spec.length))


def _rounds(
    layout: Layout, messages: Iterable[tuple[int, Message]], dtype: torch.dtype, round_bytes: int
) -> Mapping[int, dict[int, list[tuple[str, Rectangle]]]]:
    """Round number -> peer -> the (parameter, rectangle) to send or receive.

    A part belongs to the round that its first byte falls into. So both ends of a pair cut their message in the same
    way, without regard to other ranks.
    """
    rounds: dict[int, dict[int, list[tuple[str, Rectangle]]]] = defaultdict(dict)
    for peer, message in messages:
        offset = 0
        for name, part in _parts(message, layout):
            rounds[offset // round_bytes].setdefault(peer, []).append((name, part))
            offset += part.size * dtype.itemsize
    return rounds


def _verify(ours: _WeightsHere, fresh: _WeightsHere, groups: ProcessGroups) -> str:
    """The digest of the source's first copy. Raises InvariantError, which names the first tensor and the ranks that
    have it, if a copy of the destination has another digest.

    The devices of a dp and cp rank hold a copy; all together where weights are sharded.
    """
    source, destination = ours.layout.placement, fresh.layout.placement
    names = list(ours.layout.specs)
    sums = torch.zeros(1 + destination.strategy.copies, len(names), dtype=torch.int64, device=groups.device)
    copies = destination.strategy.copies // fresh.layout.weight_shares
    if ours.slices and (_copy(source, ours.rank) == 0 or ours.layout.weight_shares > 1):
        sums[0] = digests(ours.slices, counted(ours.layout, ours.rank), names, groups.device)
    if fresh.slices:
        place = 1 + _copy(destination, fresh.rank) % copies
        sums[place] = digests(fresh.slices, counted(fresh.layout, fresh.rank), names, groups.device)
    all_reduce(sums, groups[union_set(source, destination)])
    wrong = (sums[1 : 1 + copies] != sums[0]).nonzero().tolist()
    if wrong:
        copy, place = wrong[0]
        ranks = [
            device
            for device in destination.devices
            if _copy(destination, device) % copies == copy and fresh.layout.held(device).get(names[place])
        ]
        raise InvariantError(
            f"reallocation {source} -> {destination}: {names[place]!r} has other bits on ranks {ranks} than on ranks "
            f"{list(source.devices)}, from which it came"
        )
    return f"{int(sums[0].sum()) % 2**64:016x}"


def _copy(placement: Placement, device: int) -> int:
    """The number of the copy that a device holds a part of."""
    at = placement.coordinate(device)
    return at.dp * placement.strategy.cp + at.cp


def digest(slices: Mapping[str, Tensor], layout: Layout, device: int) -> Tensor:
    """This device's summand of the digest of its dp rank's model: one int64 scalar on the CPU.

    slices  parameter name -> this device's slice; of sharded weights what it has of the flattened slice

    A digest is a checksum of a model's parameters that does not depend on their layout: the sum of `digests`.
    """
    names = list(layout.specs)
    return digests(slices, counted(layout, device), names, torch.device("cpu")).sum()


class Counted(NamedTuple):
    """A rectangle of a parameter's matrix that a device counts in digests.

    first   element of what the device has of the flattened slice at which it begins; stride: elements from row to row
    shape   rows and columns; left: number of its first column in the matrix
    inner   columns that a row of the parameter has
    """

    name: str
    first: int
    stride: int
    shape: tuple[int, int]
    left: int
    inner: int

    def is_of_whole_rows(self, k: int) -> bool:
        """Whether it is one row of the matrix and has whole rows of words. k: elements of a word"""
        (n_rows, n_columns), width = self.shape, width_of_rows(self.inner, k)
        return n_rows == 1 and self.left % width == 0 and n_columns % width == 0


@lru_cache(maxsize=256)
def counted(layout: Layout, device: int, state: bool = False) -> tuple[Counted, ...]:
    """What a device counts of the weights that it holds, or of the state that it keeps. Each row counts on one device
    only (`Layout.primary`), so that sums over the devices do not depend on the layout."""
    extents, pieces = (StateLayout if state else HeldLayout)(layout), list[Counted]()
    for name, rows in layout.primary(device).items():
        spec, start = layout.specs[name], extents.range(name, device).start
        columns, of_rows = extents.columns(name, device), rows_of(spec, rows)
        inner = math.prod(spec.shape[spec.dim + 1 :])
        for rectangle in extents.rectangles(name, device):
            if (part := rectangle.intersect(of_rows)) is not None:
                first = columns.span(part)[0] - start
                pieces.append(Counted(name, first, columns.width, part.shape, part.left, inner))
    return tuple(pieces)


def digests(
    slices: Mapping[str, Tensor], pieces: Sequence[Counted], names: Sequence[str], on: torch.device
) -> Tensor:
    """A device's summand of the digest of each parameter: [n] int64, 0 of what it does not have.

    slices  parameter name -> what the device has of the flattened slice, from the first element of its range on
    pieces  of it, that count
    on      where the result is to be

    The words of a row are summed, then weighted by the row's number and the parameter's name, so that swapped rows or
    parameters change the sum. Sums wrap around at 2**64, so an even number of flips of words' highest bits does not.
    Rows of all pieces that have whole ones are weighted together.
    """
    numbers, total = (
        {name: n for n, name in enumerate(names)},
        torch.zeros(len(names), dtype=torch.int64, device=on),
    )
    rows, together, alone, sums = list[Tensor](), list[Counted](), list[Counted](), list[Tensor]()
    for piece in pieces:
        if piece.name not in slices:
            continue
        flat = slices[piece.name].detach().view(-1)
        k = WORD_BYTES // flat.element_size()
        if piece.is_of_whole_rows(k) and (flat.storage_offset() + piece.first) % k == 0:
            words = flat[piece.first : piece.first + piece.shape[1]].view(torch.int64)
            width = width_of_rows(piece.inner, k) // k
            rows.append(words if width == 1 else words.view(-1, width).sum(1))
            together.append(piece)
        else:
            part = flat.as_strided(piece.shape, (piece.stride, 1), flat.storage_offset() + piece.first)
            sums.append(checksum_of_columns(part, piece.left, piece.inner) * _factor(piece.name))
            alone.append(piece)
    if sums:
        places = torch.tensor([numbers[piece.name] for piece in alone], device=on)
        total.index_add_(0, places, torch.stack(sums).to(on))
    if rows:
        counts = tuple(map(len, rows))
        weighted = torch.cat(rows) * _weights(tuple(together), counts, rows[0].device)
        places = torch.tensor([numbers[piece.name] for piece in together], device=on)
        total.index_add_(0, places, sums_of_segments(weighted, counts).to(on))
    return total


@lru_cache(maxsize=64)
def _weights(pieces: tuple[Counted, ...], counts: tuple[int, ...], on: torch.device) -> Tensor:
    """Of each row of pieces of whole rows: what its sum is multiplied by. counts: rows of each piece"""
    weights = list[Tensor]()
    for piece, n_rows in zip(pieces, counts, strict=True):
        first = piece.left * n_rows // piece.shape[1]
        weights.append(torch.arange(2 * first + 1, 2 * (first + n_rows) + 1, 2) * _factor(piece.name))
    return torch.cat(weights).to(on)


def _factor(name: str) -> int:
    return 2 * zlib.crc32(name.encode()) + 1
