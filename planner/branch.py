"""Branch and bound: proofs that no choice of options has a period below some threshold.

A walk goes through the tree of partial choices, calls in the order of their load, and cuts a branch as soon as its
completions provably exceed the threshold (planner/bound.py, planner/relaxation.py) or lack memory. Complete
choices that are left are priced exactly. Thresholds rise from the root bound to the best plan's time, so that an
interrupted search has a bound to show.

Mirror images are walked both: samples lie on the last stage of a pipeline, so a plan and its image (devices numbered
from the other end) need not cost the same.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from collections.abc import Iterable, Iterator
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.anneal import Neighbours, State, better, polished
from planner.bound import Cycles
from planner.compiled import compiled, inner
from planner.evaluator import value
from planner.relaxation import OPEN, Relaxation, exceeds, lacks, move_s, relaxation
from planner.tables import Tables

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DONE, FOUND, PAUSED = range(3)

NODES = 50_000  # options tried between two looks at the clock
ANYTHING = 4  # times the slowest options of all calls: a plan that takes longer is not looked for
PROVED = 5e-10  # relative; nearer to the best plan than this no threshold is set
LAST_STEP = 2e-3  # relative; from here on the threshold is the best plan's time itself


class Tree(NamedTuple):
    """What a walk goes by.

    order    [calls] calls by depth
    by_speed [options] rows of each call, fastest first
    load     [options] seconds x devices of a row, with the save of a train_step
    lightest [options] by place in by_speed: the least load of the call's rows up to that place
    by_mesh  [options] rows of each call, mesh by mesh, meshes and the rows of each fastest first
    end      [options] by place in by_mesh: where the next mesh begins
    floor    [options] by place in by_mesh: the least load of the rows of the mesh
    spread_s [options] by place in by_mesh: by how much a row of the mesh may need less than its fastest
             elsewhere: in transfers that it spares, and in its save
    """

    order: Ints
    by_speed: Ints
    load: Floats
    lightest: Floats
    by_mesh: Ints
    end: Ints
    floor: Floats
    spread_s: Floats


class Walk(NamedTuple):
    """Where a walk stands.

    depth   [1]
    place   [calls] per depth, place in by_mesh
    choice  [calls] rows, or OPEN; moved_s [moves] seconds of the moves between them
    allowed [calls + 1, calls] per depth, the most seconds that each call may take
    counts  [2] options tried, complete choices priced
    """

    depth: Ints
    place: Ints
    choice: Ints
    moved_s: Floats
    allowed: Floats
    counts: Ints


def tree(r: Relaxation) -> Tree:
    """The tree of a problem's partial choices."""
    o = r.arrays.options
    starts = list(zip(r.arrays.start[:-1], r.arrays.start[1:], strict=True))
    seconds = o.seconds.copy()
    for call, (a, b) in enumerate(starts):
        if r.arrays.trainer[call] == call:
            seconds[a:b] += o[a:b].save_s
    load = seconds * o["size"]
    by_speed = np.concatenate([a + np.argsort(o[a:b].seconds, kind="stable") for a, b in starts])
    lightest = np.concatenate([np.minimum.accumulate(load[by_speed[a:b]]) for a, b in starts])
    order = np.argsort([-lightest[b - 1] for _, b in starts], kind="stable")
    by_mesh, end = np.empty(len(load), np.int64), np.empty(len(load), np.int64)
    floor, spread_s = np.empty(len(load)), np.empty(len(load))
    for call, (a, b) in enumerate(starts):
        spared_s = r.arrays.dispatch_s * (r.data[call].sum() + r.data[:, call].sum())
        place = a
        for rows in _meshes(o["first"], o["size"], o["seconds"], range(a, b)):
            here = slice(place, place + len(rows))
            saves = o[rows].save_s if r.arrays.trainer[call] == call else np.zeros(len(rows))
            by_mesh[here], end[here], floor[here] = rows, here.stop, load[rows].min()
            spread_s[here] = spared_s + saves[0] - saves.min()
            place = here.stop
    return Tree(order, by_speed, load, lightest, by_mesh, end, floor, spread_s)


