"""The steady state of a plan: seconds per iteration when iterations follow each other without end.

A node starts as soon as its predecessors have ended, its devices have finished the nodes that stand earlier
in the total order (all of iteration t before any of t + 1), and iteration t - 2 has ended. The copy that an onload
starts waits for the onload and for the copies of earlier onloads on its devices. It runs beside the other work of
the devices, and the onload's readers wait for it.

So execution is a graph. Its nodes (copies included) take seconds; its edges have a delay, the number of iterations
that they reach ahead. The time of a steady-state iteration is the maximum cycle ratio of this graph: the largest sum
of seconds over sum of delays of any cycle.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from prefect_rlhf.rlhf_tasks.spec import IN_FLIGHT, ExecutionPlan

_ROUNDING = 1e-12  # relative: smaller gains in Howard's algorithm are rounding errors


class Edge(NamedTuple):
    """`target` of iteration t + delay starts after `source` of iteration t has ended."""

    source: int
    target: int
    delay: int


class SteadyState(NamedTuple):
    """What a plan does in the steady state.

    iteration_time_s   seconds from one iteration to the next
    cycle              nodes of a critical cycle, in order: the iteration gets shorter only if one of them does
    start_s            node -> its start in seconds after the start of the iteration's first node; t iterations
                       later it starts t * iteration_time_s later
    """

    iteration_time_s: float
    cycle: tuple[str, ...]
    start_s: dict[str, float]


def steady_state(
    plan: ExecutionPlan, duration_s: Mapping[str, float], copy_s: Mapping[str, float] | None = None
) -> SteadyState:
    """The steady state of a plan. duration_s: seconds of every node by name; copy_s: of every onload's copy."""
    copy_s = copy_s or {}
    order = with_copies([node.name for node in plan.nodes], copy_s)
    work = work_of(
        {node.name: node.after for node in plan.nodes},
        {node.name: node.devices for node in plan.nodes},
        copy_s,
    )
    edges = execution_edges(
        order, work.after, {node.name: node.after_previous for node in plan.nodes}, work.groups
    )
    taken_s = {**duration_s, **{copy_of(onload): seconds for onload, seconds in copy_s.items()}}
    seconds = [*(taken_s[name] for name in order), 0.0]
    time_s, cycle = max_cycle_ratio(seconds, edges)
    starts = dict(zip(order, _start_times(seconds, edges, time_s), strict=False))
    first = min(starts.values())
    started_by = {copy_of(onload): onload for onload in copy_s}
    return SteadyState(
        time_s,
        tuple(dict.fromkeys(started_by.get(order[i], order[i]) for i in cycle if i < len(order))),
        {node.name: starts[node.name] - first for node in plan.nodes},
    )


class Work(NamedTuple):
    """What takes time: nodes, and the copies that onloads start.

    after   name -> what must have ended in the same iteration
    groups  name -> numbers of groups of devices (`device_groups`); a copy does not occupy its devices, but their
            links to host memory
    """

    after: dict[str, set[str]]
    groups: dict[str, frozenset[int]]


def copy_of(onload: str) -> str:
    """The name of the copy that an onload starts."""
    return f"copy of {onload}"


def with_copies(order: Iterable[str], onloads: Collection[str]) -> list[str]:
    """An order of nodes, with the copy of each onload inserted directly after the onload."""
    return [each for name in order for each in ((name, copy_of(name)) if name in onloads else (name,))]


def work_of(
    after: Mapping[str, Iterable[str]], devices: Mapping[str, Iterable[int]], onloads: Collection[str]
) -> Work:
    """The work of nodes and of their onloads' copies."""
    # A device's link to host memory is numbered ~device, which no device is.
    used = {**devices, **{copy_of(onload): [~device for device in devices[onload]] for onload in onloads}}
    return Work(waits(after, onloads), device_groups(used))


def waits(after: Mapping[str, Iterable[str]], onloads: Collection[str]) -> dict[str, set[str]]:
    """What must have ended before each node and copy: a node that waits for an onload waits for its copy instead."""
    found = {name: {copy_of(b) if b in onloads else b for b in before} for name, before in after.items()}
    return {**found, **{copy_of(onload): {onload} for onload in onloads}}


def _start_times(seconds: Sequence[float], edges: Sequence[Edge], period_s: float) -> list[float]:
    """Earliest start of each node in a schedule that repeats every `period_s`, in seconds.

    Bellman-Ford for longest paths; an edge weighs the seconds of its source less delay * period_s.
    """
    start = [0.0] * len(seconds)
    slack = _ROUNDING * (period_s + sum(seconds))
    for _ in range(2 * len(seconds)):
        settled = True
        for a, b, delay in edges:
            earliest = start[a] + seconds[a] - delay * period_s
            if earliest > start[b] + slack:
                start[b], settled = earliest, False
        if settled:
            break
    return start


