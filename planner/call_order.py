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


class OrderRule:
    """The place of every slot of a skeleton under any order of the calls.

    level  call -> its depth in the graph (`levels`)
    """

    def __init__(self, level: Mapping[str, int], made: Skeleton) -> None:
        self._level, self._names = level, made.moving
        self._slots = [made.slots[name] for name in self._names]
        number = {name: i for i, name in enumerate(self._names)}
        self._followers: list[list[int]] = [[] for _ in number]
        for name, i in number.items():
            for before in made.after[name]:
                self._followers[number[before]].append(i)
        self._n_before = [len(made.after[name]) for name in self._names]
        trailing = [name for name in made.slots if name not in number]
        self._trailing = {name: [t for t in trailing if name in made.after[t]] for name in self._names}
        self._n_leading = {name: len(made.after[name]) for name in trailing}

    def moving(self, calls: Sequence[str]) -> list[str]:
        """The total order of the slots that move (`Skeleton.moving`), under an order of the calls."""
        place = self._places({name: i for i, name in enumerate(calls)})
        missing = self._n_before.copy()
        ready = [place[i] for i, n in enumerate(missing) if not n]
        heapq.heapify(ready)
        order = []
        while ready:
            i = heapq.heappop(ready)[-1]
            order.append(self._names[i])
            for other in self._followers[i]:
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(ready, place[other])
        assert len(order) == len(place), "nodes wait for each other in a cycle"
        return order

    def whole(self, moving: Sequence[str]) -> list[str]:
        """An order with releases, offloads and saves. A release or offload directly follows the last reader, a save
        its train_step: nothing comes between."""
        order: list[str] = []
        missing = self._n_leading.copy()
        for name in moving:
            order.append(name)
            for trailer in self._trailing[name]:
                missing[trailer] -= 1
                if not missing[trailer]:
                    order.append(trailer)
        return order

    def _places(self, position: Mapping[str, int]) -> list[tuple[int, int, int, int]]:
        """Slot -> where it would like to be: the least first, and its own number last.

        position  call -> its place in the order
        """
        first: dict[int, int] = {}  # level -> place of the first call of that level or a deeper one
        for name, at in position.items():
            for level in range(self._level[name] + 1):
                first[level] = min(first.get(level, at), at)
        places = []
        for i, slot in enumerate(self._slots):
            match slot.kind:
                case "fetch":
                    places.append((-1, 0, 0, i))
                case "transfer":
                    places.append((first[self._level[slot.call]], 0, position[slot.call], i))
                case "onload":
                    places.append((first[self._level[slot.call]], -1, position[slot.call], i))
                case "reallocate":
                    readers = [self._names[j] for j in self._followers[i]]
                    places.append((min(position[name] for name in readers if name != slot.source), 1, 0, i))
                case _:
                    places.append((position[slot.name], 2, 0, i))
        return places
