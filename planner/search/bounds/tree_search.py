"""A depth-first search of the tree of partial choices, compiled: is there a choice with a period below a threshold?

The levels of the tree are: the group of every call (the size of its mesh); for each pair
of meshes, whether they share a device; for one call after another, a strategy and a placement; and the micro-batches
(planner/search/bounds/relaxation.py). So a mesh is placed only if sizes, strategies and shared devices allow a
solution. Many placements are equivalent up to then, and are not visited one by one.

A branch is cut if its meshes cannot be placed as the pairs say (feasibility.py), if all its completions provably
exceed the threshold (concurrency_bound.py, period_bound.py), or if they lack memory. The remaining complete choices
are priced exactly, with every subset of calls replaced by their offloaded twins (planner/search/compiled/arrays.py).

Mirror images are both visited. Samples are on the last stage of a pipeline, so a plan and its image (devices numbered
from the other end) may differ in cost.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from typing import NamedTuple

import numpy as np

from planner.search.bounds.feasibility import (
    SLACK,
    can_be_arranged,
    covers,
    lies_as_said,
)
from planner.search.bounds.period_bound import exceeds_period
from planner.search.bounds.relaxation import (
    APART,
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
from planner.search.bounds.root_bound import allowance
from planner.search.bounds.tree_order import Tree
from planner.search.compiled.compile import Floats, Ints, compiled, inner
from planner.search.compiled.evaluator import priced

DONE, FOUND, PAUSED = range(3)
GROUP, PAIR, BELOW = range(3)
"""Decision per step: the group of a call (its mesh size); whether the meshes of two calls share a device; a more
specific row for a call (one level below its row)."""


class SearchState(NamedTuple):
    """How far a search has come. Integers are int64, other numbers float64.

    steps   [steps, 3] for each depth: kind of decision (GROUP, PAIR, BELOW), call, second call of a PAIR
    depth   [1] current depth
    place   [steps] for each depth: index of the current alternative
    choice  [calls] rows, or OPEN
    found   [calls] rows of the last complete choice that was found
    meet    [calls, calls] whether meshes share a device: UNKNOWN, APART, MEET
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
    """A search at its beginning. steps: [steps, 3] int64, as in SearchState."""
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
            elif state.steps[depth, 0] == BELOW:
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
    kind, call, n_options = state.steps[depth, 0], state.steps[depth, 1], r.arrays.start[-1]
    state.place[depth] += 1
    state.counts[0] += 1
    if kind == PAIR:
        return _relate_next(r, state, call, state.steps[depth, 2], state.place[depth])
    if kind == GROUP:
        above, among, low, high = OPEN, t.group, t.start[call], t.start[call + 1]
    else:
        # At the first alternative the call still has the row above; later it has one of the rows below that.
        above = state.choice[call] if state.place[depth] == 0 else r.above[state.choice[call]]
        among, low, high = r.below, r.begin[above - n_options], r.begin[above - n_options + 1]
    # Rows are sorted by seconds, so the first one that is too slow ends the alternatives.
    at = low + state.place[depth]
    left = at < high and r.arrays.options[among[at]].seconds <= state.allowed[depth, call]
    state.choice[call] = among[at] if left else above
    if kind == GROUP:
        for other in range(len(state.choice)):
            if other != call:
                related = relation(r.arrays.options, r.n_devices, state.choice[call], state.choice[other])
                state.meet[call, other] = state.meet[other, call] = related
    if kind == GROUP or not left:
        _note_moves(r, state, call)
    return left


@inner
def _relate_next(r: Relaxation, state: SearchState, a: int, b: int, place: int) -> bool:
    """Takes the next alternative for two calls: their meshes share a device, then they do not.

    If their sizes imply that they do, that is the only alternative.
    """
    if relation(r.arrays.options, r.n_devices, state.choice[a], state.choice[b]) == MEET:
        return place == 0
    state.meet[a, b] = state.meet[b, a] = MEET if place == 0 else APART if place == 1 else UNKNOWN
    if place > 1:
        _note_moves(r, state, a)
    return place <= 1


@inner
def _may_stay(r: Relaxation, t: Tree, state: SearchState, depth: int, threshold: float) -> bool:
    """Whether the bounds admit a completion. If so, writes what is allowed at the next depth."""
    kind, call, other = state.steps[depth]
    o, allowed, choice = r.arrays.options, state.allowed[depth + 1], state.choice
    allowed[:] = state.allowed[depth]
    if kind == PAIR and relation(o, r.n_devices, choice[call], choice[other]) == MEET:
        return True  # implied by the sizes: nothing has changed
    has_place = kind == BELOW and placed(o, choice[call])
    if has_place and not lies_as_said(r, choice, state.meet, call):
        return False
    if (kind == PAIR or has_place) and not can_be_arranged(r, t.order, choice, state.meet):
        return False
    if kind == GROUP and not _allow(r, t, choice, allowed, threshold):
        return False
    if kind != GROUP:
        _note_moves(r, state, call)
        if exceeds_period(r, choice, state.meet, state.moves, threshold, allowed):
            return False
        for each in range(len(allowed)):
            allowed[each] = min(allowed[each], state.allowed[depth, each])
    if kind != BELOW:
        return covers(r, t, choice, state.meet, state.moves, threshold)
    return not has_place or (not lacks(r, choice, OPEN) and _fast_enough(r, state, threshold))


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
                moves_s(r, k, trainer, reader, state.meet[a, b], state.moves[k])
