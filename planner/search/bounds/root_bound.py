"""The root bound: a lower bound on the seconds per iteration of every plan of a problem.

It relaxes a plan to the seconds of its calls. Three facts hold in the steady state of every plan with period T,
whatever the order of its nodes (their edges are those of planner/plan/steady_state.py):

- *Model cycles.* Data order an iteration's calls. A call that reads a trained role waits for the train_step of the
  previous iteration, even if it reads a copy. The calls along a cycle of these edges take at most T times the cycle's
  delay in iterations. An example is generation, the slowest inference, training. Where generation runs k iterations
  ahead, this cycle has a delay of 1 + k. (A train_step need not wait for the
  readers of the old version, because they may have a copy. So there is no such edge.) If calls on a cycle are cut
  into parts, one of them counts whole, and each other one with a single part. The parts of a call run one after
  another. Its first part follows the first parts of the calls before it. Its last part precedes the last parts of
  the calls after it.
- *Iterations in flight.* Iteration t + 2 starts after t has ended, so the calls along a path of one iteration take at
  most 2 T.
- *Load.* A device finishes iteration t before it begins t + 1, so its calls take at most T. Summed over the devices,
  the seconds x devices of all calls are at most T times the number of devices.

Inserted nodes (transfers, reallocations, saves) only make cycles and loads longer. The root bound is the smallest T
for which one option per call satisfies all three. A call's options enter as its Pareto front of seconds and load.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from planner.plan.graph import DataflowGraph
from planner.search.compiled.compile import Floats, compiled, inner
from rlhf_tasks.spec import IN_FLIGHT

PRECISION = 1e-4  # relative: the root bound is at most this much below the smallest such T


class Cycles(NamedTuple):
    """Sets of calls whose seconds are at most `delays` times the period in every plan.

    members  [cycles, calls] float64: the share of the call's seconds that counts; 0: the call is not in the set
    delays   [cycles] float64: iterations
    """

    members: Floats
    delays: Floats


class Front(NamedTuple):
    """A call's Pareto front: [options] float64 seconds, ascending, and load (seconds x devices), descending."""

    seconds: Floats
    load: Floats


def call_cycles(graph: DataflowGraph) -> Cycles:
    """The model cycles of a graph and the paths of one iteration, without those that another one implies."""
    names = [call.name for call in graph.calls]
    ordered = data_order(graph)
    found: dict[frozenset[str], int] = {}

    def note(members: Iterable[str], delay: int) -> None:
        key = frozenset(members)
        found[key] = min(delay, found.get(key, delay))

    for edge in graph.across:
        if edge.reader == edge.writer:
            note([edge.reader], 1)
        for path in nx.all_simple_paths(ordered, edge.reader, edge.writer):
            note(path, 1)
        for data in graph.lagged:  # what the edge's reader makes is read `lag` iterations later
            if data.writer == edge.reader:
                for path in _paths(ordered, data.reader, edge.writer):
                    note([data.writer, *path], 1 + data.lag)
    for source in (name for name in names if not ordered.in_degree(name)):
        for sink in (name for name in names if not ordered.out_degree(name)):
            for path in _paths(ordered, source, sink):
                note(path, IN_FLIGHT)
    kept = [
        (members, delay)
        for members, delay in found.items()
        if not any(members < other and delay >= less for other, less in found.items())
    ]
    rows = [(row, float(delay)) for members, delay in kept for row in _counted(graph, members)]
    return Cycles(np.array([row for row, _ in rows]), np.array([delay for _, delay in rows]))


def _paths(ordered: nx.DiGraph, a: str, b: str) -> Iterable[Sequence[str]]:
    """All paths from a to b; where they are one call, it alone."""
    return [[a]] if a == b else nx.all_simple_paths(ordered, a, b)


def _counted(graph: DataflowGraph, members: frozenset[str]) -> Iterator[list[float]]:
    """The shares of each call's seconds that count on a cycle: once for each call that is cut and may count whole."""
    shares = {call.name: 1 / call.chunks for call in graph.calls if call.name in members}
    for whole in [name for name, share in shares.items() if share < 1] or [""]:
        yield [1.0 if call.name == whole else shares.get(call.name, 0.0) for call in graph.calls]


def data_order(graph: DataflowGraph) -> nx.DiGraph:
    """The calls with the edges that exist whether or not copies are made."""
    trainers = {trainer.name for role in graph.roles if (trainer := graph.trainer(role)) is not None}
    ordered = nx.DiGraph()
    ordered.add_nodes_from(graph.digraph)
    ordered.add_edges_from(
        (a, b) for a, b, data in graph.digraph.edges(data=True) if data["keys"] or a in trainers
    )
    return ordered


