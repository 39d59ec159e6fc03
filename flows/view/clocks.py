"""Figures from the ranks' clocks: spans of nodes, overhead of orchestration, overlap of iterations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan

# A span or a predecessor is named by iteration and node.
Key = tuple[int, str]
WAITING, OVERHEAD = "waiting", "overhead"  # what a rank's time goes to beside the kinds of its nodes


@dataclass(frozen=True, slots=True)
class Span:
    """One node's time on one rank, in seconds of a host's clock.

    kind        the node's kind; for a call the call kind (generate, inference, train_step)
    generation  (attempt, generation) in which it ran; nothing runs between two of them
    """

    rank: int
    iteration: int
    node: str
    kind: str
    started_s: float
    ended_s: float
    generation: tuple[int, int] = (0, 0)


def spans_of(plan: ExecutionPlan, lineage: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The spans in rows of a run's lineage, sorted by their start, in seconds of the first host's clock."""
    kinds = {node.name: node.call.kind if node.kind == "call" else node.kind for node in plan.nodes}
    spans = [
        Span(
            int(rank),
            row["iteration"],
            row["node"],
            kinds[row["node"]],
            started_s,
            ended_s,
            generation_of(row),
        )
        for row in lineage
        for rank, (started_s, ended_s) in row["clocks"].items()
    ]
    return sorted(aligned(plan, spans), key=lambda span: (span.started_s, span.rank))


