"""Whether the calls of a partial choice find room in a period (by load, by what can run at once, by memory), and
whether their meshes can lie to each other as it says: which share a device, and which do not."""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

import numpy as np
from numpy.typing import NDArray

from planner.search.bounds.concurrency_bound import PartialChoice, cover_s
from planner.search.bounds.relaxation import (
    ALONE,
    APART,
    BOTH,
    MEET,
    OPEN,
    Relaxation,
    may_offload,
    placed,
    relation,
    seconds_of,
)
from planner.search.bounds.tree_order import Tree
from planner.search.compiled.arrays import Rows
from planner.search.compiled.compile import compiled, inner

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SLACK = 1 + 1e-9  # periods that exceed a threshold by less do not count
MOST_TRIES = 10_000  # places that are tried; a tenth of a millisecond


@inner
def groups_fit(r: Relaxation, choice: Ints) -> bool:
    """Whether memory may suffice for the chosen groups, by options and stages that hold least.

    Meshes so large that each two of them share a device all have one in common: they are intervals.
    """
    o, n = r.arrays.options, r.arrays.n_calls
    static, peak, smallest, seen = 0.0, 0.0, 2 * r.n_devices, 0
    while True:
        call = -1  # the largest mesh that is left
        for c in range(n):
            if choice[c] == OPEN or seen >> c & 1:
                continue
            if call < 0 or o[choice[c]].size > o[choice[call]].size:
                call = c
        if call < 0 or smallest + o[choice[call]].size <= r.n_devices:
            return static + peak <= r.arrays.memories.bytes.max()
        row, shared = choice[call], False
        for c in range(n):  # calls of a frozen role may share its parameters
            shared = shared or (
                seen >> c & 1 == 1 and r.arrays.role[c] == r.arrays.role[call] and r.arrays.trainer[c] < 0
            )
        seen |= 1 << call
        smallest = o[row].size
        needed = r.least[row, 2]
        if may_offload(r.arrays, call):
            needed += r.least[row, 1]
        elif not shared:
            static += r.least[row, 0]
        for k in range(len(r.reader)):
            other = choice[r.trainer[k]]
            if r.reader[k] == call and other != OPEN and o[other].size != o[row].size:
                needed += r.least[row, 1]
        peak = max(peak, needed)


@inner
def covers(
    r: Relaxation, t: Tree, choice: Ints, meet: Ints, moves: Floats, allowed: Floats, threshold: float
) -> bool:
    """Whether the calls find room in the threshold, by what can run at once
    (planner/search/bounds/concurrency_bound.py)."""
    o, n, seconds = r.arrays.options, r.arrays.n_calls, seconds_of(r, choice)
    load, sizes, meeting = np.empty(n), np.zeros(n, np.int64), meet == MEET
    for call in range(n):
        meeting[call, call] = False
        if choice[call] == OPEN:
            load[call] = t.lightest_bare[
                _last_within(t.seconds, t.start[call], t.start[call + 1], allowed[call])
            ]
        else:
            sizes[call] = o[choice[call]].size
            load[call] = seconds[call] * sizes[call]
    moved, moved_s = np.zeros(len(r.trainer), np.bool_), np.zeros(len(r.trainer))
    for k in range(len(moves)):
        if r.delay[k] == 1 and r.alone[k]:
            moved[k], moved_s[k] = moves[k, ALONE] > 0, moves[k, BOTH]
    parts = PartialChoice(seconds, load, sizes, meeting, r.trainer, r.reader, moved, moved_s)
    return cover_s(t.cover, parts, r.n_devices) <= threshold * SLACK


@inner
def least_load(r: Relaxation, t: Tree, choice: Ints, allowed: Floats, threshold: float) -> float:
    """The least load of all calls: of its row, or of the lightest group in the time that is left to an open call by
    the cycles and by the emptiest device. Infinite when there is none."""
    options, total = r.arrays.options, 0.0
    free = threshold - _emptiest(options, r.load, r.n_devices, choice)
    for call in range(len(choice)):
        row, limit = choice[call], min(allowed[call], free)
        if row == OPEN and r.fastest[call] <= limit:
            total += t.lightest[_last_within(t.seconds, t.start[call], t.start[call + 1], limit)]
        elif row != OPEN and (placed(options, row) or options[row].seconds <= limit):
            total += r.load[row]
        else:
            return np.inf
    return total


@inner
def _last_within(seconds: Floats, low: int, high: int, limit: float) -> int:
    """The slowest of a call's groups, low .. high - 1, that keeps to a limit; the first one if none does."""
    while high - low > 1:
        middle = (low + high) // 2
        if seconds[middle] <= limit:
            low = middle
        else:
            high = middle
    return low


@inner
def _emptiest(options: Rows, load: Floats, n_devices: int, choice: Ints) -> float:
    """The least load of a device by the rows with a place. Loads change only where a mesh begins or ends."""
    least = np.inf
    for point in range(-1, 2 * len(choice)):
        device = 0
        if point >= 0:
            row = choice[point // 2]
            if not placed(options, row):
                continue
            device = options[row].first + (options[row].size if point % 2 else 0)
            if device >= n_devices:
                continue
        there = 0.0
        for row in choice:
            if placed(options, row):
                mesh = options[row]
                if mesh.first <= device < mesh.first + mesh.size:
                    there += load[row] / mesh.size
        least = min(least, there)
    return least


@inner
def lies_as_said(r: Relaxation, choice: Ints, meet: Ints, call: int) -> bool:
    """Whether the mesh of a call with a place shares a device with those of the others with which it should."""
    o = r.arrays.options
    for other in range(len(choice)):
        there = choice[other]
        if placed(o, there) and relation(o, r.n_devices, choice[call], there) != meet[call, other]:
            return False
    return True


@compiled
def can_be_arranged(r: Relaxation, order: Ints, choice: Ints, meet: Ints) -> bool:
    """Whether the calls without a place have one each, so that all meshes lie to each other as they should; or
    whether that has not been found out in MOST_TRIES.

    order   [calls] in which calls are given places; where one finds none, the call before it takes another
    choice  [calls] rows, none of them OPEN; meet  [calls, calls] UNKNOWN, APART or MEET
    """
    o, n = r.arrays.options, len(choice)
    call, size, first = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    spot, begin, end = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    n_placed = i = 0
    for with_place in (True, False):
        for c in order:
            row = choice[c]
            if placed(o, row) == with_place:
                while not with_place and o[row].strategy != OPEN:
                    row = r.above[row]
                call[i], size[i], first[i] = c, o[row].size, o[row].first
                if not with_place:
                    group = row - r.arrays.start[-1]
                    spot[i] = begin[i] = r.spots[group]
                    end[i] = r.spots[group + 1]
                i += 1
        n_placed = i if with_place else n_placed
    i, tries = n_placed, 0
    while n_placed <= i < n and tries < MOST_TRIES:
        tries += 1
        if spot[i] == end[i]:
            spot[i] = begin[i]
            i -= 1
            spot[i] += 1
            continue
        first[i] = r.spot[spot[i]]
        if _lies(i, first, size, call, meet):
            i += 1
        else:
            spot[i] += 1
    return i >= n_placed


@inner
def _lies(i: int, first: Ints, size: Ints, call: Ints, meet: Ints) -> bool:
    """Whether mesh i shares a device with those before it with which it should."""
    for j in range(i):
        shares = first[i] < first[j] + size[j] and first[j] < first[i] + size[i]
        if meet[call[i], call[j]] == (APART if shares else MEET):
            return False
    return True
