"""Branch and bound: proofs that no choice of options has a period below a threshold.

A bisection chooses thresholds between the proved lower bound and the best plan's time, so an interrupted search still
has a bound. The first thresholds are tested with the sizes of meshes alone, which takes little time. `proof_class`
says in words for which plans bounds and proofs hold.

Each threshold is tested by a compiled depth-first search of the tree of partial choices. All calls get a group (all
options on meshes of one size), then all get a mesh, then a strategy, then micro-batches
(planner/search/bounds/relaxation.py); in each of these rounds the calls with the largest load come first. Offloaded
options are in no group: the bounds are the same for their resident twins (planner/search/compiled/arrays.py).

A branch is cut if all its completions provably exceed the threshold (bounds/period_bound.py), or if they lack memory.
The remaining complete choices are priced exactly, with every subset of calls replaced by their offloaded twins.

Mirror images are both visited. Samples are on the last stage of a pipeline, so a plan and its image (devices numbered
from the other end) may differ in cost.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from collections.abc import Iterator, Sequence
from itertools import pairwise
from time import monotonic
from typing import NamedTuple

import numpy as np

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.order import MOST_ORDERS, has_more_orders
from prefect_rlhf.planner.pricing.options import ALL_CUTS, cut_points, few_hosts
from prefect_rlhf.planner.pricing.problem import Deadline, Problem
from prefect_rlhf.planner.search.annealing import (
    Neighbours,
    PricedChoice,
    annealing,
    better,
    metropolis,
    polishing,
)
from prefect_rlhf.planner.search.bounds.cycles import Cycles, allowance
from prefect_rlhf.planner.search.bounds.period_bound import SLACK, Cover, covering, covers, exceeds_period
from prefect_rlhf.planner.search.bounds.relaxation import (
    MEET,
    OPEN,
    UNKNOWN,
    Relaxation,
    lacks,
    may_offload,
    moves_s,
    must_offload,
    on_mesh,
    relation,
    relaxation,
    seconds_of,
)
from prefect_rlhf.planner.search.compiled.compile import Floats, Ints, compiled, inner
from prefect_rlhf.planner.search.compiled.evaluator import priced
from prefect_rlhf.planner.search.compiled.tables import Tables

DONE, FOUND, PAUSED = range(3)
NODES = 1_000  # tree nodes visited before the clock is read for the first time
LOOK_S = 0.1  # about the seconds between later readings
ANYTHING = 4  # without a plan, the upper bound is this many times the sum of all calls' slowest options
PROVED = 5e-10  # relative; thresholds stay this far below the best plan's time
LAST_STEP = 5e-3  # relative; with a smaller gap, the threshold is the best plan's time itself
LEVELS = 4  # of a search down to options: groups, meshes, strategies, micro-batches
GROUP_STEP = 1e-3  # relative; precision of the bisection by groups
PATIENCE = 0.25  # share of the time left after which a search is abandoned for one with a lower threshold
WALK = 0.7  # share of the time left that the random walk then has, where calls are cut into parts


class Tree(NamedTuple):
    """The data of searches through a problem's partial choices. Integers are int64.

    start       [calls + 1] the groups of call c are group[start[c]] .. group[start[c + 1] - 1], fastest first
    group       [groups] rows of Relaxation
    lightest    [calls] float64: the least load (seconds x devices) of each call's options
    by_size, to_options  [steps] steps of a search (SearchState): by groups, and down to options. In each round the
                calls whose lightest options have the largest load come first
    """

    relaxation: Relaxation
    start: Ints
    group: Ints
    lightest: Floats
    cycles: Cycles
    cover: Cover
    by_size: Ints
    to_options: Ints


def search_tree(tables: Tables, cycles: Cycles) -> Tree:
    """The data of searches through a problem's partial choices."""
    r = relaxation(tables)
    o, n = r.arrays.options, r.arrays.start[-1]
    groups = n + np.flatnonzero((o.strategy[n:] == OPEN) & (o.first[n:] == OPEN))
    groups = groups[np.lexsort((o.seconds[groups], r.call[groups]))]
    start = np.searchsorted(r.call[groups], np.arange(r.arrays.n_calls + 1))
    load = o.seconds * o["size"]
    lightest = np.array([load[a:b].min() for a, b in pairwise(r.arrays.start)])
    heaviest, cover = np.argsort(-lightest, kind="stable"), covering(tables.problem.graph)
    return Tree(r, start, groups, lightest, cycles, cover, heaviest, np.tile(heaviest, LEVELS))


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