def aligned(plan: ExecutionPlan, spans: Sequence[Span]) -> list[Span]:
    """The spans in seconds of the first host's clock: the others' clocks may be ahead of it or behind.

    A call begins after the nodes before it have ended, on all their ranks (a move may begin before: its receivers
    wait in it). So with nodes of host A before calls of host B and the other way around, the difference of their
    clocks is bounded from both sides. Where the bounds allow that they agree, they do; else the difference is the
    middle, as of a request and its answer (F. Cristian, Probabilistic clock synchronization, 1989). With nodes of
    one host before the other's only, there is one bound; a difference that it forbids becomes the bound itself, the
    least correction that puts the calls in order.
    """
    ahead_s = _ahead_s(_bounds_s(plan, spans), sorted({span.rank // plan.devices_per_host for span in spans}))
    return [
        replace(span, started_s=span.started_s - by_s, ended_s=span.ended_s - by_s) if by_s else span
        for span in spans
        for by_s in (ahead_s[span.rank // plan.devices_per_host],)
    ]


def _bounds_s(plan: ExecutionPlan, spans: Sequence[Span]) -> dict[tuple[int, int], float]:
    """(host, other host) -> the most by which the other's clock is ahead, as nodes before the other's calls show."""
    calls = {node.name for node in plan.nodes if node.kind == "call"}
    begun, ended = dict[tuple[Key, int], Span](), dict[tuple[Key, int], Span]()
    for span in spans:
        key = ((span.iteration, span.node), span.rank // plan.devices_per_host)
        begun[key] = min(begun.get(key, span), span, key=lambda each: each.started_s)
        ended[key] = max(ended.get(key, span), span, key=lambda each: each.ended_s)
    hosts = {host for _, host in begun}
    before = predecessors_of(plan, {span.iteration for span in spans}) if len(hosts) > 1 else {}
    most: dict[tuple[int, int], float] = {}
    for (key, there), later in ((key, span) for key, span in begun.items() if span.node in calls):
        for earlier, here in ((node, host) for node in before.get(key, ()) for host in hosts - {there}):
            first = ended.get((earlier, here))
            if first is not None and first.generation == later.generation:
                apart_s = later.started_s - first.ended_s
                most[here, there] = min(most.get((here, there), apart_s), apart_s)
    return most


def _ahead_s(most: Mapping[tuple[int, int], float], hosts: Sequence[int]) -> dict[int, float]:
    """Host -> how far its clock is ahead of the first host's; 0 where nothing tells. Close bounds are used first, and
    those from one side last.
    """
    pairs = []
    for here, there in {pair for a, b in most for pair in ((a, b), (b, a))}:
        least_s, most_s = -most.get((there, here), inf), most.get((here, there), inf)
        pairs.append((most_s - least_s, min(-least_s, most_s), here, there, least_s, most_s))
    pairs.sort()
    ahead_s = {hosts[0]: 0.0} if hosts else {}
    while reached := next((pair for pair in pairs if pair[2] in ahead_s and pair[3] not in ahead_s), None):
        width_s, _, here, there, least_s, most_s = reached
        if least_s <= 0.0 <= most_s:
            by_s = 0.0
        else:
            by_s = (least_s + most_s) / 2 if width_s < inf else max(least_s, min(0.0, most_s))
        ahead_s[there] = ahead_s[here] + by_s
    return dict.fromkeys(hosts, 0.0) | ahead_s


def generation_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """(attempt, generation) of a row of the lineage."""
    return row["attempt"], row["generation"]


def running_s(spans: Iterable[Span]) -> float:
    """Seconds from the first span to the last, summed over generations; the time between these is downtime."""
    reach: dict[tuple[int, int], tuple[float, float]] = {}
    for span in spans:
        low, high = reach.get(span.generation, (span.started_s, span.ended_s))
        reach[span.generation] = (min(low, span.started_s), max(high, span.ended_s))
    return sum(high - low for low, high in reach.values())


def predecessors_of(plan: ExecutionPlan, iterations: Iterable[int]) -> dict[Key, list[Key]]:
    """(iteration, node) -> the (iteration, node)s that must end before it, by the plan's edges."""
    return {
        (t, node.name): [(t, name) for name in node.after] + [(t - 1, name) for name in node.after_previous]
        for t in iterations
        for node in plan.nodes
    }


def idle_while_ready_s(spans: Sequence[Span], predecessors: Mapping[Key, Sequence[Key]]) -> dict[int, float]:
    """Orchestration overhead: rank -> seconds in which no node runs although the next one could.

    spans         of some iterations
    predecessors  (iteration, node) -> the (iteration, node)s that must end first, on all their ranks
    The next node of a rank can run as soon as the rank's previous node and all predecessors have ended. The time
    between two generations does not count: it is downtime.
    """
    ended: dict[Key, float] = {}
    for span in spans:
        key = (span.iteration, span.node)
        ended[key] = max(ended.get(key, span.ended_s), span.ended_s)
    idle: dict[int, float] = {}
    for rank in {span.rank for span in spans}:
        own = sorted((s for s in spans if s.rank == rank), key=lambda s: s.started_s)
        idle[rank] = 0.0
        for before, after in pairwise(own):
            if before.generation != after.generation:
                continue
            needed = predecessors.get((after.iteration, after.node), ())
            ready = max([before.ended_s, *(ended[key] for key in needed if key in ended)])
            idle[rank] += max(0.0, after.started_s - ready)
    return idle


def overlapping_s(spans: Sequence[Span], first: str, second: str, shift: int) -> float:
    """Seconds in which `second` of iteration t + shift and `first` of iteration t overlapped, summed over t.

    A node's time is from its first rank's start to its last rank's end.
    """
    reach: dict[Key, tuple[float, float]] = {}
    for span in spans:
        low, high = reach.get((span.iteration, span.node), (span.started_s, span.ended_s))
        reach[span.iteration, span.node] = (min(low, span.started_s), max(high, span.ended_s))
    total = 0.0
    for (iteration, node), (low, high) in reach.items():
        if node == first and (iteration + shift, second) in reach:
            other_low, other_high = reach[iteration + shift, second]
            total += max(0.0, min(high, other_high) - max(low, other_low))
    return total


def begun_by_all(spans: Iterable[Span]) -> dict[Key, float]:
    """(iteration, node) -> when its last rank had begun it. Before that the other ranks waited in it."""
    begun: dict[Key, float] = {}
    for span in spans:
        key = (span.iteration, span.node)
        begun[key] = max(begun.get(key, span.started_s), span.started_s)
    return begun


def without_waits(spans: Sequence[Span]) -> list[Span]:
    """The spans cut where their last rank had begun: the parts before that have the kind `waiting`."""
    begun, parts = begun_by_all(spans), list[Span]()
    for span in spans:
        from_s = min(begun[span.iteration, span.node], span.ended_s)
        if from_s > span.started_s:
            parts.append(replace(span, kind=WAITING, ended_s=from_s))
        parts.append(replace(span, started_s=from_s))
    return parts


def work_s(spans: Sequence[Span], predecessors: Mapping[Key, Sequence[Key]]) -> dict[int, dict[str, float]]:
    """Rank -> what its time goes to -> seconds: kinds of nodes, `waiting` for another rank, and `overhead`, in which
    no node runs although the next one could.

    spans, predecessors  as for `idle_while_ready_s`
    A node's work begins when its last rank has begun it, so the time before that is waiting. The time between two
    generations does not count.
    """
    all_begun = begun_by_all(spans)
    work: dict[int, dict[str, float]] = {}
    for span in spans:
        waited = min(all_begun[span.iteration, span.node], span.ended_s) - span.started_s
        spent = work.setdefault(span.rank, {WAITING: 0.0, OVERHEAD: 0.0})
        spent[WAITING] += waited
        spent[span.kind] = spent.get(span.kind, 0.0) + span.ended_s - span.started_s - waited
    whole_s = running_s(spans)
    for rank, idle_s in idle_while_ready_s(spans, predecessors).items():
        work[rank][OVERHEAD] += idle_s
        work[rank][WAITING] += max(whole_s - sum(work[rank].values()), 0.0)
    return work
