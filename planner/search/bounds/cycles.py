"""Cycles of calls whose seconds bound the period of every plan of a problem.

Two facts hold in the steady state of every plan with period T, whatever the order of its nodes (their edges are those
of planner/plan/steady_state.py):

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

Inserted nodes (transfers, reallocations, saves) only make cycles longer.
"""

# pyright: reportArgumentType=false, reportReturnType=false
# (compiled code takes elements of arrays for the numbers they are)

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import networkx as nx
import numpy as np

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.search.compiled.compile import Floats, inner
from prefect_rlhf.rlhf_tasks.spec import IN_FLIGHT


class Cycles(NamedTuple):
    """Sets of calls whose seconds are at most `delays` times the period in every plan.

    members  [cycles, calls] float64: the share of the call's seconds that counts; 0: the call is not in the set
    delays   [cycles] float64: iterations
    """

    members: Floats
    delays: Floats


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
