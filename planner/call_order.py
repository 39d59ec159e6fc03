"""Orders of calls, and the place of every inserted node once the calls have an order.

The search tries the orders of the calls; the inserted nodes follow by rule: fetch first; all transfers to
calls of one level (depth in the dataflow graph) before the first call of that level or a deeper one, so that no
call that runs meanwhile holds them up; the onloads for these calls before the transfers, so that they overlap with
both; a reallocation directly before the first reader of its copy, so that the copy lives shortly. Where the rule
contradicts what a node needs, the need wins.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import networkx as nx

from planner.graph import DataflowGraph
from planner.skeleton import Skeleton

MOST_ORDERS = 120
"""Of a graph with more orders of its calls than this (5 calls in any order) the first ones are tried."""


def call_orders(graph: DataflowGraph) -> tuple[tuple[str, ...], ...]:
    """The topological orders of a graph's calls, its own order first; at most MOST_ORDERS."""
    return tuple(islice(_orders(graph), MOST_ORDERS))


def has_more_orders(graph: DataflowGraph) -> bool:
    """Whether a graph's calls have more orders than `call_orders` gives."""
    return next(islice(_orders(graph), MOST_ORDERS, None), None) is not None


def _orders(graph: DataflowGraph) -> Iterator[tuple[str, ...]]:
    position = {call.name: i for i, call in enumerate(graph.calls)}
    waiting = {name: frozenset(graph.digraph.predecessors(name)) for name in position}

    def grow(order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(order) == len(position):
            yield order
            return
        for name in position:
            if name not in order and waiting[name] <= set(order):
                yield from grow((*order, name))

    return grow(())


def levels(graph: DataflowGraph) -> dict[str, int]:
    """Call -> number of calls on the longest path that leads to it."""
    found: dict[str, int] = {}
    for name in nx.topological_sort(graph.digraph):
        found[name] = max((found[before] + 1 for before in graph.digraph.predecessors(name)), default=0)
    return found


def phased_order(level: Mapping[str, int], made: Skeleton, calls: Sequence[str]) -> list[str]:
    """The total order of a skeleton's slots that move (`Skeleton.moving`), under an order of the calls.

    level  call -> its depth in the graph (`levels`)
    """
    position = {name: i for i, name in enumerate(calls)}
    followers: dict[str, list[str]] = {name: [] for name in made.moving}
    for name in followers:
        for before in made.after[name]:
            followers[before].append(name)

    def key(name: str) -> tuple[int, int, int]:
        slot = made.slots[name]
        match slot.kind:
            case "fetch":
                return -1, 0, 0
            case "transfer" | "onload":
                first = min(position[other] for other in calls if level[other] >= level[slot.call])
                return first, 0 if slot.kind == "transfer" else -1, position[slot.call]
            case "reallocate":
                readers = (other for other in followers[name] if other != slot.source)
                return min(position[other] for other in readers), 1, 0
            case _:
                return position[name], 2, 0

    place = {name: (*key(name), i) for i, name in enumerate(followers)}
    missing = {name: len(made.after[name]) for name in followers}
    ready = [(place[name], name) for name in followers if not missing[name]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for other in followers[name]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (place[other], other))
    assert len(order) == len(followers), "nodes wait for each other in a cycle"
    return order


def with_trailing(made: Skeleton, moving: Sequence[str]) -> list[str]:
    """An order with releases, offloads and saves. A release or offload directly follows the last reader, a save its
    train_step: nothing comes between."""
    order: list[str] = []
    placed = set(moving)
    waiting = {name: set(made.after[name]) for name in made.slots if name not in placed}
    for name in moving:
        order.append(name)
        for trailer in list(waiting):
            waiting[trailer].discard(name)
            if not waiting[trailer]:
                order.append(trailer)
                del waiting[trailer]
    return order
