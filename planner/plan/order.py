"""Orders of calls and nodes: those of the calls, which the search tries, and the total order of a plan's nodes.

Once the calls have an order, the inserted nodes follow by rule:
- Fetch comes first, and directly after it the transfers of what earlier iterations have made: any later, they would
  wait for what is made in this one on the same devices.
- The other transfers to all calls of one level (depth in the dataflow graph) come before the first call of that
  level or a deeper one, so that no running call holds them up.
- The onloads for these calls come before the transfers, so that they overlap with the transfers and the calls. One
  for several calls, or for their copies, comes for the first of them.
- A reallocation comes directly before the first reader of its copy, so that the copy takes memory only briefly.
Where this rule contradicts an edge between two nodes, the edge wins.

A call that is cut into parts has a place for each: in a row of such calls, the first parts of all come first, then
the second parts, and so on. So what follows a part does not wait for the next one.

Without an order of calls, the one is taken under which the steady-state iteration is shortest, by rough durations
(`fastest_order`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from math import inf
from statistics import fmean

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.steady_state import Work, execution_edges, max_cycle_ratio
from prefect_rlhf.planner.plan.template import PlanTemplate, Slot, SlotKind

Ints = NDArray[np.int64]

ROUNDING = 1e-9  # relative; orders whose times differ by less count as equally fast

MOST_ORDERS = 120
"""At most this many orders of a graph's calls are tried, the first ones: 120 = 5! allows 5 calls in any order."""


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
    """Node of a call -> number of calls on the longest path that leads to it.

    Where calls are cut, the levels of each part are above all levels of the part before it. Calls that are not cut
    are on the levels of the last part.
    """
    found: dict[str, int] = {}
    for name in nx.topological_sort(graph.digraph):
        found[name] = max((found[before] + 1 for before in graph.digraph.predecessors(name)), default=0)
    step, last = max(found.values()) + 1, graph.chunks - 1
    return {
        node: found[call.name] + step * (number if call.chunks > 1 else last)
        for call in graph.calls
        for number, node in enumerate(call.nodes)
    }


def node_order(graph: DataflowGraph, call_order: Sequence[str]) -> list[str]:
    """The nodes of the calls, for an order of the calls."""
    found = list[str]()
    for chunks, row in groupby((graph.call(name) for name in call_order), key=lambda call: call.chunks):
        calls = list(row)
        found += [call.nodes[part] for part in range(chunks) for call in calls]
    return found


class OrderRule:
    """Where a template's slots stand under each of some orders of the calls.

    level   node of a call -> its depth (`levels`)
    orders  of these nodes (`node_order`)
    """

    def __init__(self, level: Mapping[str, int], orders: Sequence[Sequence[str]]) -> None:
        self._level = level
        self._at = {name: np.array([order.index(name) for order in orders]) for name in level}
        # level -> [orders], the place of the first call of that level or a deeper one
        self._first = [
            np.min([at for name, at in self._at.items() if level[name] >= deep], axis=0)
            for deep in range(max(level.values()) + 1)
        ]
        self._wishes: dict[tuple[SlotKind, tuple[str, ...]], Ints] = {}

    def places(self, template: PlanTemplate) -> Ints:
        """The place of each slot of `template.moving` under each order: [orders, slots that move] int64.

        A slot with a smaller number comes earlier; no two numbers of a row are equal.
        """
        names = template.moving
        number = {name: i for i, name in enumerate(names)}
        wishes = [self._wish(template, template.slots[name]) for name in names]
        # Equal wishes are told apart by the slot's number, so that all places of an order differ.
        places = np.stack(wishes, axis=1) * len(names) + np.arange(len(names))
        edges = [(number[before], i) for name, i in number.items() for before in template.after[name]]
        early, late = np.array(edges).T
        unheeded = (places[:, early] > places[:, late]).any(axis=1)
        places[unheeded] = _heeding(places[unheeded], early, late)
        return places

    def _wish(self, template: PlanTemplate, slot: Slot) -> Ints:
        """Where the rule puts a slot under each order: [orders] int64, the smallest first.

        Slots between which the rule does not decide have equal numbers.
        """
        calls = (slot.name,)
        if slot.kind == "transfer" and not template.after[slot.name]:  # of earlier iterations
            return np.full_like(next(iter(self._at.values())), -1)
        if slot.kind != "call":
            serving = {slot.name}
            if slot.kind == "onload":  # it also serves the readers of copies of what it brings
                copies = (n for n in template.moving if template.slots[n].kind == "reallocate")
                serving |= {n for n in copies if slot.name in template.after[n]}
            calls = tuple(n for n in self._at if serving & template.after[n])
        if slot.kind == "reallocate":  # its train_step waits for it too, but only to change the parameters
            calls = tuple(n for n in calls if n != slot.source)
        if (slot.kind, calls) not in self._wishes:
            self._wishes[slot.kind, calls] = self._wish_of(slot.kind, calls)
        return self._wishes[slot.kind, calls]

    def _wish_of(self, kind: SlotKind, calls: tuple[str, ...]) -> Ints:
        """calls: the nodes of calls that a slot of this kind serves.

        With n calls, the call at place p of an order has four bands of n numbers from 4 * n * p on: onloads before it
        (ordered among each other by their call's place), transfers before it (likewise), reallocations before it, and
        the call itself. Fetch is below all of them.
        """
        n = len(self._at)
        if kind == "fetch":
            return np.full_like(next(iter(self._at.values())), -n)
        at, first = self._at[calls[0]], self._first[self._level[calls[0]]]
        match kind:
            case "onload":
                return np.min([4 * n * self._first[self._level[c]] + self._at[c] for c in calls], axis=0)
            case "transfer":
                return (4 * first + 1) * n + at
            case "reallocate":
                return (4 * np.min([self._at[name] for name in calls], axis=0) + 2) * n
            case _:
                return (4 * at + 3) * n


