"""Moves a role's parameters from one layout to another, slice by slice; no rank ever holds the whole model."""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import (
    Blank,
    ProcessGroups,
    all_reduce,
    broadcast_json,
    exchange,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import SliceTransfer, plan_reallocation
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach
from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError

ROUND_BYTES = 256 * 2**20
"""A message is sent in rounds of about this many bytes. That bounds the buffers: at most one round per peer."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Item size in bytes -> the integer dtype that its bits are read as."""


class Reallocated(NamedTuple):
    """A rank's result of a reallocation.

    slices          parameter name -> new tensor; None on a rank outside the destination
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

    slices          parameter name -> this rank's slice in the source layout; None on a rank outside it
    dtype           of all parameters
    groups          must have the group of `union_set`
    version, state  the role's version and its JSON-able state; used only on the source's first device
    round_bytes     bytes of one message's round (see ROUND_BYTES)
    Raises InvariantError on every rank when a dp rank of the destination holds other bits than the source.
    """
    rank = groups.rank
    group = groups[union_set(source.placement, destination.placement)]
    plan = plan_reallocation(source, destination, dtype.itemsize, devices_per_host)
    ours = _SlicesHere(source, rank, slices or {})
    held = destination.held(rank) if rank in destination.placement.devices else ()
    shapes = {name: destination.slice_shape(name, rank) for name in held}
    new = {name: torch.empty(shape, dtype=dtype, device=groups.device) for name, shape in shapes.items()}
    fresh = _SlicesHere(destination, rank, new)
    for name in ours.slices.keys() & new.keys():  # the rows that this rank holds in both layouts
        rows = source.held(rank)[name].intersect(destination.held(rank)[name])
        if rows.size:
            fresh.rows(name, rows).copy_(ours.rows(name, rows))
    sends = _rounds(source, ((t.destination, t) for t in plan if t.source == rank), dtype, round_bytes)
    receives = _rounds(source, ((t.source, t) for t in plan if t.destination == rank), dtype, round_bytes)
    for number in range(max([*sends, *receives], default=-1) + 1):
        outgoing = {peer: [ours.rows(*part) for part in parts] for peer, parts in sends[number].items()}
        into = {peer: [fresh.rows(*part) for part in parts] for peer, parts in receives[number].items()}
        blanks = {peer: [Blank(dtype, tuple(t.shape)) for t in views] for peer, views in into.items()}
        for peer, tensors in exchange(outgoing, blanks, group, groups.device).items():
            for view, tensor in zip(into[peer], tensors, strict=True):
                view.copy_(tensor)
    reach(Point.REALLOCATION)
    model_digest = _verify(ours, fresh, groups)
    role = {"version": version, "state": dict(state or {})}
    role = broadcast_json(role, source.placement.devices[0], group, groups.device)
    bytes_sent = sum(t.size_bytes for t in plan if t.source == rank)
    return Reallocated(new or None, role["version"], role["state"], bytes_sent, model_digest)


@dataclass(frozen=True, slots=True)
class _SlicesHere:
    """One rank's slices in one layout; none if the rank is not in the layout."""

    layout: Layout
    rank: int
    slices: Mapping[str, Tensor]

    def rows(self, name: str, rows: Interval) -> Tensor:
        """A view of some rows of a parameter (global numbers)."""
        at = rows.within(self.layout.held(self.rank)[name])
        return self.slices[name].detach().narrow(self.layout.specs[name].dim, at.start, rows.size)


def _rounds(
    layout: Layout, messages: Iterable[tuple[int, SliceTransfer]], dtype: torch.dtype, round_bytes: int
) -> Mapping[int, dict[int, list[tuple[str, Interval]]]]:
    """Round number -> peer -> the (parameter, rows) to send or receive.

    A slice belongs to the round that its first byte falls into. So both ends of a pair cut their message in the same
    way, without regard to other ranks.
    """
    rounds: dict[int, dict[int, list[tuple[str, Interval]]]] = defaultdict(dict)
    for peer, message in messages:
        offset = 0
        for names, rows in message.slices:
            for spec in (layout.specs[name] for name in names):
                part = rows or Interval(0, spec.length)
                rounds[offset // round_bytes].setdefault(peer, []).append((spec.name, part))
                offset += part.size * spec.row_size * dtype.itemsize
    return rounds


def _verify(ours: _SlicesHere, fresh: _SlicesHere, groups: ProcessGroups) -> str:
    """The digest of the source's first copy. Raises InvariantError if a copy of the destination has another digest.

    The devices of a dp and cp rank hold a copy.
    """
    source, destination = ours.layout.placement, fresh.layout.placement
    sums = torch.zeros(1 + destination.strategy.copies, dtype=torch.int64, device=groups.device)
    if ours.slices and _copy(source, ours.rank) == 0:
        sums[0] = digest(ours.slices, ours.layout, ours.rank)
    if fresh.slices:
        sums[1 + _copy(destination, fresh.rank)] = digest(fresh.slices, fresh.layout, fresh.rank)
    sent, *received = all_reduce(sums, groups[union_set(source, destination)]).tolist()
    wrong = [copy for copy, value in enumerate(received) if value != sent]
    if wrong:
        raise InvariantError(
            f"reallocation {source} -> {destination}: copies {wrong} hold other bits than the source "
            f"({[f'{received[copy]:x}' for copy in wrong]} instead of {sent:x})"
        )
    return f"{sent % 2**64:016x}"


def _copy(placement: Placement, device: int) -> int:
    """The number of the copy that a device holds a part of."""
    at = placement.coordinate(device)
    return at.dp * placement.strategy.cp + at.cp


def digest(slices: Mapping[str, Tensor], layout: Layout, device: int) -> Tensor:
    """This device's summand of the digest of its dp rank's model: one int64 scalar on the tensors' device.

    slices  parameter name -> this device's slice

    A digest is a checksum of a model's parameters that does not depend on their layout. It is the sum of the summands
    of a replica's devices; each row counts on one device only (`Layout.primary`). The bit patterns of a row are
    summed, then weighted by the row's number and the parameter's name, so that swapped rows or parameters change the
    digest. Sums wrap around at 2**64.
    """
    held, summands = layout.held(device), []
    for name, rows in layout.primary(device).items():
        if rows.size:
            spec, tensor = layout.specs[name], slices[name].detach()
            mine = tensor.narrow(spec.dim, rows.start - held[name].start, rows.size)
            bits = mine.view(_BITS[tensor.dtype.itemsize]).movedim(spec.dim, 0)
            sums = bits.flatten(1).sum(1, dtype=torch.int64) if bits.ndim > 1 else bits.to(torch.int64)
            numbers = torch.arange(rows.start, rows.stop, device=tensor.device)
            summands.append((sums * (2 * numbers + 1)).sum() * (2 * zlib.crc32(name.encode()) + 1))
    tensors_on = next(iter(slices.values())).device
    return torch.stack(summands).sum() if summands else torch.zeros((), dtype=torch.int64, device=tensors_on)
