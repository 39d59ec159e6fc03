"""A walk through the tree of partial choices, compiled: it looks for a choice with a period below a threshold.

First come the groups of all calls (the sizes of their meshes), then of each two meshes whether they share a device,
then strategies, then places, then micro-batches (planner/relaxation.py). So a mesh is placed only where sizes,
strategies and what is shared leave hope, not once for each of the many places that come to the same. A branch is cut
as soon as its completions provably exceed the threshold (planner/cover.py, planner/exceeds.py) or lack memory.
Complete choices that are left are priced exactly; one that is fast enough but may lack memory also with every set of
its offloaded twins (planner/arrays.py): no twin is faster.

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
from planner.evaluator import always_fits, priced
from planner.exceeds import exceeds
from planner.relaxation import (
    ALONE,
    APART,
    MEET,
    OPEN,
    UNKNOWN,
    Relaxation,
    lacks,
    may_offload,
    moves_s,
    placed,
    relation,
)
from planner.room import ROUNDING, covers, groups_fit, least_load, seconds_of
from planner.tree import Tree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DONE, FOUND, PAUSED = range(3)
GROUP, PAIR, BELOW = range(3)
"""What a step gives: a call its group, two calls whether their meshes share a device, a call a row below its own."""


class Walk(NamedTuple):
    """Where a walk stands.

    steps   [steps, 3] per depth, what is given, and to which call or calls
    depth   [1]
    place   [steps] per depth, place among what may be given
    choice  [calls] rows, or OPEN
    meet    [calls, calls] whether meshes share a device: UNKNOWN, APART, MEET
    moves   [moves, 4] seconds of the moves between rows (planner.relaxation.moves_s)
    allowed [steps + 1, calls] per depth, the most seconds that each call may take
    counts  [2] rows and relations tried, complete choices priced
    """

    steps: Ints
    depth: Ints
    place: Ints
    choice: Ints
    meet: Ints
    moves: Floats
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
        np.where(np.eye(n, dtype=np.bool_), MEET, UNKNOWN),
        np.zeros((len(r.trainer), 4)),
        np.full((len(steps) + 1, n), np.inf),
        np.zeros(2, np.int64),
    )


@compiled
def walk_on(r: Relaxation, t: Tree, walk: Walk, threshold: float, nodes: int) -> tuple[int, float]:
    """Goes on with a walk for so many rows and relations.

    Returns (DONE, infinity) when no further choice takes less than the threshold, (FOUND, seconds per iteration)
    at a choice that does, which is then walk.choice, else (PAUSED, infinity). Where the steps do not lead to options,
    what the bounds let pass is FOUND without seconds (infinity).
    """
    depth, until = walk.depth[0], walk.counts[0] + nodes
    while depth >= 0:
        if walk.steps[depth, 0] == GROUP:
            entered = _enter_group(r, t, walk, depth, threshold)
        elif walk.steps[depth, 0] == PAIR:
            entered = _enter_relation(r, t, walk, depth, threshold)
        else:
            entered = _enter_row(r, t, walk, depth, threshold)
        if not entered:
            depth -= 1
        elif depth < len(walk.steps) - 1:
            depth += 1
            walk.place[depth] = -1
        elif walk.steps[depth, 0] != BELOW:
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
    call = walk.steps[depth, 1]
    walk.place[depth] += 1
    while t.start[call] + walk.place[depth] < t.start[call + 1]:
        row = t.group[t.start[call] + walk.place[depth]]
        walk.counts[0] += 1
        if r.arrays.options[row].seconds > walk.allowed[depth, call]:
            break
        _give_group(r, walk, call, row)
        if groups_fit(r, walk.choice) and _groups_may_stay(r, t, walk, depth, threshold):
            return True
        walk.place[depth] += 1
    _give_group(r, walk, call, OPEN)
    return False


@inner
def _give_group(r: Relaxation, walk: Walk, call: int, row: int) -> None:
    """Gives a call a group, or leaves it open, with what follows for relations and moves."""
    walk.choice[call] = row
    for other in range(len(walk.choice)):
        if other != call:
            _relate(walk, call, other, relation(r, row, walk.choice[other]))
    _note_moves(r, walk, call, False)


@inner
def _relate(walk: Walk, a: int, b: int, related: int) -> None:
    walk.meet[a, b] = walk.meet[b, a] = related


@inner
def _groups_may_stay(r: Relaxation, t: Tree, walk: Walk, depth: int, threshold: float) -> bool:
    """Whether cycles and load may keep to the threshold with the chosen groups. If so, notes what is allowed next."""
    allowed, least_s = walk.allowed[depth + 1], seconds_of(r, walk.choice)
    for call in range(len(allowed)):
        spare = allowance(call, least_s, t.cycles.members, t.cycles.delays, threshold) * ROUNDING
        allowed[call] = min(walk.allowed[depth, call], spare)
        if allowed[call] < least_s[call]:
            return False
    if least_load(r, t, walk.choice, allowed, -1, threshold) > threshold * r.n_devices:
        return False
    return covers(r, t, walk.choice, walk.meet, walk.moves, allowed, threshold)


@inner
def _enter_relation(r: Relaxation, t: Tree, walk: Walk, depth: int, threshold: float) -> bool:
    """Says of the calls of a depth that their meshes share a device, or do not, whichever comes next and passes the
    bounds; leaves it unknown when neither does."""
    a, b = walk.steps[depth, 1], walk.steps[depth, 2]
    if relation(r, walk.choice[a], walk.choice[b]) == MEET:
        walk.place[depth] += 1
        walk.allowed[depth + 1] = walk.allowed[depth]
        return walk.place[depth] == 0
    while walk.place[depth] < 1:
        walk.place[depth] += 1
        walk.counts[0] += 1
        _relate(walk, a, b, MEET if walk.place[depth] == 0 else APART)
        if _side_by_side(r, walk, a, b) and _may_stay(r, t, walk, depth, threshold):
            return True
    _relate(walk, a, b, UNKNOWN)
    _note_moves(r, walk, a, False)
    return False


@inner
def _side_by_side(r: Relaxation, walk: Walk, a: int, b: int) -> bool:
    """Whether two meshes and each third one have room beside each other where they share no device."""
    o, meet = r.arrays.options, walk.meet
    for c in range(len(walk.choice)):
        apart = meet[a, b] == APART and meet[a, c] == APART and meet[b, c] == APART
        if apart and o[walk.choice[a]].size + o[walk.choice[b]].size + o[walk.choice[c]].size > r.n_devices:
            return False
    return True


@inner
def _enter_row(r: Relaxation, t: Tree, walk: Walk, depth: int, threshold: float) -> bool:
    """Gives the call of a depth the next row below its own that the bounds let pass; gives it back its own when there
    is none."""
    n_options, call = r.arrays.start[-1], walk.steps[depth, 1]
    above = walk.choice[call] if walk.place[depth] < 0 else r.above[walk.choice[call]]
    low, high = r.begin[above - n_options], r.begin[above - n_options + 1]
    room = threshold * r.n_devices - least_load(r, t, walk.choice, walk.allowed[depth], call, threshold)
    while low + walk.place[depth] + 1 < high:
        walk.place[depth] += 1
        walk.counts[0] += 1
        row = r.below[low + walk.place[depth]]
        if r.arrays.options[row].seconds > walk.allowed[depth, call]:
            break
        walk.choice[call] = row
        if r.load[row] > room or not _lies_as_said(r, walk, call):
            continue
        if _may_stay(r, t, walk, depth, threshold) and (row < n_options or _fast_enough(r, walk, threshold)):
            return True
    walk.choice[call] = above
    _note_moves(r, walk, call, True)
    return False


@inner
def _lies_as_said(r: Relaxation, walk: Walk, call: int) -> bool:
    """Whether a call's mesh shares a device with those with which it should, if it has a place."""
    if placed(r, walk.choice[call]):
        for other in range(len(walk.choice)):
            there = walk.choice[other]
            if placed(r, there) and relation(r, walk.choice[call], there) != walk.meet[call, other]:
                return False
    return True


