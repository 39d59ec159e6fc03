"""Branch and bound: proofs that no choice of options has a period below a threshold.

A bisection chooses thresholds between the proved lower bound and the best plan's time, so an interrupted search still
has a bound. The first thresholds are tested with the sizes of meshes alone, which takes little time
(planner/search/bounds/tree_search.py). `proof_class` says in words for which plans bounds and proofs hold.
"""

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import NamedTuple

import numpy as np

from planner.deadline import Deadline
from planner.plan.graph import DataflowGraph
from planner.plan.mesh import Cluster
from planner.plan.order import MOST_ORDERS, has_more_orders
from planner.pricing.options import ALL_CUTS, cut_points, few_hosts
from planner.pricing.problem import Problem
from planner.search.annealing import Neighbours, PricedChoice, annealing, better, metropolis, polishing
from planner.search.bounds.relaxation import Relaxation, relaxation
from planner.search.bounds.root_bound import Cycles
from planner.search.bounds.tree_search import (
    DONE,
    FOUND,
    PAUSED,
    SearchState,
    Tree,
    begin_search,
    continue_search,
    search_tree,
)
from planner.search.compiled.compile import Ints
from planner.search.compiled.tables import Tables

NODES = 1_000  # tree nodes visited before the clock is read for the first time
LOOK_S = 0.1  # about the seconds between later readings
ANYTHING = 4  # without a plan, the upper bound is this many times the sum of all calls' slowest options
PROVED = 5e-10  # relative; thresholds stay this far below the best plan's time
LAST_STEP = 5e-3  # relative; with a smaller gap, the threshold is the best plan's time itself
GROUP_STEP = 1e-3  # relative; precision of the bisection by groups
PATIENCE = 0.25  # share of the time left after which a search is abandoned for one with a lower threshold
WALK = 0.7  # share of the time left that the random walk then has, where calls are cut into parts


class Proofs(NamedTuple):
    """The data of proofs about a problem.

    by_size, to_options  [steps] steps of a search (SearchState): by groups, and down to options
    """

    relaxation: Relaxation
    tree: Tree
    by_size: Ints
    to_options: Ints


def proofs(tables: Tables, cycles: Cycles) -> Proofs:
    """The data of proofs about a problem."""
    r = relaxation(tables)
    t = search_tree(tables, r, cycles)
    # Calls with moves come first, so that moves are priced early.
    moved = sorted(t.order, key=lambda call: call not in {*r.trainer, *r.reader})
    placing = [call for call in moved for _ in range(2)]  # first a strategy, then a placement
    return Proofs(r, t, t.order, np.concatenate([t.order, placing, moved]))


def bounds_by_groups(p: Proofs, lower_bound_s: float, upper: float, deadline: Deadline) -> Iterator[float]:
    """Rising lower bounds, in seconds, that searches by groups alone prove.

    lower_bound_s  the root bound; upper: seconds of a plan
    deadline       ends the bisection early
    """
    while upper - lower_bound_s > GROUP_STEP * upper and not deadline.is_past():
        threshold, search = (lower_bound_s + upper) / 2, begin_search(p.relaxation, p.by_size)
        if _searched(p, search, threshold, deadline)[0] == DONE:
            lower_bound_s = threshold
            yield lower_bound_s
        else:
            upper = threshold


def branching(
    tables: Tables,
    near: Neighbours,
    cycles: Cycles,
    p: Proofs,
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
        search = search or begin_search(p.relaxation, p.to_options)
        priced_before = int(search.counts[1])
        code, time_s = _searched(p, search, threshold, deadline)
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


def _searched(p: Proofs, search: SearchState, threshold: float, deadline: Deadline) -> tuple[int, float]:
    """`continue_search` until the search ends or has used its share of the time left (PATIENCE)."""
    looked, nodes = monotonic(), NODES
    until = looked + PATIENCE * (deadline.at_s - looked)
    while True:
        code, time_s = continue_search(p.relaxation, p.tree, search, threshold, nodes)
        now = monotonic()
        if code != PAUSED or now > until or deadline.called_off():
            return code, time_s
        nodes, looked = int(nodes * min(2.0, LOOK_S / max(now - looked, 1e-9))) + 1, now


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
