"""Seconds of redistributions and reallocations, compiled for the plan search.

They are exact: equal to what planner.pricing.plans computes from the executors' lists of messages
(rlhf_tasks/parallel/layout/transfers.py), with ties resolved in the same way. Placements must be on consecutive
devices, and samples dealt by count. Only names of parameters and ids of samples are left out.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.pricing.device_classes import DeviceClasses
from planner.search.compiled.compile import compiled, inner
from planner.search.compiled.resharding_pieces import PIECE, Parts, devices, pieces

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NEED = 5  # numbers per need: some devices that need the same bytes, and the devices that hold these


class Links(NamedTuple):
    """Links of a cluster. A message takes latency_s + bytes * per_byte_s seconds.

    per_host    devices of a host
    host_class  [hosts] int64: number of the class of its devices
    latency_s, per_byte_s  [classes, classes, 2] float64: between devices of two classes, inside a host and between
                           hosts
    least_per_byte_s       (smallest of all links, smallest of all links between hosts)
    """

    per_host: int
    host_class: Ints
    latency_s: Floats
    per_byte_s: Floats
    least_per_byte_s: tuple[float, float]


def links(classes: DeviceClasses) -> Links:
    """The links of a cluster's devices for compiled code."""
    numbers = range(len(classes.profiles))
    found = np.array([[[classes.link(a, b, c) for c in (False, True)] for b in numbers] for a in numbers])
    per_byte_s = 1 / found[..., 1]
    return Links(
        classes.cluster.devices_per_host,
        np.array(classes.of_host, np.int64),
        np.ascontiguousarray(found[..., 0]),
        per_byte_s,
        (float(per_byte_s.min()), float(per_byte_s[..., 1].min())),
    )


@inner
def _message_s(links: Links, sender: int, receiver: int, size_bytes: float) -> float:
    """Seconds of a message of size_bytes between two devices."""
    a, b = sender // links.per_host, receiver // links.per_host
    crosses = 0 if a == b else 1
    of_a, of_b = links.host_class[a], links.host_class[b]
    return links.latency_s[of_a, of_b, crosses] + size_bytes * links.per_byte_s[of_a, of_b, crosses]


# Samples


