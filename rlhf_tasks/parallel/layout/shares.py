"""Sharded weights: what a device gathers, and what moves from or to a layout that shards them. Pure Python."""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import (
    HeldLayout,
    Rectangle,
    StateLayout,
    StateTransfer,
    parts_of,
    parts_of_backward,
)


@dataclass(frozen=True, slots=True)
class ShareTransfer:
    """One message of a reallocation: rectangles of parameters, in this order. What a device has already is a message
    to itself, which is not sent."""

    source: int
    destination: int
    parts: tuple[tuple[str, Rectangle], ...]
    size_bytes: int


@lru_cache(maxsize=256)
def plan_shares(
    source: Layout, destination: Layout, itemsize: int, devices_per_host: int
) -> tuple[ShareTransfer, ...]:
    """The messages that bring a model from one layout to another, one message per pair of devices.

    itemsize          bytes per element
    devices_per_host  devices with the same id // devices_per_host share a host

    A device gets each element that it lacks once, and none that it has: no reallocation moves fewer bytes.
    """
    transfer = StateTransfer(*(HeldLayout(layout, devices_per_host) for layout in (source, destination)))
    messages: dict[tuple[int, int], list[tuple[str, Rectangle]]] = defaultdict(list)
    for wanter in destination.placement.devices:
        for name in destination.held(wanter):
            for giver, part in transfer.taken(name, wanter):
                messages[giver, wanter].append((name, part))
    return tuple(
        ShareTransfer(*pair, tuple(parts), itemsize * sum(part.size for _, part in parts))
        for pair, parts in sorted(messages.items())
    )


class Gathering(NamedTuple):
    """What a device of sharded weights gathers.

    most     most elements that are whole at a time: those of a part of the model and of the part that comes next
    total    elements of all parts, once each
    buckets  messages of a pass over all parts
    back     elements that a backward pass gathers: those of the parts that it comes to (`parts_of_backward`), without
             the layer that is still there
    """

    most: int
    total: int
    buckets: int
    back: int


@lru_cache(maxsize=1024)
def gathering(layout: Layout) -> Gathering:
    """What the first or the last tp rank of a layout of one stage gathers, whichever has more. Of adapters,
    what is below them."""

    def of(tp_rank: int) -> Gathering:
        buckets = StateLayout(layout.whole).buckets(layout.placement.device(0, tp_rank, 0))
        specs, layers = layout.whole.specs, layout.shape.layers
        used = [
            {part for piece in bucket.pieces for part in parts_of(specs[piece.name], layers)}
            for bucket in buckets
        ]

        def size(*parts: int) -> int:
            return sum(bucket.size for bucket, users in zip(buckets, used, strict=True) if users & {*parts})

        parts = range(layers + 2)
        most = max(size(*pair) for pair in pairwise(parts))
        back = [part for part in parts_of_backward(layout) if part < layers]
        return Gathering(most, size(*parts), len(buckets), size(*back))

    return max(map(of, {0, layout.placement.strategy.tp - 1}))