@inner
def _fast_enough(r: Relaxation, walk: Walk, threshold: float) -> bool:
    """Whether, once all calls have placements, the fastest options there take less than the threshold."""
    a, n_options = r.arrays, r.arrays.start[-1]
    rows = walk.choice.copy()
    for call in range(len(rows)):
        if not placed(r, rows[call]):
            return True
        if rows[call] >= n_options:
            rows[call] = r.below[r.begin[rows[call] - n_options]]
    walk.counts[1] += 1
    return priced(a, rows - a.start[: len(rows)], threshold, True)[0] < threshold


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
        if exceeds(r, walk.choice, walk.meet, walk.moves, threshold, allowed):
            return False
        for other in range(len(allowed)):
            allowed[other] = min(allowed[other], walk.allowed[depth, other])
        if least_load(r, t, walk.choice, allowed, -1, threshold) > threshold * r.n_devices:
            return False
        if not covers(r, t, walk.choice, walk.meet, walk.moves, allowed, threshold):
            return False
    return True


@inner
def _note_moves(r: Relaxation, walk: Walk, call: int, exact: bool) -> bool:
    """Notes the seconds of the moves that a call has part in, exactly between placements, if wanted; returns whether
    any of these moves."""
    between_placements = False
    for k in range(len(r.trainer)):
        a, b = r.trainer[k], r.reader[k]
        if a == call or b == call:
            trainer, reader = walk.choice[a], walk.choice[b]
            if trainer == OPEN or reader == OPEN:
                walk.moves[k] = 0.0
            else:
                moves_s(r, k, trainer, reader, walk.meet[a, b], exact, walk.moves[k])
                moves = placed(r, trainer) and placed(r, reader) and walk.moves[k, ALONE] > 0
                between_placements = between_placements or moves
    return between_placements