def begin_search(t: Tree, steps: Ints) -> SearchState:
    """A search at its beginning. steps: [steps] int64, as in SearchState."""
    r, n = t.relaxation, t.relaxation.arrays.n_calls
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


def bounds_by_groups(t: Tree, upper: float, deadline: Deadline) -> Iterator[float]:
    """Rising lower bounds, in seconds: first by cycles of the fastest options and the load of the lightest ones, then
    those that searches by groups alone prove.

    upper     seconds beyond which no bound is looked for, such as those of a plan
    deadline  ends the bisection early
    """
    by_cycles = (t.cycles.members @ t.relaxation.fastest / t.cycles.delays).max()
    lower_bound_s = float(max(by_cycles, t.lightest.sum() / t.relaxation.n_devices))
    yield lower_bound_s
    while upper - lower_bound_s > GROUP_STEP * upper and not deadline.is_past():
        threshold, search = (lower_bound_s + upper) / 2, begin_search(t, t.by_size)
        if _searched(t, search, threshold, deadline)[0] == DONE:
            lower_bound_s = threshold
            yield lower_bound_s
        else:
            upper = threshold


def branching(
    tables: Tables,
    near: Neighbours,
    cycles: Cycles,
    t: Tree,
    starts: Sequence[Sequence[int]],
    state: PricedChoice,
    lower_bound_s: float,
    seed: int,
    deadline: Deadline,
) -> Iterator[tuple[PricedChoice, float, int]]:
    """Yields after each search: (best state, lower bound in seconds, number of choices priced since the last yield).

    starts         choices from which annealing starts again, besides the best one
    state          the plan to beat
    lower_bound_s  a proved lower bound, in seconds
    deadline       ends the search early

    A threshold that a search proves becomes the lower bound. The next threshold is halfway between it and the best
    plan's time; when they are close, just below that time. If a search takes too long, the next threshold is halfway
    between the lower bound and the abandoned one, after another annealing. Where calls are cut into parts, bounds say
    little: then the random walk of mode mcmc continues before (WALK), so that mcmc with half the time limit is hardly
    ahead. If a search finds a better plan, annealing polishes the plan, and the same search continues with a lower
    threshold: branches that were cut stay cut.
    """
    polishings = restarts = 0
    walk = metropolis(tables, near, cycles, seed) if tables.problem.graph.chunks > 1 else iter(())
    anything = ANYTHING * sum(max(o.seconds for o in options) for options in tables.options)
    tedious = np.inf  # the threshold of the last search that took too long
    search: SearchState | None = None  # the search to continue
    while not deadline.is_past():
        upper = state.time_s if state.excess_bytes <= 0 else anything
        if lower_bound_s >= upper * (1 - 2 * PROVED):
            return
        threshold = (lower_bound_s + min(upper, tedious)) / 2
        if search is not None or (upper - lower_bound_s < LAST_STEP * upper and tedious > upper):
            threshold = upper * (1 - PROVED)
        search = search or begin_search(t, t.to_options)
        priced_before = int(search.counts[1])
        code, time_s = _searched(t, search, threshold, deadline)
        n_priced = int(search.counts[1]) - priced_before
        if code == DONE:
            lower_bound_s, search = threshold, None
        elif code == FOUND:
            state = better(state, PricedChoice(search.found - tables.arrays.start[:-1], time_s, 0.0))
            near_it = polishing(tables, near, cycles, state, seed, polishings)
            state, more = _until(deadline, state, near_it)
            n_priced, polishings = n_priced + more, polishings + 1
        else:
            tedious, search = threshold, None
            until = deadline._replace(at_s=monotonic() + WALK * (deadline.at_s - monotonic()))
            state, walked = _until(until, state, walk)
            purpose = f"annealing again {restarts}"
            again = annealing(tables, near, cycles, [state.choice.tolist(), *starts], seed, purpose)
            state, more = _until(deadline, state, again)
            n_priced, restarts = n_priced + more + walked, restarts + 1
        yield state, lower_bound_s, n_priced