@inner
def _deal(n_groups: int, dp: int, blocks: int) -> Ints:
    """[n_groups] int64: the dp rank of each group of samples, dealt by count within each block."""
    rank = np.empty(n_groups, np.int64)
    for block in range(blocks):
        start = block * n_groups // blocks
        for i in range(start, (block + 1) * n_groups // blocks):
            rank[i] = (i - start) % dp
    return rank


@compiled
def redistribution_s(
    source: Ints, destination: Ints, n_groups: int, group_bytes: float, links: Links
) -> float:
    """Seconds of a redistribution of n_groups groups of samples.

    source, destination  [4] int64: first head, distance from head to head, dp, blocks
    group_bytes          bytes of a group
    """
    dp_a, dp_b = source[2], destination[2]
    holder, wanter = _deal(n_groups, dp_a, source[3]), _deal(n_groups, dp_b, destination[3])
    # A linked list of groups for each holder: first[holder], then following[group]; -1 ends it.
    first, following = np.full(dp_a, -1), np.empty(n_groups, np.int64)
    for i in range(n_groups):
        following[i], first[holder[i]] = first[holder[i]], i
    received, count = np.zeros(dp_b), np.zeros(dp_b, np.int64)
    touched = np.empty(dp_b, np.int64)
    longest = 0.0
    for a in range(dp_a):
        n_touched, i = 0, first[a]
        while i >= 0:
            if not count[wanter[i]]:
                touched[n_touched] = wanter[i]
                n_touched += 1
            count[wanter[i]] += 1
            i = following[i]
        sender, sent = source[0] + a * source[1], 0.0
        for b in touched[:n_touched]:
            receiver = destination[0] + b * destination[1]
            if receiver != sender:
                seconds = _message_s(links, sender, receiver, count[b] * group_bytes)
                sent += seconds
                received[b] += seconds
            count[b] = 0
        longest = max(longest, sent)
    return max(longest, received.max())


# Parameters


@inner
def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


@inner
def _cut_into(holders: int, wanters: int) -> int:
    """Parts into which a need is cut, so that its holders share the sending evenly; 8 are enough in general."""
    return max(holders // wanters, min(8, holders // _gcd(holders, wanters)))


@inner
def _add_needs(needs: Ints, n: int, rows: int, row_bytes: int, h0: int, h1: int, w0: int, w1: int) -> int:
    """Writes the needs of one piece from need n on; returns the new end.

    A need is NEED numbers: bytes, then the ranges of its holders, h0 .. h1 - 1, and of its wanters, w0 .. w1 - 1, in
    the pool of devices. Wanters are the devices that need the bytes.
    rows  rows of the piece; 0: whole parameters, which are not cut further
    """
    n_parts = 1
    if rows:
        n_parts = min(rows, _cut_into(h1 - h0, w1 - w0))
    for part in range(n_parts):
        # Rows are split as evenly as integers allow; whole parameters count as one row.
        size = (part + 1) * rows // n_parts - part * rows // n_parts if rows else 1
        at = NEED * (n + part)
        needs[at], needs[at + 1], needs[at + 2], needs[at + 3], needs[at + 4] = (
            size * row_bytes,
            h0,
            h1,
            w0,
            w1,
        )
    return n + n_parts


@inner
def _drop_held(pool: Ints, holders: int, wanters: int, end: int) -> int:
    """Removes from pool[wanters:end] the devices of pool[holders:wanters], both ascending. Returns the new end."""
    kept, h = wanters, holders
    for i in range(wanters, end):
        while h < wanters and pool[h] < pool[i]:
            h += 1
        if h == wanters or pool[h] != pool[i]:
            pool[kept] = pool[i]
            kept += 1
    return kept


@inner
def _add_near(
    needs: Ints, n: int, pool: Ints, h0: int, w0: int, w1: int, per_host: int, rows: int, row_bytes: int
) -> tuple[int, int]:
    """Writes the needs of one piece, host by host. Returns the new ends of the needs and of the pool.

    Wanters on a host with holders receive from these. All other wanters form one need, of any holder.
    Holders are pool[h0:w0], wanters pool[w0:w1], both ascending.
    """
    end = w1  # the wanters on hosts without a holder are listed again, after all wanters
    for i in range(w0, w1):
        low, high = _on_host(pool, h0, w0, pool[i] // per_host, per_host)
        if low == high:
            pool[end] = pool[i]
            end += 1
    # Needs are in the order of the first wanters, as in the executors' list, since ties are resolved by this order.
    told, i = False, w0
    while i < w1:
        host, first = pool[i] // per_host, i
        while i < w1 and pool[i] // per_host == host:
            i += 1
        low, high = _on_host(pool, h0, w0, host, per_host)
        if low < high:
            n = _add_needs(needs, n, rows, row_bytes, low, high, first, i)
        elif not told:
            told = True
            n = _add_needs(needs, n, rows, row_bytes, h0, w0, w1, end)
    return n, end


@inner
def _on_host(pool: Ints, start: int, end: int, host: int, per_host: int) -> tuple[int, int]:
    """(start, end) of the devices of a host in pool[start:end], which is ascending."""
    low = _first_from(pool, start, end, host * per_host)
    return low, _first_from(pool, low, end, (host + 1) * per_host)


@inner
def _first_from(pool: Ints, start: int, end: int, device: int) -> int:
    """The first index in pool[start:end], which is ascending, with a device >= `device`; `end` if there is none."""
    while start < end:
        middle = (start + end) // 2
        if pool[middle] < device:
            start = middle + 1
        else:
            end = middle
    return start


@inner
def _sink(heap: Ints, n: int, loads: Ints, at: int) -> None:
    """Restores the heap heap[:n] of holders, ordered by (load, number), after the load at index `at` has grown."""
    holder = heap[at]
    while 2 * at + 1 < n:
        child = 2 * at + 1
        if child + 1 < n and _before(loads, heap[child + 1], heap[child]):
            child += 1
        if not _before(loads, heap[child], holder):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = holder


@inner
def _before(loads: Ints, a: int, b: int) -> bool:
    return loads[a] < loads[b] or (loads[a] == loads[b] and a < b)


@compiled
def reallocation_s(model: Parts, source: Ints, destination: Ints, links: Links) -> float:
    """Seconds of a reallocation.

    source, destination  [4] int64: first device, dp, tp, pp

    It follows the executors' greedy rule: needs in order of falling size; each wanter receives from the holder with
    the least load so far. All bytes from one device to another form one message.
    """
    # Each tp rank of both sides has two borders; an entry has at most one piece between neighbouring borders.
    most = len(model.entries) * (2 * (source[2] + destination[2]) - 1)
    found = np.empty(PIECE * most, np.int64)
    n_pieces, n_devices, most_needs = pieces(model, source, destination, found)
    needs, n_needs = np.empty(NEED * most_needs, np.int64), 0
    pool, end = np.empty(n_devices, np.int64), 0
    for at in range(0, PIECE * n_pieces, PIECE):
        h0 = end
        w0 = devices(source, found[at], found[at + 4], found[at + 5], pool, h0)
        w1 = devices(destination, found[at + 1], found[at + 6], found[at + 7], pool, w0)
        w1 = _drop_held(pool, h0, w0, w1)
        row_bytes = found[at + 2] * model.itemsize
        n_needs, end = _add_near(needs, n_needs, pool, h0, w0, w1, links.per_host, found[at + 3], row_bytes)
    n_messages = 0
    for i in range(n_needs):
        n_messages += needs[NEED * i + 4] - needs[NEED * i + 3]
    if not n_messages:
        return 0.0
    n_a, n_b = source[1] * source[2] * source[3], destination[1] * destination[2] * destination[3]
    # pairs, sent: a hash table from (holder, wanter) to bytes, with open addressing, at most half full.
    slots = 2
    while slots < 2 * n_messages:
        slots *= 2
    pairs, sent = np.full(slots, -1), np.zeros(slots, np.int64)
    loads = np.zeros(n_a, np.int64)
    # Largest first; of equal ones, the earlier first. One number sorts by both: i - size * n_needs, whose absolute
    # value stays below 2^63. Modulo n_needs it is i again, because % of a negative number is not negative.
    ranking = np.empty(n_needs, np.int64)
    for i in range(n_needs):
        ranking[i] = i - needs[NEED * i] * n_needs
    ranking.sort()
    heap = np.empty(n_a, np.int64)
    for ranked in ranking:
        need = NEED * (ranked % n_needs)
        size, h0, h1, w0, w1 = needs[need], needs[need + 1], needs[need + 2], needs[need + 3], needs[need + 4]
        for at in range(h1 - h0):
            heap[at] = pool[h0 + at] - source[0]
        # Loads have changed since the last need, so the heap is built anew, from the last parent up to the root.
        for at in range((h1 - h0) // 2 - 1, -1, -1):
            _sink(heap, h1 - h0, loads, at)
        for w in range(w0, w1):
            holder = heap[0]
            loads[holder] += size
            _sink(heap, h1 - h0, loads, 0)
            pair = holder * n_b + pool[w] - destination[0]
            slot = pair * 0x9E3779B1 % slots
            while pairs[slot] >= 0 and pairs[slot] != pair:
                slot = (slot + 1) % slots
            pairs[slot] = pair
            sent[slot] += size
    out, received = np.zeros(n_a), np.zeros(n_b)
    for slot in range(slots):
        if pairs[slot] >= 0:
            a, b = pairs[slot] // n_b, pairs[slot] % n_b
            seconds = _message_s(links, source[0] + a, destination[0] + b, sent[slot])
            out[a] += seconds
            received[b] += seconds
    return max(out.max(), received.max())
