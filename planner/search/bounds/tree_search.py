"""A walk through the tree of partial choices, compiled: it looks for a choice with a period below a threshold.

First come the groups of all calls (the sizes of their meshes), then of each two meshes whether they share a device,
then a strategy and a place for one call after another, then micro-batches (planner/search/bounds/relaxation.py). So
a mesh is placed only where sizes, strategies and what is shared leave hope, not once for each of the many places
that come to the same. A branch is cut as soon as its meshes cannot lie as they should
(feasibility.py), or its completions provably exceed the threshold (concurrency_bound.py, period_bound.py) or lack
memory. Complete choices that are left are priced exactly, with every set of their offloaded twins
(planner/search/compiled/arrays.py).

Mirror images are walked both: samples lie on the last stage of a pipeline, so a plan and its image (devices numbered
from the other end) need not cost the same.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.bounds.feasibility import (
    SLACK,
    can_be_arranged,
    covers,
    groups_fit,
    least_load,
    lies_as_said,
)
from planner.search.bounds.period_bound import exceeds
from planner.search.bounds.relaxation import (
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
    seconds_of,
)
from planner.search.bounds.root_bound import allowance
from planner.search.bounds.tree_order import Tree
from planner.search.compiled.compile import compiled, inner
from planner.search.compiled.evaluator import priced

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
    found   [calls] rows of the last complete choice that was found
    meet    [calls, calls] whether meshes share a device: UNKNOWN, APART, MEET
    moves   [moves, 4] seconds of the moves between rows (planner.search.bounds.relaxation.moves_s)
    allowed [steps + 1, calls] per depth, the most seconds that each call may take
    counts  [2] rows and relations tried, complete choices priced
    """

    steps: Ints
    depth: Ints
    place: Ints
    choice: Ints
    found: Ints
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
    at a choice that does, which is then walk.found, else (PAUSED, infinity). Where the steps do not lead to options,
    what the bounds let pass is FOUND without seconds (infinity).
    """
    depth, until = walk.depth[0], walk.counts[0] + nodes
    while depth >= 0 and walk.counts[0] <= until:
        found, time_s = False, np.inf
        if not _give_next(r, t, walk, depth):
            depth -= 1
        elif _may_stay(r, t, walk, depth, threshold):
            if depth < len(walk.steps) - 1:
                depth += 1
                walk.place[depth] = -1
            elif walk.steps[depth, 0] == BELOW:
                time_s = _complete(r, walk, threshold)
                found = time_s < threshold
            else:
                found = True
        walk.depth[0] = depth
        if found:
            return FOUND, time_s
    return DONE if depth < 0 else PAUSED, np.inf


@inner
def _complete(r: Relaxation, walk: Walk, threshold: float) -> float:
    """The seconds of the fastest that fits and takes less than the threshold of a complete choice and those with
    offloaded twins: then walk.found is that one. Infinite if there is none."""
    a, n, fastest_s = r.arrays, r.arrays.n_calls, np.inf
    for twins in range(1 << n):
        choice, exist = walk.choice.copy(), True
        for call in range(n):
            if twins >> call & 1:
                exist = exist and may_offload(a, call)
                choice[call] += a.offloaded[call] - a.start[call]
        if exist:
            walk.counts[1] += 1
            time_s, excess_bytes, _ = priced(a, choice - a.start[:n], min(threshold, fastest_s), False)
            if excess_bytes <= 0 and time_s < min(threshold, fastest_s):
                walk.found[:], fastest_s = choice, time_s
    return fastest_s


@inner
def _give_next(r: Relaxation, t: Tree, walk: Walk, depth: int) -> bool:
    """Gives what comes next at a depth; takes it back when there is nothing left that the cycles allow."""
    kind, call, n_options = walk.steps[depth, 0], walk.steps[depth, 1], r.arrays.start[-1]
    walk.place[depth] += 1
    walk.counts[0] += 1
    if kind == PAIR:
        return _relate_next(r, walk, call, walk.steps[depth, 2], walk.place[depth])
    if kind == GROUP:
        above, among, low, high = OPEN, t.group, t.start[call], t.start[call + 1]
    else:
        above = walk.choice[call] if walk.place[depth] == 0 else r.above[walk.choice[call]]
        among, low, high = r.below, r.begin[above - n_options], r.begin[above - n_options + 1]
    at = low + walk.place[depth]
    left = at < high and r.arrays.options[among[at]].seconds <= walk.allowed[depth, call]
    walk.choice[call] = among[at] if left else above
    if kind == GROUP:
        for other in range(len(walk.choice)):
            if other != call:
                related = relation(r.arrays.options, r.n_devices, walk.choice[call], walk.choice[other])
                walk.meet[call, other] = walk.meet[other, call] = related
    if kind == GROUP or not left:
        _note_moves(r, walk, call, True)
    return left


@inner
def _relate_next(r: Relaxation, walk: Walk, a: int, b: int, place: int) -> bool:
    """Says of two calls that their meshes share a device, then that they do not, unless their sizes have said so."""
    if relation(r.arrays.options, r.n_devices, walk.choice[a], walk.choice[b]) == MEET:
        return place == 0
    walk.meet[a, b] = walk.meet[b, a] = MEET if place == 0 else APART if place == 1 else UNKNOWN
    if place > 1:
        _note_moves(r, walk, a, True)
    return place <= 1


@inner
def _may_stay(r: Relaxation, t: Tree, walk: Walk, depth: int, threshold: float) -> bool:
    """Whether some completion may keep to memory, threshold and the cluster's load. If so, notes what is allowed
    next."""
    kind, call, other = walk.steps[depth]
    o, allowed, choice = r.arrays.options, walk.allowed[depth + 1], walk.choice
    allowed[:] = walk.allowed[depth]
    if kind == PAIR and relation(o, r.n_devices, choice[call], choice[other]) == MEET:
        return True  # the sizes have said so, and all else is as it was
    has_place = kind == BELOW and placed(o, choice[call])
    if has_place and not lies_as_said(r, choice, walk.meet, call):
        return False
    if (kind == PAIR or has_place) and not can_be_arranged(r, t.order, choice, walk.meet):
        return False
    if kind == GROUP and not (groups_fit(r, choice) and _allow(r, t, choice, allowed, threshold)):
        return False
    if least_load(r, t, choice, allowed, threshold) > threshold * r.n_devices:
        return False
    if kind != GROUP and _is_exceeded(r, walk, depth, threshold):
        return False
    if kind != BELOW:
        return covers(r, t, choice, walk.meet, walk.moves, allowed, threshold)
    return not has_place or (not lacks(r, choice) and _fast_enough(r, walk, threshold))


@inner
def _allow(r: Relaxation, t: Tree, choice: Ints, allowed: Floats, threshold: float) -> bool:
    """Notes what the cycles allow beside the least seconds of all calls; whether they allow these."""
    least_s = seconds_of(r, choice)
    for call in range(len(allowed)):
        spare = allowance(call, least_s, t.cycles.members, t.cycles.delays, threshold) * SLACK
        allowed[call] = min(allowed[call], spare)
        if allowed[call] < least_s[call]:
            return False
    return True


@inner
def _is_exceeded(r: Relaxation, walk: Walk, depth: int, threshold: float) -> bool:
    """Whether all completions exceed the threshold (planner/search/bounds/period_bound.py). Prices the moves that
    the depth's call decides, but only when the bound with their least seconds lets the choice pass. If not, notes
    what is allowed next."""
    allowed, call = walk.allowed[depth + 1], walk.steps[depth, 1]
    for exact in (False, True):
        if not _note_moves(r, walk, call, exact) and exact:
            break
        if exceeds(r, walk.choice, walk.meet, walk.moves, threshold, allowed):
            return True
        for other in range(len(allowed)):
            allowed[other] = min(allowed[other], walk.allowed[depth, other])
    return False


@inner
def _fast_enough(r: Relaxation, walk: Walk, threshold: float) -> bool:
    """Whether, once all calls have placements, the fastest options there take less than the threshold."""
    a, n_options = r.arrays, r.arrays.start[-1]
    rows = walk.choice.copy()
    for call in range(len(rows)):
        if not placed(r.arrays.options, rows[call]):
            return True
        if rows[call] >= n_options:
            rows[call] = r.below[r.begin[rows[call] - n_options]]
    walk.counts[1] += 1
    return priced(a, rows - a.start[: len(rows)], threshold, True)[0] < threshold


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
                both = placed(r.arrays.options, trainer) and placed(r.arrays.options, reader)
                between_placements = between_placements or (both and walk.moves[k, ALONE] > 0)
    return between_placements