def _heeding(wishes: Ints, early: Ints, late: Ints) -> Ints:
    """The topological orders that always take the smallest wish among the slots whose predecessors are placed.

    wishes       [orders, slots] of each slot, in orders that are all made at once
    early, late  [edges] the earlier and the later slot of each edge
    Returns the places of all slots, [orders, slots].
    """
    n_orders, n_slots = wishes.shape
    follows = np.zeros((n_slots, n_slots), np.int64)
    follows[early, late] = 1
    waits = np.tile(follows.sum(axis=0), (n_orders, 1))  # for so many slots; -1: placed
    every = list(range(n_orders))
    places = np.empty_like(wishes)
    for place in range(n_slots):
        ready = np.where(waits == 0, wishes, wishes.max(initial=0) + 1)
        taken = ready.argmin(axis=1)
        places[every, taken] = place
        waits -= follows[taken]
        waits[every, taken] = -1
    return places


def with_trailing(template: PlanTemplate, places: Ints) -> Ints:
    """The places of all slots, [orders, slots] int64, from those of the slots that move, [orders, slots that move].

    A release or offload directly follows the last reader; a save, and after it an evaluation, its train_step; a
    sync, and after it its save, the later of its two calls; the offload of a trained role follows these. Nothing
    else comes between. No two places of an order are equal.
    """
    column = {name: i for i, name in enumerate(template.moving)}
    trailing = [name for name in template.slots if name not in column]
    leaders = [[column[before] for before in template.after[name] if before in column] for name in trailing]
    most = max(map(len, leaders), default=1)
    # Rows are padded to one width by repeating the first leader, which does not change the maximum.
    table = np.array([each + each[:1] * (most - len(each)) for each in leaders], np.int64)
    last = places[:, table.reshape(len(trailing), most)].max(axis=2)
    # Places are spread by n, so that every trailing slot fits between its leader and the next slot, and so does
    # one more: the copy that an onload starts, at the onload's place + 1.
    n = len(trailing) + 2
    found = np.hstack([places * n, last * n + np.arange(1, n - 1)])
    number = {name: i for i, name in enumerate((*column, *trailing))}
    return found[:, [number[name] for name in template.slots]]


def fastest_order(
    orders: Sequence[Sequence[str]],
    work: Work,
    across: Mapping[str, Iterable[str]],
    seconds: Mapping[str, float],
) -> int:
    """The number of the order of nodes and copies with the shortest steady-state iteration; of several, the first.

    across   node -> its predecessors in the iteration before
    seconds  of nodes and copies, roughly

    The objective is a mean over several scenarios: the given durations, and each long node (more than 1% of the total
    time) at twice its time. So the next iteration's generation and calls on other devices do not wait for training
    that they do not need, even where durations differ from the expected ones.
    """
    long = [name for name, taken_s in seconds.items() if taken_s > sum(seconds.values()) / 100]
    scenarios = [seconds, *({**seconds, name: 2 * seconds[name]} for name in long)]

    def mean_s(order: Sequence[str]) -> float:
        edges = execution_edges(order, work.after, across, work.groups)
        return fmean(max_cycle_ratio([*(s[name] for name in order), 0.0], edges)[0] for s in scenarios)

    users: dict[int, list[str]] = {}
    for name, groups in work.groups.items():
        for group in groups:
            users.setdefault(group, []).append(name)
    # No order is faster than the busiest device.
    least_s = fmean(max(sum(s[name] for name in names) for names in users.values()) for s in scenarios)
    best, best_s = 0, inf
    for number, order in enumerate(orders):
        if (taken_s := mean_s(order)) < best_s * (1 - ROUNDING):
            best, best_s = number, taken_s
        if best_s <= least_s * (1 + ROUNDING):
            break
    return best