def _until(
    deadline: Deadline, state: PricedChoice, parts: Iterator[tuple[PricedChoice, int]]
) -> tuple[PricedChoice, int]:
    """Follow an annealing until it ends or the deadline passes: the better of `state` and its best state, and the
    number of choices priced."""
    n_priced = 0
    for found, more in parts:
        state, n_priced = better(state, found), n_priced + more
        if deadline.is_past():
            break
    return state, n_priced


def _searched(t: Tree, search: SearchState, threshold: float, deadline: Deadline) -> tuple[int, float]:
    """`continue_search` until the search ends or has used its share of the time left (PATIENCE)."""
    looked, nodes = monotonic(), NODES
    until = looked + PATIENCE * (deadline.at_s - looked)
    while True:
        code, time_s = continue_search(t, search, threshold, nodes)
        now = monotonic()
        if code != PAUSED or now > until or deadline.called_off():
            return code, time_s
        nodes, looked = int(nodes * min(2.0, LOOK_S / max(now - looked, 1e-9))) + 1, now


@compiled
def continue_search(t: Tree, state: SearchState, threshold: float, nodes: int) -> tuple[int, float]:
    """Continues a search for about `nodes` alternatives. threshold: seconds per iteration.

    The result is
    - (DONE, infinity) if no further choice has a period below the threshold;
    - (FOUND, seconds per iteration) at a choice that has; it is written to state.found;
    - (PAUSED, infinity) otherwise.
    If the steps do not lead down to options, a partial choice that the bounds do not exclude gives (FOUND, infinity).
    """
    r, depth, until = t.relaxation, state.depth[0], state.counts[0] + nodes
    while depth >= 0 and state.counts[0] <= until:
        found, time_s = False, np.inf
        if not _give_next(t, state, depth):
            depth -= 1
        elif _may_stay(t, state, depth, threshold):
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
def _give_next(t: Tree, state: SearchState, depth: int) -> bool:
    """Takes the next alternative at a depth and returns True; if none is left that the cycles allow, undoes the
    decision and returns False."""
    r, call, n_options = t.relaxation, state.steps[depth], t.relaxation.arrays.start[-1]
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
def _may_stay(t: Tree, state: SearchState, depth: int, threshold: float) -> bool:
    """Whether the bounds admit a completion. If so, writes what is allowed at the next depth."""
    r, allowed, choice = t.relaxation, state.allowed[depth + 1], state.choice
    o = r.arrays.options
    row = choice[state.steps[depth]]
    allowed[:] = state.allowed[depth]
    if not on_mesh(o, row):
        fits = _allow(t, choice, allowed, threshold)
        return fits and covers(r, t.cover, choice, state.meet, state.moves, threshold)
    if exceeds_period(r, choice, state.meet, state.moves, threshold, allowed):
        return False
    for call in range(len(allowed)):
        allowed[call] = min(allowed[call], state.allowed[depth, call])
    return (
        covers(r, t.cover, choice, state.meet, state.moves, threshold)
        and not lacks(r, choice, OPEN)
        and _fast_enough(r, state, threshold)
    )


@inner
def _allow(t: Tree, choice: Ints, allowed: Floats, threshold: float) -> bool:
    """Writes the seconds that the cycles allow each call if the others take their least seconds.

    Returns whether every call's least seconds are allowed, and the load fits the cluster: a device finishes an
    iteration before it begins the next one.
    """
    least_s, load = seconds_of(t.relaxation, choice), 0.0
    for call in range(len(allowed)):
        row = choice[call]
        load += t.lightest[call] if row == OPEN else least_s[call] * t.relaxation.arrays.options[row].size
        spare = allowance(call, least_s, t.cycles.members, t.cycles.delays, threshold) * SLACK
        allowed[call] = min(allowed[call], spare)
        if allowed[call] < least_s[call]:
            return False
    return load <= threshold * SLACK * t.relaxation.n_devices


