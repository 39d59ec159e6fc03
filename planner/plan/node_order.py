"""The total order of a plan's nodes: which node comes first where two share a device.

Any topological order is legal (docs/protocol.md). This one is chosen with rough durations. It starts from a list
schedule by critical path. Then nodes are moved, alone or together with what they wait for, as long as that shortens
the steady-state iteration. The objective is a mean over several scenarios: the given durations, and each long node
at twice its time. So the next iteration's generation and calls on other devices do not wait for training that they do
not need, even where durations differ from the expected ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx

from planner.plan.steady_state import Work, copy_of, execution_edges, max_cycle_ratio, with_copies, work_of

_Objective = tuple[float, int]


@dataclass(frozen=True)
class OrderProblem:
    """The nodes to order.

    after, across   node -> its predecessors in the same iteration; in the iteration before
    devices         node -> the devices that it occupies
    duration_s      node -> its rough seconds
    late            nodes whose result takes memory: they come as late as possible without costing time
    copy_s          onload -> rough seconds of the copy that it starts
    """

    after: Mapping[str, frozenset[str]]
    across: Mapping[str, frozenset[str]]
    devices: Mapping[str, frozenset[int]]
    duration_s: Mapping[str, float]
    late: frozenset[str] = frozenset()
    copy_s: Mapping[str, float] = field(default_factory=dict[str, float])

    @cached_property
    def work(self) -> Work:
        """What nodes and copies wait for, and which groups of devices they occupy."""
        return work_of(self.after, self.devices, self.copy_s)

    @cached_property
    def taken_s(self) -> dict[str, float]:
        """Node or copy -> its rough seconds."""
        return {**self.duration_s, **{copy_of(name): seconds for name, seconds in self.copy_s.items()}}

    @cached_property
    def long(self) -> tuple[str, ...]:
        """The nodes and copies that take more than 1% of the total time."""
        total = sum(self.taken_s.values())
        return tuple(name for name, seconds in self.taken_s.items() if seconds > total / 100)


MOST_TRIED = 300
"""Orders that are tried at most: where calls are cut into parts, neighbours are many and each takes long."""


def total_order(problem: OrderProblem) -> list[str]:
    """A topological order of the nodes with a short steady-state iteration. Deterministic."""
    scenarios = _scenarios(problem)
    least_s = _least_s(problem, scenarios)  # no order can be faster
    order = _list_schedule(problem)
    best = _objective(problem, scenarios, order)
    improved, tried = True, 0
    while improved:
        improved = False
        for candidate in _moves(problem, order):
            if (least_s, -_lateness(problem, candidate)) >= best:
                continue  # even at the least time no better: saves most of the work where all nodes share devices
            tried += 1
            if tried > MOST_TRIED:
                break
            value = _objective(problem, scenarios, candidate)
            if value < best:
                order, best, improved = candidate, value, True
                break
    return order


def _list_schedule(problem: OrderProblem) -> list[str]:
    """Always takes, among the nodes whose predecessors are placed, the one with the longest path to the end."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(problem.devices)
    graph.add_edges_from((a, b) for b, before in problem.after.items() for a in before)
    tail: dict[str, float] = {}
    for node in reversed(list(nx.topological_sort(graph))):
        tail[node] = problem.duration_s[node] + max((tail[b] for b in graph.successors(node)), default=0.0)
    position = {node: i for i, node in enumerate(problem.devices)}

    def longest_first(node: str) -> tuple[float, int]:
        return -tail[node], position[node]

    return list(nx.lexicographical_topological_sort(graph, key=longest_first))


def _moves(problem: OrderProblem, order: Sequence[str]) -> Iterator[list[str]]:
    """Neighbouring orders: one node moved ahead of an earlier one, or one of `late` moved behind a later one; then a
    long node moved ahead of an earlier long one, together with those of its predecessors that stand between."""
    groups = problem.work.groups
    for i, node in enumerate(order):
        for j in range(i - 1, -1, -1):
            if order[j] in problem.after[node]:
                break
            if groups[order[j]] & groups[node]:
                yield [*order[:j], node, *order[j:i], *order[i + 1 :]]
        if node in problem.late:
            for j in range(i + 1, len(order)):
                if node in problem.after[order[j]]:
                    break
                if groups[order[j]] & groups[node]:
                    yield [*order[:i], *order[i + 1 : j + 1], node, *order[j + 1 :]]
    for i, node in enumerate(order):
        if node in problem.long:
            yield from _moves_together(problem, order, i)


def _moves_together(problem: OrderProblem, order: Sequence[str], i: int) -> Iterator[list[str]]:
    """Orders with the node at place i moved ahead of an earlier long one, together with its direct and indirect
    predecessors that stand between the two."""
    groups = problem.work.groups
    moved, left, needed, shared = [order[i]], list[str](), set(problem.after[order[i]]), groups[order[i]]
    for j in range(i - 1, -1, -1):
        if order[j] in needed:
            moved.insert(0, order[j])
            needed |= problem.after[order[j]]
            shared = shared | groups[order[j]]
            continue
        left.insert(0, order[j])
        if len(moved) > 1 and order[j] in problem.long and groups[order[j]] & shared:
            yield [*order[:j], *moved, *left, *order[i + 1 :]]


def _objective(
    problem: OrderProblem, scenarios: Sequence[Mapping[str, float]], order: Sequence[str]
) -> _Objective:
    """(mean steady-state seconds per iteration, minus the sum of the positions of late nodes)."""
    work, timed = problem.work, with_copies(order, problem.copy_s)
    edges = execution_edges(timed, work.after, problem.across, work.groups)
    periods = [max_cycle_ratio([*(s[name] for name in timed), 0.0], edges)[0] for s in scenarios]
    return _mean(periods), -_lateness(problem, order)


def _lateness(problem: OrderProblem, order: Sequence[str]) -> int:
    return sum(i for i, node in enumerate(order) if node in problem.late)


def _mean(seconds: Sequence[float]) -> float:
    return round(sum(seconds) / len(seconds), 9)


def _least_s(problem: OrderProblem, scenarios: Sequence[Mapping[str, float]]) -> float:
    """A lower bound on the mean seconds per iteration of any order: the busy seconds of the busiest device."""
    users: dict[int, list[str]] = {}
    for name, groups in problem.work.groups.items():
        for group in groups:
            users.setdefault(group, []).append(name)
    return _mean([max(sum(s[name] for name in names) for names in users.values()) for s in scenarios])


def _scenarios(problem: OrderProblem) -> list[Mapping[str, float]]:
    """The given durations, and each of the long ones doubled."""
    given = problem.taken_s
    return [given, *({**given, node: 2 * given[node]} for node in problem.long)]
