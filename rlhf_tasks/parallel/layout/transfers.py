"""Which device sends what to which: parameters between two layouts, samples between two placements. Pure Python.

Every rank evaluates these functions on the same arguments and gets the same lists; the executors (reallocation.py,
redistribution.py) run them. The planner prices moves by a formula that comes close (planner/pricing/resharding.py).
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import Literal, NamedTuple, Protocol, TypeAlias

from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ParameterSpec
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout, split
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement

Balance = Literal["count", "tokens"]

LENGTHS = "sequence_lengths"
"""The key of the numbers of tokens of a sample's sequences, which lie one after the other in its per-token keys:
[sequences] int64. Without the key a sample is one sequence."""


class Slices(NamedTuple):
    """The same rows of several parameters that are split in the same way; `rows` is None for whole parameters."""

    names: tuple[str, ...]
    rows: Interval | None


@dataclass(frozen=True, slots=True)
class SliceTransfer:
    """One message of a reallocation: the slices that a source device sends to a destination device, in this order."""

    source: int
    destination: int
    slices: tuple[Slices, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SampleTransfer:
    """One message of a redistribution: the samples that one head sends to another."""

    source: int
    destination: int
    ids: tuple[int, ...]


# Parameters


@lru_cache(maxsize=256)
def plan_reallocation(
    source: Layout, destination: Layout, itemsize: int, devices_per_host: int
) -> tuple[SliceTransfer, ...]:
    """The messages that bring a model from one layout to another, one message per pair of devices.

    itemsize          bytes per element
    devices_per_host  devices with the same id // devices_per_host share a host

    Each row that a destination device lacks is sent to it once; rows that it already holds are not sent. So the bytes
    equal `reallocation_bound`. The sender is a holder on the same host where there is one, else any holder. Holders
    share the sending evenly.
    """
    assert replace(source, placement=destination.placement) == destination, "two different models"
    needs = _needs(source, destination, itemsize, devices_per_host)
    loads: dict[int, int] = defaultdict(int)
    messages: dict[tuple[int, int], list[tuple[Slices, int]]] = defaultdict(list)
    for need in sorted(needs, key=lambda n: -n.size_bytes):  # largest first balances best
        # All messages share one object: there may be millions of messages.
        part = need.slices, need.size_bytes
        queue = [(loads[holder], holder) for holder in need.holders]
        heapq.heapify(queue)
        for wanter in need.wanters:
            load, holder = queue[0]
            heapq.heapreplace(queue, (load + need.size_bytes, holder))
            loads[holder] = load + need.size_bytes
            messages[holder, wanter].append(part)
    return tuple(
        SliceTransfer(*pair, tuple(slices for slices, _ in parts), sum(size_bytes for _, size_bytes in parts))
        for pair, parts in sorted(messages.items())
    )


def reallocation_bound(source: Layout, destination: Layout, itemsize: int) -> int:
    """Fewest bytes that any reallocation must send: those that the destination devices do not hold already."""
    present = set(source.placement.devices)
    missing = 0
    for device in destination.placement.devices:
        held: Mapping[str, Interval] = source.held(device) if device in present else {}
        for name, rows in destination.held(device).items():
            kept = rows.intersect(held[name]).size if name in held else 0
            missing += (rows.size - kept) * destination.specs[name].row_size
    return missing * itemsize


class _Need(NamedTuple):
    """Rows that each wanter lacks and each holder can send; `size_bytes` is per wanter."""

    slices: Slices
    size_bytes: int
    holders: Sequence[int]
    wanters: Sequence[int]


_Alike: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[str, int, int] | None]
"""(Stages that hold a parameter in the old layout, in the new layout, (unit, unit size, length) or None)."""


def _needs(source: Layout, destination: Layout, itemsize: int, devices_per_host: int) -> Iterable[_Need]:
    """All needs of a reallocation.

    Parameters that are split in the same way on the same stages are handled together: a 70B model has 723 parameters,
    but only about 4 kinds per pair of stages. Each kind is cut at the borders of both layouts, so that a piece has
    one set of holders and one set of wanters.
    """
    alike: dict[_Alike, list[ParameterSpec]] = defaultdict(list)
    for spec in source.parameters:
        split_as = (spec.unit, spec.unit_size, spec.length) if spec.unit else None
        alike[source.stages(spec), destination.stages(spec), split_as].append(spec)
    ours, theirs = _Holders(source), _Holders(destination)
    for (stages, their_stages, split_as), specs in alike.items():
        names, row_bytes = tuple(spec.name for spec in specs), sum(spec.row_size for spec in specs) * itemsize
        slices, their_slices = ours.slices(specs[0]), theirs.slices(specs[0])
        for rows in (Interval(*pair) for pair in pairwise(sorted({*chain(*slices, *their_slices)}))):
            holders = ours.devices(stages, slices, rows)
            held = set(holders)
            wanters = [d for d in theirs.devices(their_stages, their_slices, rows) if d not in held]
            for near, lacking in _near(holders, wanters, devices_per_host):
                if split_as is None:
                    size_bytes = sum(spec.size for spec in specs) * itemsize
                    yield _Need(Slices(names, None), size_bytes, near, lacking)
                    continue
                parts = min(rows.size, _parts(len(near), len(lacking)))
                for part in (split(rows.size, parts, index) for index in range(parts)):
                    piece = Interval(rows.start + part.start, rows.start + part.stop)
                    yield _Need(Slices(names, piece), row_bytes * piece.size, near, lacking)


class _Holders:
    """Which devices hold which rows in one layout. Caches the lists of devices, of which there are few."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Sequence[int]] = {}

    def slices(self, spec: ParameterSpec) -> list[Interval]:
        """The rows of a parameter that each tp rank holds."""
        return [self._layout.interval(spec, t) for t in range(self._layout.placement.strategy.tp)]

    def devices(self, stages: tuple[int, ...], slices: Sequence[Interval], rows: Interval) -> Sequence[int]:
        """The devices on some stages whose slices hold all of these rows, ascending."""
        tp_ranks = tuple(t for t, (start, stop) in enumerate(slices) if start <= rows[0] and rows[1] <= stop)
        key = (stages, tp_ranks)
        if key not in self._known:
            place = self._layout.placement
            firsts = [place.device(0, t, p) for p in stages for t in tp_ranks]
            self._known[key] = sorted(device for first in firsts for device in place.dp_group(first))
        return self._known[key]