def front(seconds: Sequence[float] | Floats, devices: Sequence[int] | NDArray[np.int64]) -> Front:
    """The front of options: [options] seconds, [options] numbers of devices."""
    time = np.asarray(seconds, dtype=np.float64)
    load = time * np.asarray(devices)
    order = np.lexsort((load, time))
    time, load = time[order], load[order]
    lightest = np.minimum.accumulate(load)
    kept = np.concatenate(([True], load[1:] < lightest[:-1]))
    return Front(time[kept], load[kept])


def root_bound(fronts: Sequence[Front], cycles: Cycles, n_devices: int) -> float:
    """The smallest T in seconds that model cycles, iterations in flight and load allow, or up to PRECISION less.

    fronts  of each call, in the order of the cycles' members
    """
    width = max(len(f.seconds) for f in fronts)
    seconds = np.full((len(fronts), width), np.inf)
    load = np.full((len(fronts), width), np.inf)
    for call, f in enumerate(fronts):
        seconds[call, : len(f.seconds)] = f.seconds
        load[call, : len(f.load)] = f.load
    fastest = np.array([f.seconds[0] for f in fronts])
    low = max(
        float(np.max(cycles.members @ fastest / cycles.delays)),
        sum(float(f.load[-1]) for f in fronts) / n_devices,
    )
    high = sum(float(f.seconds[-1]) for f in fronts)
    # Calls with many options on many cycles are decided first.
    order = np.argsort([-len(f.seconds) * (cycles.members[:, i] > 0).sum() for i, f in enumerate(fronts)])
    sizes = np.array([len(f.seconds) for f in fronts])

    def feasible(period: float) -> bool:
        return _feasible(seconds, load, sizes, order, cycles.members, cycles.delays, period, n_devices)

    if feasible(low):
        return low
    while high - low > PRECISION * low:
        middle = (low + high) / 2
        if feasible(middle):
            high = middle
        else:
            low = middle
    return low


@compiled
def _feasible(
    seconds: Floats,
    load: Floats,
    sizes: NDArray[np.int64],
    order: NDArray[np.int64],
    members: Floats,
    delays: Floats,
    period: float,
    n_devices: int,
) -> bool:
    """Whether one option per call keeps all cycles within `period` and the load within the cluster.

    seconds, load  [calls, options] float64, padded with infinity
    sizes          [calls] numbers of options; order: [calls] numbers of calls

    Depth-first search over the calls in `order`. At each node, every undecided call gets the time that the others
    leave it at their fastest, and its lightest option within that time. If these loads exceed the cluster, the branch
    is cut. If these options keep the cycles too, they are a solution.
    """
    n_calls = len(sizes)
    time = seconds[:, 0].copy()  # of decided calls, the chosen option's; of others, the fastest option's
    leisure = seconds[
        :, 0
    ].copy()  # of decided calls, the same; of others, that of the lightest option in time
    weight = np.zeros(n_calls)
    choice = np.zeros(n_calls, dtype=np.int64)
    decided = np.zeros(n_calls, dtype=np.bool_)
    depth = 0
    choice[order[0]] = -1
    while depth >= 0:
        call = order[depth]
        decided[call] = False
        time[call] = seconds[call, 0]
        choice[call] += 1
        limit = allowance(call, time, members, delays, period)
        if choice[call] >= sizes[call] or seconds[call, choice[call]] > limit:
            depth -= 1
            continue
        decided[call] = True
        time[call] = leisure[call] = seconds[call, choice[call]]
        weight[call] = load[call, choice[call]]
        total = 0.0
        for other in range(n_calls):
            if not decided[other]:
                limit = allowance(other, time, members, delays, period)
                last = np.searchsorted(seconds[other, : sizes[other]], limit * (1 + 1e-12), side="right") - 1
                weight[other] = load[other, last] if last >= 0 else np.inf
                leisure[other] = seconds[other, max(last, 0)]
            total += weight[other]
        if total > period * n_devices:
            continue
        if _keeps(leisure, members, delays, period):
            return True
        if depth < n_calls - 1:
            depth += 1
            choice[order[depth]] = -1
    return False


@inner
def _keeps(time: Floats, members: Floats, delays: Floats, period: float) -> bool:
    """Whether calls that take `time` ([calls] seconds) keep all cycles within `period`."""
    for cycle in range(len(delays)):
        total = 0.0
        for call in range(len(time)):
            if members[cycle, call]:
                total += members[cycle, call] * time[call]
        if total > delays[cycle] * period * (1 + 1e-12):
            return False
    return True


@inner
def allowance(call: int, time: Floats, members: Floats, delays: Floats, period: float) -> float:
    """The most seconds that the cycles leave a call if the others take `time`, [calls] float64 seconds."""
    allowed = np.inf
    for cycle in range(len(delays)):
        if members[cycle, call]:
            rest = delays[cycle] * period
            for other in range(len(time)):
                if other != call and members[cycle, other]:
                    rest -= members[cycle, other] * time[other]
            allowed = min(allowed, rest / members[cycle, call])
    return allowed