def device_groups(devices: Mapping[str, Iterable[int]]) -> dict[str, frozenset[int]]:
    """Node -> numbers of its groups of devices; all devices used by exactly the same nodes form one group."""
    of_node = {node: frozenset(mesh) for node, mesh in devices.items()}
    users: dict[int, list[frozenset[int]]] = {}
    for mesh in dict.fromkeys(of_node.values()):  # few, whereas nodes may be many, and devices very many
        for device in mesh:
            users.setdefault(device, []).append(mesh)
    numbers: dict[tuple[frozenset[int], ...], int] = {}
    for meshes in users.values():
        numbers.setdefault(tuple(meshes), len(numbers))
    groups: dict[frozenset[int], set[int]] = {mesh: set() for mesh in of_node.values()}
    for meshes, number in numbers.items():
        for mesh in meshes:
            groups[mesh].add(number)
    return {node: frozenset(groups[mesh]) for node, mesh in of_node.items()}


def execution_edges(
    order: Sequence[str],
    after: Mapping[str, Iterable[str]],
    across: Mapping[str, Iterable[str]],
    groups: Mapping[str, frozenset[int]],
) -> list[Edge]:
    """All edges that constrain execution. A node's number is its place in `order`; number len(order) is the end of
    an iteration."""
    place = {name: i for i, name in enumerate(order)}
    edges = {Edge(place[a], place[b], 0) for b in order for a in after[b]}
    edges |= {Edge(place[a], place[b], 1) for b in order for a in across.get(b, ())}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, name in enumerate(order):
        for number in groups[name]:
            if number in last:
                edges.add(Edge(last[number], i, 0))
            first.setdefault(number, i)
            last[number] = i
    edges |= {Edge(last[number], first[number], 1) for number in first}
    end = len(order)
    followed = {edge.source for edge in edges if not edge.delay}
    preceded = {edge.target for edge in edges if not edge.delay}
    edges |= {Edge(i, end, 0) for i in range(end) if i not in followed}
    edges |= {Edge(end, i, IN_FLIGHT) for i in range(end) if i not in preceded}
    return sorted(edges)


def max_cycle_ratio(seconds: Sequence[float], edges: Sequence[Edge]) -> tuple[float, tuple[int, ...]]:
    """The maximum cycle ratio (largest sum of seconds over sum of delays), and the nodes of a cycle that has it.

    seconds  of each node, [n_nodes]. Every node must reach every other one, and every cycle must have a delay.
    Howard's policy iteration (Cochet-Terrasson et al. 1998; Dasdan 2004, "Experimental analysis of the
    fastest optimum cycle ratio and mean algorithms").
    """
    leaving: list[list[Edge]] = [[] for _ in seconds]
    for edge in edges:
        leaving[edge.source].append(edge)
    policy = [min(choices, key=lambda edge: edge.delay) for choices in leaving]
    slack = _ROUNDING * sum(seconds)
    value = [0.0] * len(seconds)
    while True:
        ratio, cycle = _best_cycle(policy, seconds)
        _evaluate(policy, seconds, ratio, cycle[0], value)
        improved = False
        for node, choices in enumerate(leaving):
            for edge in choices:
                gain = seconds[node] - ratio * edge.delay + value[edge.target]
                if gain > value[node] + slack:
                    value[node], policy[node], improved = gain, edge, True
        if not improved:
            return ratio, tuple(cycle)


def _best_cycle(policy: Sequence[Edge], seconds: Sequence[float]) -> tuple[float, list[int]]:
    """The cycle with the largest ratio in the policy's graph, in which each node has one outgoing edge."""
    best, best_cycle = -1.0, []
    seen = [-1] * len(policy)
    for start in range(len(policy)):
        path: list[int] = []
        node = start
        while seen[node] < 0:
            seen[node] = start
            path.append(node)
            node = policy[node].target
        if seen[node] != start:
            continue
        cycle = path[path.index(node) :]
        delay = sum(policy[i].delay for i in cycle)
        assert delay > 0, f"nodes {cycle} wait for each other within one iteration"
        ratio = sum(seconds[i] for i in cycle) / delay
        if ratio > best:
            best, best_cycle = ratio, cycle
    return best, best_cycle


def _evaluate(
    policy: Sequence[Edge], seconds: Sequence[float], ratio: float, root: int, value: list[float]
) -> None:
    """Sets the value of each node from which the policy leads to `root`: the sum of seconds - ratio * delay on the
    way to the root."""
    arriving: list[list[int]] = [[] for _ in policy]
    for edge in policy:
        arriving[edge.target].append(edge.source)
    reached = {root}
    queue = [root]
    for node in queue:
        for source in arriving[node]:
            if source not in reached:
                reached.add(source)
                value[source] = value[node] + seconds[source] - ratio * policy[source].delay
                queue.append(source)