def _parts(holders: int, wanters: int) -> int:
    """The number of parts into which rows are cut, so that the holders share the sending evenly.

    It is the number for an exact division, but at most 8, unless more are needed to give each holder a part.
    """
    return max(holders // wanters, min(8, holders // math.gcd(holders, wanters)))


def _near(
    holders: Sequence[int], wanters: Sequence[int], devices_per_host: int
) -> Iterable[tuple[Sequence[int], Sequence[int]]]:
    """Pairs (holders, wanters): one per host that has both, and one of all holders with the remaining wanters."""
    if not wanters:
        return
    on_host: dict[int, list[int]] = defaultdict(list)
    for holder in holders:
        on_host[holder // devices_per_host].append(holder)
    lacking: dict[int | None, list[int]] = defaultdict(list)
    for wanter in wanters:
        host = wanter // devices_per_host
        lacking[host if host in on_host else None].append(wanter)
    for host, devices in lacking.items():
        yield (holders if host is None else on_host[host]), devices


# Samples


class Side(Protocol):
    """How samples are distributed over the heads of a placement (`rlhf_tasks.spec.DataSide` is one)."""

    @property
    def placement(self) -> Placement: ...
    @property
    def balance(self) -> Balance: ...
    @property
    def mini_batches(self) -> int: ...
    @property
    def group_size(self) -> int: ...


def mini_batch_blocks(ids: Sequence[int], mini_batches: int, group_size: int = 1) -> list[list[int]]:
    """Cut an iteration's ids into mini-batches: contiguous blocks, whose numbers of groups differ by at most one.

    group_size  consecutive ids that form a group; no block splits one
    """
    assert len(ids) % group_size == 0, f"{len(ids)} samples are not groups of {group_size}"
    groups = [split(len(ids) // group_size, mini_batches, m) for m in range(mini_batches)]
    return [list(ids[start * group_size : stop * group_size]) for start, stop in groups]


def partition(
    ids: Sequence[int],
    dp: int,
    balance: Balance = "count",
    mini_batches: int = 1,
    lengths: Mapping[int, int] | None = None,
    group_size: int = 1,
) -> list[list[int]]:
    """Distribute an iteration's samples over dp ranks, mini-batch by mini-batch. Returns the ids of each dp rank.

    balance     "count": group number i of a mini-batch goes to dp rank i mod dp. "tokens": the remaining group with
                the most tokens goes to the dp rank with the fewest so far (ties: the smaller ids; the rank with fewer
                groups, then the lower one, so that each rank gets a group even where some have no tokens)
    lengths     sample id -> tokens; only "tokens" needs it
    group_size  consecutive samples that stay together
    In the list of a dp rank, the mini-batches follow each other, each with ascending ids.
    """
    shares: list[list[int]] = [[] for _ in range(dp)]
    for block in mini_batch_blocks(ids, mini_batches, group_size):
        groups = [block[start : start + group_size] for start in range(0, len(block), group_size)]
        if balance == "count":
            dealt = [groups[rank::dp] for rank in range(dp)]
        else:
            assert lengths is not None, "balance by tokens needs the samples' lengths"
            dealt = _deal_tokens(groups, dp, lengths)
        for share, more in zip(shares, dealt, strict=True):
            share += chain.from_iterable(sorted(more))
    return shares


def _deal_tokens(groups: Sequence[list[int]], dp: int, lengths: Mapping[int, int]) -> list[list[list[int]]]:
    dealt: list[list[list[int]]] = [[] for _ in range(dp)]
    queue = [(0, 0, rank) for rank in range(dp)]
    for tokens, group in sorted((-sum(lengths[sample] for sample in group), group) for group in groups):
        load, count, rank = queue[0]
        dealt[rank].append(group)
        heapq.heapreplace(queue, (load - tokens, count + 1, rank))
    return dealt


def shares(side: Side, ids: Sequence[int], lengths: Mapping[int, int] | None = None) -> dict[int, list[int]]:
    """The samples that each head of a placement works on: head device -> ids."""
    dp = side.placement.strategy.dp
    dealt = partition(ids, dp, side.balance, side.mini_batches, lengths, side.group_size)
    return dict(zip(side.placement.heads, dealt, strict=True))


def plan_redistribution(
    held: Mapping[int, Collection[int]], wanted: Mapping[int, Sequence[int]], devices_per_host: int, key: str
) -> list[SampleTransfer]:
    """The messages after which every head holds the samples that it wants.

    held, wanted      head device -> sample ids
    devices_per_host  devices with the same id // devices_per_host share a host
    key               whose data move, for the error message

    Samples that a head already holds are not sent. A sample comes from a holder on the same host where there is one;
    among several, from the one with the fewest samples to send so far. One message per pair of devices, sorted by
    (source, destination). Raises LookupError naming a wanted sample that no head holds.
    """
    holders: dict[int, list[int]] = defaultdict(list)
    for device, ids in sorted(held.items()):
        for sample in ids:
            holders[sample].append(device)
    loads: dict[int, int] = defaultdict(int)
    messages: dict[tuple[int, int], list[int]] = defaultdict(list)
    for device, ids in sorted(wanted.items()):
        own = set(held.get(device, ()))
        for sample in (sample for sample in ids if sample not in own):
            if sample not in holders:
                raise LookupError(
                    f"key {key!r}: no head holds sample {sample}, which the head on device {device} needs"
                )
            host = device // devices_per_host
            near = holders[sample]
            if len(near) > 1:
                near = [h for h in near if h // devices_per_host == host] or near
            source = min(near, key=lambda h: (loads[h], h)) if len(near) > 1 else near[0]
            loads[source] += 1
            messages[source, device].append(sample)
    return [SampleTransfer(*pair, tuple(ids)) for pair, ids in sorted(messages.items())]
