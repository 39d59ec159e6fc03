"""A depth-first search of the tree of partial choices, compiled: is there a choice with a period below a threshold?

The levels of the tree are: the group of every call (all options on meshes of one size); for one call after another, a
strategy and a placement; and the micro-batches (planner/search/bounds/relaxation.py). Offloaded options are in no
group: the bounds are the same for their resident twins (planner/search/compiled/arrays.py).

A branch is cut if all its completions provably exceed the threshold (period_bound.py), or if they lack memory.
The remaining complete choices are priced exactly, with every subset of calls replaced by their offloaded twins.

Mirror images are both visited. Samples are on the last stage of a pipeline, so a plan and its image (devices numbered
from the other end) may differ in cost.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.search.bounds.period_bound import SLACK, Cover, covering, covers, exceeds_period
from planner.search.bounds.relaxation import (
    MEET,
    OPEN,
    UNKNOWN,
    Relaxation,
    lacks,
    may_offload,
    moves_s,
    must_offload,
    placed,
    relation,
    seconds_of,
)
from planner.search.bounds.root_bound import Cycles, allowance
from planner.search.compiled.compile import Floats, Ints, compiled, inner
from planner.search.compiled.evaluator import priced
from planner.search.compiled.tables import Tables

DONE, FOUND, PAUSED = range(3)


class Tree(NamedTuple):
    """The data of a search. Integers are int64, other numbers float64.

    order     [calls] calls by the least load (seconds x devices) of their options, the heaviest first
    start     [calls + 1] the groups of call c are group[start[c]] .. group[start[c + 1] - 1], fastest first
    group     [groups] rows of Relaxation
    """

    order: Ints
    start: Ints
    group: Ints
    cycles: Cycles
    cover: Cover


def search_tree(tables: Tables, r: Relaxation, cycles: Cycles) -> Tree:
    """The data of searches through a problem's partial choices."""
    o, n = r.arrays.options, r.arrays.start[-1]
    groups = n + np.flatnonzero(o.strategy[n:] == OPEN)
    member = groups
    while (member >= n).any():  # down to some option of each group, whose row tells the call
        member = r.below[r.begin[member - n]]
    call = np.searchsorted(r.arrays.start, member, side="right") - 1
    groups = groups[np.lexsort((o.seconds[groups], call))]
    start = np.searchsorted(call, np.arange(r.arrays.n_calls + 1))
    load = o.seconds * o["size"]
    lightest = [load[a:b].min() for a, b in pairwise(r.arrays.start)]
    heaviest = np.argsort(-np.array(lightest), kind="stable")
    return Tree(heaviest, start, groups, cycles, covering(tables.problem.graph))


