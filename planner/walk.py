"""A walk through the tree of partial choices, compiled: it looks for a choice with a period below a threshold.

First come the groups of all calls (the sizes of their meshes), then all meshes, then options, calls in the order of
their load. A branch is cut as soon as its completions provably exceed the threshold (planner/cover.py,
planner/relaxation.py) or lack memory. Complete choices that are left are priced exactly; one that is fast enough but
may lack memory also with every set of its offloaded twins (planner/arrays.py): no twin is faster.

Mirror images are walked both: samples lie on the last stage of a pipeline, so a plan and its image (devices numbered
from the other end) need not cost the same.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.bound import allowance
from planner.compiled import compiled, inner
from planner.cover import Parts, cover_s
from planner.evaluator import always_fits, priced
from planner.exceeds import exceeds
from planner.relaxation import ALONE, BOTH, OPEN, Relaxation, lacks, may_offload, moves_s, overlap
from planner.tree import Tree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DONE, FOUND, PAUSED = range(3)
GROUP, MESH, OPTION = range(3)
"""What a step gives a call: the size of its mesh, the mesh, the option."""

ROUNDING = 1 + 1e-9  # periods that exceed a threshold by less do not count


class Walk(NamedTuple):
    """Where a walk stands.

    steps   [steps, 2] per depth, what is given, and to which call
    depth   [1]
    place   [steps] per depth, place among the call's groups, the group's meshes, or the mesh's rows
    group   [calls] groups, or OPEN; choice [calls] rows, or OPEN
    moves   [moves, 4] seconds of the moves between rows (planner.relaxation.moves_s)
    least_s [calls] seconds at least, by the group
    allowed [steps + 1, calls] per depth, the most seconds that each call may take
    counts  [2] options tried, complete choices priced
    """

    steps: Ints
    depth: Ints
    place: Ints
    group: Ints
    choice: Ints
    moves: Floats
    least_s: Floats
    allowed: Floats
    counts: Ints


def new_walk(r: Relaxation, steps: Ints) -> Walk:
    """A walk at its beginning."""
    n = r.arrays.n_calls
    return Walk(
        steps,
        np.zeros(1, np.int64),
        np.full(len(steps), -1),
        np.full(n, OPEN),
        np.full(n, OPEN),
        np.zeros((len(r.trainer), 4)),
        r.fastest.copy(),
        np.full((len(steps) + 1, n), np.inf),
        np.zeros(2, np.int64),
    )


@compiled
def walk_on(r: Relaxation, t: Tree, walk: Walk, threshold: float, nodes: int) -> tuple[int, float]:
    """Goes on with a walk for so many options.

    Returns (DONE, infinity) when no further choice takes less than the threshold, (FOUND, seconds per iteration)
    at a choice that does, which is then walk.choice, else (PAUSED, infinity). Where the steps do not lead to options,
    what the bounds let pass is FOUND without seconds (infinity).
    """
    depth, until = walk.depth[0], walk.counts[0] + nodes
    while depth >= 0:
        if walk.steps[depth, 0] == GROUP:
            entered = _enter_group(r, t, walk, depth, threshold)
        else:
            entered = _enter_row(r, t, walk, depth, threshold)
        if not entered:
            depth -= 1
        elif depth < len(walk.steps) - 1:
            depth += 1
            walk.place[depth] = -1
        elif walk.steps[depth, 0] != OPTION:
            return FOUND, np.inf
        else:
            time_s = _complete(r, walk, threshold)
            if time_s < threshold:
                walk.depth[0] = depth
                return FOUND, time_s
        walk.depth[0] = depth
        if walk.counts[0] > until:
            return PAUSED, np.inf
    return DONE, np.inf


@inner
def _complete(r: Relaxation, walk: Walk, threshold: float) -> float:
    """The seconds of a complete choice, or of one with offloaded twins, that fits and takes less than the threshold:
    then walk.choice is that one. Infinite if there is none."""
    a, n, resident = r.arrays, r.arrays.n_calls, walk.choice.copy()
    walk.counts[1] += 1
    time_s, _, _ = priced(a, resident - a.start[:n], threshold, True)  # no twin takes less
    if time_s == np.inf or always_fits(a, resident - a.start[:n]):
        return time_s
    for twins in range(1 << n):
        choice, exist = resident.copy(), True
        for call in range(n):
            if twins >> call & 1:
                exist = exist and may_offload(a, call)
                choice[call] += a.offloaded[call] - a.start[call]
        if exist:
            walk.counts[1] += 1
            time_s, excess_bytes, _ = priced(a, choice - a.start[:n], threshold, False)
            if excess_bytes <= 0 and time_s < threshold:
                walk.choice[:] = choice
                return time_s
    return np.inf


@inner
def _enter_group(r: Relaxation, t: Tree, walk: Walk, depth: int, threshold: float) -> bool:
    """Gives the call of a depth its next group that the bounds let pass; leaves it open when there is none."""
    call, g = walk.steps[depth, 1], t.groups
    walk.group[call] = OPEN
    walk.place[depth] += 1
    while g.start[call] + walk.place[depth] < g.start[call + 1]:
        group = g.start[call] + walk.place[depth]
        walk.counts[0] += 1
        if g.seconds[group] > walk.allowed[depth, call]:
            break
        walk.group[call], walk.least_s[call] = group, g.seconds[group]
        if _groups_fit(r, t, walk) and _groups_may_stay(r, t, walk, depth, threshold):
            return True
        walk.place[depth] += 1
    walk.group[call], walk.least_s[call] = OPEN, r.fastest[call]
    return False


@inner
def _groups_fit(r: Relaxation, t: Tree, walk: Walk) -> bool:
    """Whether memory may suffice for the chosen groups, by options and stages that hold least.

    Meshes so large that each two of them share a device all have one in common: they are intervals.
    """
    g, n = t.groups, r.arrays.n_calls
    static, peak, smallest, seen = 0.0, 0.0, 2 * r.n_devices, 0
    while True:
        call = -1  # the largest mesh that is left
        for c in range(n):
            if walk.group[c] == OPEN or seen >> c & 1:
                continue
            if call < 0 or g.size[walk.group[c]] > g.size[walk.group[call]]:
                call = c
        if call < 0 or smallest + g.size[walk.group[call]] <= r.n_devices:
            return static + peak <= r.arrays.memories.bytes.max()
        group, shared = walk.group[call], False
        for c in range(n):  # calls of a frozen role may share its parameters
            shared = shared or (
                seen >> c & 1 == 1 and r.arrays.role[c] == r.arrays.role[call] and r.arrays.trainer[c] < 0
            )
        seen |= 1 << call
        smallest = g.size[group]
        needed = g.least[group, 2]
        if may_offload(r.arrays, call):
            needed += g.least[group, 1]
        elif not shared:
            static += g.least[group, 0]
        for k in range(len(r.reader)):
            other = walk.group[r.trainer[k]]
            if r.reader[k] == call and other != OPEN and g.size[other] != g.size[group]:
                needed += g.least[group, 1]
        peak = max(peak, needed)


@inner
def _groups_may_stay(r: Relaxation, t: Tree, walk: Walk, depth: int, threshold: float) -> bool:
    """Whether cycles and load may keep to the threshold with the chosen groups. If so, notes what is allowed next."""
    allowed = walk.allowed[depth + 1]
    for call in range(len(allowed)):
        spare = allowance(call, walk.least_s, t.cycles.members, t.cycles.delays, threshold) * ROUNDING
        allowed[call] = min(walk.allowed[depth, call], spare)
        if allowed[call] < walk.least_s[call]:
            return False
    return _least_load(r, t, walk, depth + 1, -1, threshold) <= threshold * r.n_devices and _covers(
        r, t, walk, allowed, threshold
    )


@inner
def _covers(r: Relaxation, t: Tree, walk: Walk, allowed: Floats, threshold: float) -> bool:
    """Whether the calls find room in the threshold, by what can run at once (planner/cover.py)."""
    o, g, n = r.options, t.groups, r.arrays.n_calls
    seconds, load, sizes, meet = np.empty(n), np.empty(n), np.zeros(n, np.int64), np.zeros((n, n), np.bool_)
    for call in range(n):
        row, group = walk.choice[call], walk.group[call]
        seconds[call] = walk.least_s[call] if row == OPEN else o[row].seconds
        if group == OPEN:
            load[call] = g.lightest_bare[_last_within(t, call, allowed[call])]
            continue
        sizes[call] = g.size[group]
        load[call] = seconds[call] * sizes[call]
        for other in range(call):
            shared = sizes[call] + sizes[other] > r.n_devices and sizes[other] > 0
            if row != OPEN and walk.choice[other] != OPEN:
                shared = overlap(o, row, walk.choice[other])
            meet[call, other] = meet[other, call] = shared
    moves, moved_s = np.zeros(len(r.trainer), np.bool_), np.zeros(len(r.trainer))
    for k in range(len(moves)):
        a, b = r.trainer[k], r.reader[k]
        if r.delay[k] == 1 and r.alone[k] and walk.group[a] != OPEN and walk.group[b] != OPEN:
            pair_s = g.pair_s[k, walk.group[a] - g.start[a], walk.group[b] - g.start[b]]
            moved_s[k] = max(walk.moves[k, BOTH], pair_s - seconds[a] - seconds[b])
            moves[k] = walk.moves[k, ALONE] > 0 or sizes[a] != sizes[b]
    parts = Parts(seconds, load, sizes, meet, r.trainer, r.reader, moves, moved_s)
    return cover_s(t.cover, parts, r.n_devices) <= threshold * ROUNDING


@inner
def _last_within(t: Tree, call: int, limit: float) -> int:
    """The slowest group of a call whose fastest option keeps to a limit; its first one if none does."""
    low, high = t.groups.start[call], t.groups.start[call + 1]
    while high - low > 1:
        middle = (low + high) // 2
        if t.groups.seconds[middle] <= limit:
            low = middle
        else:
            high = middle
    return low


@inner
def _enter_row(r: Relaxation, t: Tree, walk: Walk, depth: int, threshold: float) -> bool:
    """Gives the call of a depth the next mesh of its group, or the next option on its mesh, that the bounds let
    pass; leaves it without when there is none."""
    n_options, call = len(r.arrays.options), walk.steps[depth, 1]
    if walk.steps[depth, 0] == MESH:
        among, none = t.meshes, OPEN
        low, high = t.groups.begin[walk.group[call]], t.groups.begin[walk.group[call] + 1]
    else:
        row = walk.choice[call]
        none = row if row >= n_options else r.mesh_row[row]
        among, low, high = t.rows, t.row[none - n_options], t.row[none - n_options + 1]
    room = threshold * r.n_devices - _least_load(r, t, walk, depth, call, threshold)
    while low + walk.place[depth] + 1 < high:
        walk.place[depth] += 1
        walk.counts[0] += 1
        row = among[low + walk.place[depth]]
        if r.options[row].seconds > walk.allowed[depth, call]:
            break
        walk.choice[call] = row
        if t.load[row] <= room and _may_stay(r, t, walk, depth, threshold):
            return True
    walk.choice[call] = none
    _note_moves(r, walk, call, False)
    return False


@inner
def _least_load(r: Relaxation, t: Tree, walk: Walk, depth: int, but: int, threshold: float) -> float:
    """The least load of all calls but one: of its row, of its group, or of the lightest group in the time that is
    left to an open call by the cycles and by the emptiest device. Infinite when there is none."""
    g, total = t.groups, 0.0
    free = threshold - _emptiest(r, t, walk.choice)
    for call in range(r.arrays.n_calls):
        if call == but:
            continue
        if walk.choice[call] != OPEN:
            total += t.load[walk.choice[call]]
            continue
        limit = min(walk.allowed[depth, call], free)
        if walk.least_s[call] > limit:
            return np.inf
        group = walk.group[call]
        total += g.lightest[_last_within(t, call, limit)] if group == OPEN else g.load[group]
    return total


@inner
def _emptiest(r: Relaxation, t: Tree, choice: Ints) -> float:
    """The least load of a device by the chosen rows. Loads change only where a mesh begins or ends."""
    o, least = r.options, np.inf
    for point in range(-1, 2 * len(choice)):
        device = 0
        if point >= 0:
            row = choice[point // 2]
            if row == OPEN:
                continue
            device = o[row].first + (o[row].size if point % 2 else 0)
            if device >= r.n_devices:
                continue
        load = 0.0
        for row in choice:
            if row != OPEN and o[row].first <= device < o[row].first + o[row].size:
                load += t.load[row] / o[row].size
        least = min(least, load)
    return least


@inner
def _may_stay(r: Relaxation, t: Tree, walk: Walk, depth: int, threshold: float) -> bool:
    """Whether some completion may keep to memory, threshold and the cluster's load. Prices the moves that the
    depth's call decides, but only when the bound with their least seconds lets the choice pass."""
    allowed, call = walk.allowed[depth + 1], walk.steps[depth, 1]
    if lacks(r, walk.choice):
        return False
    for exact in (False, True):
        if not _note_moves(r, walk, call, exact) and exact:
            break
        if exceeds(r, walk.choice, walk.least_s, walk.moves, threshold, allowed):
            return False
        for other in range(len(allowed)):
            allowed[other] = min(allowed[other], walk.allowed[depth, other])
        if _least_load(r, t, walk, depth + 1, -1, threshold) > threshold * r.n_devices:
            return False
        if not _covers(r, t, walk, allowed, threshold):
            return False
    return True


@inner
def _note_moves(r: Relaxation, walk: Walk, call: int, exact: bool) -> bool:
    """Notes the seconds of the moves that a call has part in, exactly where both ends are options, if wanted; returns
    whether any of these moves."""
    n, between_options = len(r.arrays.options), False
    for k in range(len(r.trainer)):
        if r.trainer[k] == call or r.reader[k] == call:
            trainer, reader = walk.choice[r.trainer[k]], walk.choice[r.reader[k]]
            if trainer == OPEN or reader == OPEN:
                walk.moves[k] = 0.0
            else:
                moves_s(r, k, trainer, reader, exact, walk.moves[k])
                moves = trainer < n and reader < n and walk.moves[k, ALONE] > 0
                between_options = between_options or moves
    return between_options