def _meshes(first: Ints, size: Ints, seconds: Floats, rows: Iterable[int]) -> list[list[int]]:
    """Rows by mesh, meshes and the rows of each fastest first."""
    meshes: dict[tuple[int, int], list[int]] = {}
    for row in sorted(rows, key=lambda row: seconds[row]):
        meshes.setdefault((first[row], size[row]), []).append(row)
    return list(meshes.values())


def new_walk(r: Relaxation) -> Walk:
    """A walk at its beginning."""
    n = r.arrays.n_calls
    return Walk(
        np.zeros(1, np.int64),
        np.full(n, -1),
        np.full(n, OPEN),
        np.zeros(len(r.trainer)),
        np.full((n + 1, n), np.inf),
        np.zeros(2, np.int64),
    )


def branching(
    tables: Tables,
    near: Neighbours,
    cycles: Cycles,
    state: State,
    lower_bound_s: float,
    seed: int,
    deadline: float,
) -> Iterator[tuple[State, float, int]]:
    """After each proof and each better plan: the best state, the lower bound, and the choices priced since.

    state          the plan to beat; lower_bound_s: the root bound
    deadline       of time.monotonic(): ends early
    A threshold that is proved becomes the lower bound; the next lies halfway to the best plan, or, when
    little is between them, at it. A better plan is first polished by annealing.
    """
    r = relaxation(tables)
    t, polishings = tree(r), 0
    starts = r.arrays.start[:-1]
    anything = ANYTHING * sum(max(o.seconds for o in options) for options in tables.options)
    while True:
        upper = state.time_s if state.excess_bytes <= 0 else anything
        if lower_bound_s >= upper * (1 - 2 * PROVED):
            return
        threshold = (lower_bound_s + upper) / 2
        if upper - lower_bound_s < LAST_STEP * upper:
            threshold = upper * (1 - PROVED)
        walk, code, time_s = new_walk(r), PAUSED, np.inf
        while code == PAUSED:
            code, time_s = walk_on(r, t, walk, threshold, NODES)
            if code == PAUSED and monotonic() > deadline:
                return
        n_priced = int(walk.counts[1])
        if code == DONE:
            lower_bound_s = threshold
        else:
            found = State(walk.choice - starts, time_s, 0.0)
            state, more = polished(tables, near, cycles, better(state, found), seed, polishings)
            n_priced, polishings = n_priced + more, polishings + 1
        yield state, lower_bound_s, n_priced
        if monotonic() > deadline:
            return


@compiled
def walk_on(r: Relaxation, t: Tree, walk: Walk, threshold: float, nodes: int) -> tuple[int, float]:
    """Goes on with a walk for so many options.

    Returns (DONE, infinity) when no further choice takes less than the threshold, (FOUND, seconds per iteration)
    at a choice that does, which is then walk.choice, else (PAUSED, infinity).
    """
    n = r.arrays.n_calls
    depth, until = walk.depth[0], walk.counts[0] + nodes
    while depth >= 0:
        if not _enter_next(r, t, walk, depth, threshold):
            depth -= 1
        elif depth < n - 1:
            depth += 1
            walk.place[depth] = -1
        else:
            walk.counts[1] += 1
            time_s, excess_bytes, _ = value(r.arrays, walk.choice - r.arrays.start[:n], threshold)
            if excess_bytes <= 0 and time_s < threshold:
                walk.depth[0] = depth
                return FOUND, time_s
        walk.depth[0] = depth
        if walk.counts[0] > until:
            return PAUSED, np.inf
    return DONE, np.inf


