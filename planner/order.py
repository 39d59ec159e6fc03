"""The total order of a plan's nodes: which node comes first where two share a device.

Any topological order is legal (protocol.md). This one is chosen by replaying a few iterations with rough
durations: a list schedule by critical path, then moves of single nodes as long as they shorten the
steady-state iteration, on average over the given durations and over each long call taking twice its time. So
neither the next iteration's generation nor a disjoint call waits for training that it does not need, also
where durations are not as expected.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx

ITERATIONS = 8  # replayed: the first ones fill the pipeline, the second half is measured
IN_FLIGHT = 2  # iteration t starts after t - 2 has ended (protocol.md, delivery)


_Value = tuple[float, int]


@dataclass(frozen=True)
class OrderProblem:
    """What must be ordered.

    after, across   node -> predecessors in the same iteration, in the one before
    devices         node -> the devices it occupies
    duration_s      node -> its time, roughly
    late            nodes whose result takes memory: as late as they cost no time
    """

    after: Mapping[str, frozenset[str]]
    across: Mapping[str, frozenset[str]]
    devices: Mapping[str, frozenset[int]]
    duration_s: Mapping[str, float]
    late: frozenset[str] = frozenset()
    atoms: dict[str, frozenset[int]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "atoms", _atoms(self.devices))


def total_order(problem: OrderProblem) -> list[str]:
    """A topological order of the nodes with a short steady-state iteration. Deterministic."""
    scenarios = _scenarios(problem)
    order = _list_schedule(problem)
    best = _objective(problem, scenarios, order)
    improved = True
    while improved:
        improved = False
        for candidate in _moves(problem, order):
            value = _objective(problem, scenarios, candidate)
            if value < best:
                order, best, improved = candidate, value, True
                break
    return order


def _atoms(devices: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Node -> numbers of device classes: devices that the same nodes use count as one."""
    users: dict[int, list[str]] = {}
    for node, mesh in devices.items():
        for device in mesh:
            users.setdefault(device, []).append(node)
    numbers: dict[tuple[str, ...], int] = {}
    atoms: dict[str, set[int]] = {node: set() for node in devices}
    for nodes in users.values():
        number = numbers.setdefault(tuple(nodes), len(numbers))
        for node in nodes:
            atoms[node].add(number)
    return {node: frozenset(found) for node, found in atoms.items()}


def _list_schedule(problem: OrderProblem) -> list[str]:
    """Of the nodes whose predecessors are placed, always the one with the longest path to the end."""
    graph = nx.DiGraph()
    graph.add_nodes_from(problem.devices)
    graph.add_edges_from((a, b) for b, before in problem.after.items() for a in before)
    tail: dict[str, float] = {}
    for node in reversed(list(nx.topological_sort(graph))):
        tail[node] = problem.duration_s[node] + max((tail[b] for b in graph.successors(node)), default=0.0)
    position = {node: i for i, node in enumerate(problem.devices)}
    return list(nx.lexicographical_topological_sort(graph, key=lambda n: (-tail[n], position[n])))


def _moves(problem: OrderProblem, order: Sequence[str]) -> Iterator[list[str]]:
    """Orders that differ by one node moved ahead of an earlier one, or one of `late` behind a later one."""
    for i, node in enumerate(order):
        for j in range(i - 1, -1, -1):
            if order[j] in problem.after[node]:
                break
            if problem.atoms[order[j]] & problem.atoms[node]:
                yield [*order[:j], node, *order[j:i], *order[i + 1 :]]
        if node in problem.late:
            for j in range(i + 1, len(order)):
                if node in problem.after[order[j]]:
                    break
                if problem.atoms[order[j]] & problem.atoms[node]:
                    yield [*order[:i], *order[i + 1 : j + 1], node, *order[j + 1 :]]


def _objective(
    problem: OrderProblem, scenarios: Sequence[Mapping[str, float]], order: Sequence[str]
) -> _Value:
    """(mean steady-state seconds per iteration, minus the sum of the positions of late nodes)."""
    total = 0.0
    for duration_s in scenarios:
        ends = replay(problem, order, ITERATIONS, duration_s)
        last = [max(iteration.values()) for iteration in ends]
        total += (last[-1] - last[ITERATIONS // 2 - 1]) / (ITERATIONS - ITERATIONS // 2)
    lateness = sum(i for i, node in enumerate(order) if node in problem.late)
    return round(total / len(scenarios), 9), -lateness


def _scenarios(problem: OrderProblem) -> list[Mapping[str, float]]:
    """The given durations, and each of the long ones (above 1% of their sum) doubled."""
    given = problem.duration_s
    total = sum(given.values())
    return [given, *({**given, node: 2 * s} for node, s in given.items() if s > total / 100)]


def replay(
    problem: OrderProblem, order: Sequence[str], iterations: int, duration_s: Mapping[str, float]
) -> list[dict[str, float]]:
    """Seconds at which every node of every iteration ends when each starts as soon as it may."""
    free = [0.0] * (1 + max((atom for atoms in problem.atoms.values() for atom in atoms), default=0))
    ends: list[dict[str, float]] = []
    for t in range(iterations):
        now: dict[str, float] = {}
        gate = max(ends[t - IN_FLIGHT].values()) if t >= IN_FLIGHT else 0.0
        for node in order:
            start = max([gate, *(free[atom] for atom in problem.atoms[node])])
            start = max([start, *(now[before] for before in problem.after[node])])
            if t:
                start = max([start, *(ends[t - 1][before] for before in problem.across[node])])
            now[node] = start + duration_s[node]
            for atom in problem.atoms[node]:
                free[atom] = now[node]
        ends.append(now)
    return ends
