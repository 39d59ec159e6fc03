"""Orders of calls, and the place of every inserted node once the calls have an order.

The search tries the orders of the calls; the inserted nodes follow by rule: fetch first; all transfers to
calls of one level (depth in the dataflow graph) before the first call of that level or a deeper one, so that no
call that runs meanwhile holds them up; a reallocation directly before the first reader of its copy, so that the
copy lives shortly. Where the rule contradicts what a node needs, the need wins.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import networkx as nx

from planner.graph import DataflowGraph

MOST_ORDERS = 120
"""Of a graph with more orders of its calls than this (5 calls in any order) the first ones are tried."""


class Serving(NamedTuple):
    """What a node is there for: kind is "fetch", "transfer", "reallocate" or "call"; call, whom it serves."""

    kind: str
    call: str


def call_orders(graph: DataflowGraph) -> tuple[tuple[str, ...], ...]:
    """The topological orders of a graph's calls, its own order first; at most MOST_ORDERS."""
    position = {call.name: i for i, call in enumerate(graph.calls)}
    waiting = {name: frozenset(graph.digraph.predecessors(name)) for name in position}

    def grow(order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(order) == len(position):
            yield order
            return
        for name in position:
            if name not in order and waiting[name] <= set(order):
                yield from grow((*order, name))

    found = []
    for order in grow(()):
        found.append(order)
        if len(found) == MOST_ORDERS:
            break
    return tuple(found)


def levels(graph: DataflowGraph) -> dict[str, int]:
    """Call -> number of calls on the longest path that leads to it."""
    found: dict[str, int] = {}
    for name in nx.topological_sort(graph.digraph):
        found[name] = max((found[before] + 1 for before in graph.digraph.predecessors(name)), default=0)
    return found


def phased_order(
    graph: DataflowGraph,
    calls: tuple[str, ...],
    serving: Mapping[str, Serving],
    after: Mapping[str, frozenset[str]],
) -> list[str]:
    """The total order of a plan's nodes, releases and saves left out, under an order of its calls.

    calls    all calls in a topological order
    serving  node -> what it is there for
    after    node -> the nodes that it waits for
    """
    position = {name: i for i, name in enumerate(calls)}
    level = levels(graph)
    followers: dict[str, list[str]] = {name: [] for name in serving}
    for name, before in after.items():
        for other in before:
            followers[other].append(name)

    def key(name: str) -> tuple[int, int, int]:
        kind, call = serving[name]
        if kind == "fetch":
            return -1, 0, 0
        if kind == "transfer":
            first = min(position[other] for other in calls if level[other] >= level[call])
            return first, 0, position[call]
        if kind == "reallocate":
            readers = [
                position[serving[other].call] for other in followers[name] if serving[other].kind == "call"
            ]
            return min(readers, default=position[call]), 1, 0
        return position[call], 2, 0

    place = {name: (*key(name), i) for i, name in enumerate(serving)}
    missing = {name: len(after[name]) for name in serving}
    ready = [(place[name], name) for name in serving if not missing[name]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for other in followers[name]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (place[other], other))
    assert len(order) == len(serving), "nodes wait for each other in a cycle"
    return order