@inner
def _enter_next(r: Relaxation, t: Tree, walk: Walk, depth: int, threshold: float) -> bool:
    """Gives the call of a depth its next row that the bounds let pass; leaves it open when there is none."""
    o, call = r.arrays.options, t.order[depth]
    walk.choice[call] = OPEN
    for k in range(len(r.trainer)):
        if r.trainer[k] == call or r.reader[k] == call:
            walk.moved_s[k] = 0.0
    low, high = r.arrays.start[call], r.arrays.start[call + 1]
    room = threshold * r.n_devices - _least_load(r, t, walk, depth, call, threshold)
    walk.place[depth] += 1
    while low + walk.place[depth] < high:
        place = low + walk.place[depth]
        row = t.by_mesh[place]
        walk.counts[0] += 1
        begins = place == low or t.end[place - 1] == place
        if begins:
            if o[row].seconds > walk.allowed[depth, call]:
                return False
            if t.floor[place] > room:
                walk.place[depth] = t.end[place] - low
                continue
        walk.choice[call] = row
        raised = threshold + t.spread_s[place]
        if o[row].seconds > walk.allowed[depth, call] or (
            begins and not _mesh_may_stay(r, t, walk, depth, t.floor[place], raised)
        ):
            walk.place[depth] = t.end[place] - low
        elif t.load[row] <= room and _may_stay(r, t, walk, depth, threshold):
            return True
        else:
            walk.place[depth] += 1
        walk.choice[call] = OPEN
    return False


@inner
def _mesh_may_stay(r: Relaxation, t: Tree, walk: Walk, depth: int, floor: float, threshold: float) -> bool:
    """Whether the mesh of the depth's call may stay with some row, given its fastest, its least load, and a
    threshold raised by what another row may spare elsewhere."""
    if exceeds(r, walk.choice, walk.moved_s, threshold, walk.allowed[depth + 1]):
        return False
    others = _least_load(r, t, walk, depth + 1, t.order[depth], threshold)
    return others + floor <= threshold * r.n_devices


@inner
def _least_load(r: Relaxation, t: Tree, walk: Walk, depth: int, but: int, threshold: float) -> float:
    """The least load of all calls but one: as chosen, or the lightest row in the time that is left to an open
    call by the cycles and by the emptiest device. Infinite when there is no such row."""
    o, total = r.arrays.options, 0.0
    free = threshold - _emptiest(r, t, walk.choice)
    for call in range(r.arrays.n_calls):
        if call == but:
            continue
        if walk.choice[call] != OPEN:
            total += t.load[walk.choice[call]]
            continue
        low, high = r.arrays.start[call], r.arrays.start[call + 1]
        limit = min(walk.allowed[depth, call], free)
        if o[t.by_speed[low]].seconds > limit:
            return np.inf
        while high - low > 1:
            middle = (low + high) // 2
            if o[t.by_speed[middle]].seconds <= limit:
                low = middle
            else:
                high = middle
        total += t.lightest[low]
    return total


@inner
def _emptiest(r: Relaxation, t: Tree, choice: Ints) -> float:
    """The least load of a device by the chosen rows. Loads change only where a mesh begins or ends."""
    o, least = r.arrays.options, np.inf
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
    allowed, call = walk.allowed[depth + 1], t.order[depth]
    if lacks(r, walk.choice) or exceeds(r, walk.choice, walk.moved_s, threshold, allowed):
        return False
    if _least_load(r, t, walk, depth + 1, -1, threshold) > threshold * r.n_devices:
        return False
    moves, stays = True, True
    for exact in (False, True):
        if not (moves and stays):
            break
        moves = False
        for k in range(len(r.trainer)):
            if r.trainer[k] == call or r.reader[k] == call:
                trainer, reader = walk.choice[r.trainer[k]], walk.choice[r.reader[k]]
                if trainer != OPEN and reader != OPEN:
                    walk.moved_s[k] = move_s(r, k, trainer, reader, exact)
                    moves = moves or walk.moved_s[k] > 0
        if moves:
            stays = not exceeds(r, walk.choice, walk.moved_s, threshold, allowed)
            stays = stays and _least_load(r, t, walk, depth + 1, -1, threshold) <= threshold * r.n_devices
    if not stays:
        for k in range(len(r.trainer)):
            if r.trainer[k] == call or r.reader[k] == call:
                walk.moved_s[k] = 0.0
    return stays