class SearchState(NamedTuple):
    """How far a search has come. Integers are int64, other numbers float64.

    steps   [steps] for each depth the call that gets a row: its group first, later a row one level below its row
    depth   [1] current depth
    place   [steps] for each depth: index of the current alternative
    choice  [calls] rows, or OPEN
    found   [calls] rows of the last complete choice that was found
    meet    [calls, calls] whether the meshes of two rows share a device: UNKNOWN, APART, MEET
    moves   [moves, 4] seconds of the moves between rows (planner.search.bounds.relaxation.moves_s)
    allowed [steps + 1, calls] for each depth: the most seconds that each call may take
    counts  [2] number of alternatives tried, number of complete choices priced
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


def begin_search(r: Relaxation, steps: Ints) -> SearchState:
    """A search at its beginning. steps: [steps] int64, as in SearchState."""
    n = r.arrays.n_calls
    return SearchState(
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
def continue_search(
    r: Relaxation, t: Tree, state: SearchState, threshold: float, nodes: int
) -> tuple[int, float]:
    """Continues a search for about `nodes` alternatives. threshold: seconds per iteration.

    The result is
    - (DONE, infinity) if no further choice has a period below the threshold;
    - (FOUND, seconds per iteration) at a choice that has; it is written to state.found;
    - (PAUSED, infinity) otherwise.
    If the steps do not lead down to options, a partial choice that the bounds do not exclude gives (FOUND, infinity).
    """
    depth, until = state.depth[0], state.counts[0] + nodes
    while depth >= 0 and state.counts[0] <= until:
        found, time_s = False, np.inf
        if not _give_next(r, t, state, depth):
            depth -= 1
        elif _may_stay(r, t, state, depth, threshold):
            if depth < len(state.steps) - 1:
                depth += 1
                state.place[depth] = -1
            elif state.choice[state.steps[depth]] < r.arrays.start[-1]:
                time_s = _complete(r, state, threshold)
                found = time_s < threshold
            else:
                found = True
        state.depth[0] = depth
        if found:
            return FOUND, time_s
    return DONE if depth < 0 else PAUSED, np.inf


@inner
def _complete(r: Relaxation, state: SearchState, threshold: float) -> float:
    """Prices a complete choice and its variants with offloaded twins.

    Returns the least seconds per iteration, and writes that variant to state.found, if it fits memory and is below
    the threshold; else infinity.
    """
    a, n, fastest_s = r.arrays, r.arrays.n_calls, np.inf
    must = [must_offload(r, state.choice, call) for call in range(n)]
    for twins in range(1 << n):  # bit c: call c takes its offloaded twin
        choice, exist = state.choice.copy(), True
        for call in range(n):
            if twins >> call & 1:
                exist = exist and may_offload(a, call)
                choice[call] = _twin(r, call, choice[call])
            else:
                exist = exist and not must[call]
        if exist:
            state.counts[1] += 1
            time_s, excess_bytes, _ = priced(a, choice - a.start[:n], min(threshold, fastest_s), False)
            if excess_bytes <= 0 and time_s < min(threshold, fastest_s):
                state.found[:], fastest_s = choice, time_s
    return fastest_s


@inner
def _twin(r: Relaxation, call: int, row: int) -> int:
    """The offloaded twin of an option: twins follow in the same order as the resident options."""
    return row + r.arrays.offloaded[call] - r.arrays.start[call]


@inner
def _give_next(r: Relaxation, t: Tree, state: SearchState, depth: int) -> bool:
    """Takes the next alternative at a depth and returns True; if none is left that the cycles allow, undoes the
    decision and returns False."""
    call, n_options = state.steps[depth], r.arrays.start[-1]
    state.counts[0] += 1
    state.place[depth] += 1
    # At the first alternative the call still has the row above; later it has one of the rows below that.
    above = state.choice[call] if state.place[depth] == 0 else r.above[state.choice[call]]
    if above == OPEN:
        among, low, high = t.group, t.start[call], t.start[call + 1]
    else:
        among, low, high = r.below, r.begin[above - n_options], r.begin[above - n_options + 1]
    # Rows are sorted by seconds, so the first one that is too slow ends the alternatives.
    at = low + state.place[depth]
    left = at < high and r.arrays.options[among[at]].seconds <= state.allowed[depth, call]
    state.choice[call] = among[at] if left else above
    for other in range(len(state.choice)):
        if other != call:
            related = relation(r.arrays.options, r.n_devices, state.choice[call], state.choice[other])
            state.meet[call, other] = state.meet[other, call] = related
    _note_moves(r, state, call)
    return left


@inner
def _may_stay(r: Relaxation, t: Tree, state: SearchState, depth: int, threshold: float) -> bool:
    """Whether the bounds admit a completion. If so, writes what is allowed at the next depth."""
    o, allowed, choice = r.arrays.options, state.allowed[depth + 1], state.choice
    row = choice[state.steps[depth]]
    allowed[:] = state.allowed[depth]
    if o[row].strategy == OPEN:
        fits = _allow(r, t, choice, allowed, threshold)
        return fits and covers(r, t.cover, choice, state.meet, state.moves, threshold)
    if exceeds_period(r, choice, state.meet, state.moves, threshold, allowed):
        return False
    for call in range(len(allowed)):
        allowed[call] = min(allowed[call], state.allowed[depth, call])
    return not placed(o, row) or (
        covers(r, t.cover, choice, state.meet, state.moves, threshold)
        and not lacks(r, choice, OPEN)
        and _fast_enough(r, state, threshold)
    )


@inner
def _allow(r: Relaxation, t: Tree, choice: Ints, allowed: Floats, threshold: float) -> bool:
    """Writes the seconds that the cycles allow each call if the others take their least seconds.

    Returns whether every call's least seconds are allowed.
    """
    least_s = seconds_of(r, choice)
    for call in range(len(allowed)):
        spare = allowance(call, least_s, t.cycles.members, t.cycles.delays, threshold) * SLACK
        allowed[call] = min(allowed[call], spare)
        if allowed[call] < least_s[call]:
            return False
    return True


@inner
def _fast_enough(r: Relaxation, state: SearchState, threshold: float) -> bool:
    """Whether the fastest options at the calls' placements, with unlimited memory but for train_steps that must be
    offloaded, have a period below the threshold.

    True if some call has no placement yet.
    """
    a, n_options = r.arrays, r.arrays.start[-1]
    rows = state.choice.copy()
    for call in range(len(rows)):
        if not placed(r.arrays.options, rows[call]):
            return True
        if rows[call] >= n_options:
            rows[call] = r.below[r.begin[rows[call] - n_options]]
    for call in range(len(rows)):
        if must_offload(r, state.choice, call):
            rows[call] = _twin(r, call, rows[call])
    state.counts[1] += 1
    return priced(a, rows - a.start[: len(rows)], threshold, True)[0] < threshold


@inner
def _note_moves(r: Relaxation, state: SearchState, call: int) -> None:
    """Writes the seconds of a call's moves to state.moves."""
    for k in range(len(r.trainer)):
        a, b = r.trainer[k], r.reader[k]
        if a == call or b == call:
            trainer, reader = state.choice[a], state.choice[b]
            if trainer == OPEN or reader == OPEN:
                state.moves[k] = 0.0
            else:
                moves_s(r, k, trainer, reader, state.moves[k])