@inner
def _fast_enough(r: Relaxation, state: SearchState, threshold: float) -> bool:
    """Whether some options at the calls' placements, with unlimited memory but for train_steps that must be
    offloaded, have a period below the threshold. Of each call it may be the fastest and, where that fits only
    offloaded, the fastest that needs no onload.

    True if some call has no placement yet.
    """
    a, n = r.arrays, r.arrays.n_calls
    fastest, other = state.choice.copy(), np.full(n, OPEN)
    for call in range(n):
        if r.arrays.options[fastest[call]].place == OPEN:
            return True
        if fastest[call] >= a.start[-1]:
            fastest[call], other[call] = _fastest(r, fastest[call])
        if must_offload(r, state.choice, call):
            fastest[call], other[call] = _twin(r, call, fastest[call]), OPEN
    for others in range(1 << n):  # bit c: call c takes its other option
        rows, exist = fastest.copy(), True
        for call in range(n):
            if others >> call & 1:
                exist = exist and other[call] != OPEN
                rows[call] = other[call]
        if exist:
            state.counts[1] += 1
            if priced(a, rows - a.start[:n], threshold, True)[0] < threshold:
                return True
    return False


@inner
def _fastest(r: Relaxation, placement: int) -> tuple[int, int]:
    """The fastest option of a placement; and if it has an onload, the fastest one without (OPEN: there is none)."""
    place, onloaded = placement - r.arrays.start[-1], r.arrays.options.onloaded
    rows = r.below[r.begin[place] : r.begin[place + 1]]
    if onloaded[rows[0]]:
        for row in rows:
            if not onloaded[row]:
                return rows[0], row
    return rows[0], OPEN


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


def proof_class(problem: Problem) -> str:
    """The plans for which bounds and proofs hold, in one sentence."""
    mixed = "a mesh of several device classes priced by its slowest, "
    return (
        f"Plans on {problem.cluster} whose calls have {_meshes(problem.cluster)}, strategies "
        f"(tp up to {problem.tp_limit}) and micro-batch counts as planner/pricing/options.py lists them, "
        "contiguous stages, "
        f"{mixed if len(problem.model.classes.profiles) > 1 else ''}calls on a device in {_orders(problem.graph)}, "
        "the same in every iteration, inserted nodes placed by rule beside them, "
        f"{_offloads(problem)}, and at most two iterations in flight; with times and memory as the "
        "cost model gives them."
    )


def _offloads(problem: Problem) -> str:
    """What may be offloaded, in words."""
    if any(device.is_on_host for device in problem.model.classes.profiles):
        return "all models resident"
    return "frozen models with one call and train_steps resident or offloaded, others resident"


def _meshes(cluster: Cluster) -> str:
    """The meshes of the class, in words (planner/pricing/options.py `candidate_meshes`)."""
    if cluster.n_hosts <= ALL_CUTS:
        return "all meshes"
    cuts = cut_points(cluster.n_hosts)
    step = cuts[1]
    even = all(cut == i * step for i, cut in enumerate(cuts))
    ends = f"multiples of {step} hosts" if even else f"hosts {', '.join(map(str, cuts))}"
    few = [str(n) for n in few_hosts(cluster.n_hosts)]
    small = f"the first {' or '.join(few)} hosts or the same number after them, " if few else ""
    return f"meshes that begin and end at {ends}, {small}the first host and its aligned parts"


def _orders(graph: DataflowGraph) -> str:
    """The orders of calls of the class, in words (`call_orders`)."""
    which = f"of the first {MOST_ORDERS} orders" if has_more_orders(graph) else "order"
    parts = f", all {graph.chunks} parts of a call under its one option" if graph.chunks > 1 else ""
    return f"one {which} of the graph{parts}"
