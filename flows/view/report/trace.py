"""A run's newest iterations as a Chrome trace, which Perfetto opens: what each rank did, and what waited for what.

The format is that of "Trace Event Format" (Google, 2016): complete events (`X`) with microseconds, metadata (`M`)
that name processes and threads, and flow events (`s`, `t`, `f`) whose arrows go from slice to slice.

A host is a process, a rank three threads of it: its calls, what it moves and saves, and its waits. Times are those of
the first host's clock, to which the others' are aligned (flows/view/clocks.py), from the first node on.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefect_rlhf.flows.view.clocks import Key, Span, begun_by_all
from prefect_rlhf.flows.view.pictures.colours import CALL_KINDS
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, PlanNode

MOST_SPANS = 100_000  # of a trace; of more, the newest iterations are kept
CALLS, MOVES, WAITS = 0, 1, 2
THREADS = {CALLS: "calls", MOVES: "transfers and parameters", WAITS: "waits"}
INSIDE_S = 1e-6  # before the end of its first slice an arrow begins
MOVING = ("transfer", "reallocate", "sync")
SHOWN = ("versions", "bytes_sent", "flops", "attempt", "generation")  # of a row of the lineage
Event = dict[str, Any]


def trace_events(
    plan: ExecutionPlan, rows: Sequence[Mapping[str, Any]], spans: Sequence[Span]
) -> list[Event]:
    """The events of some iterations, in the order of their times.

    rows, spans  of the lineage of these iterations, which went by the plan
    """
    spans = _newest(spans)
    if not spans:
        return []
    nodes = {node.name: node for node in plan.nodes}
    details = {(row["iteration"], row["node"]): row for row in rows}
    place = _Places(plan, min(span.started_s for span in spans), nodes)
    timed = [place.slice_of(span, details.get((span.iteration, span.node), {})) for span in spans]
    timed += list(_waits(place, spans))
    timed += list(_arrows(place, plan, spans))
    timed.sort(key=lambda event: (event["ts"], "sXtf".index(event["ph"])))
    return [*place.names(sorted({span.rank for span in spans})), *timed]


def _newest(spans: Sequence[Span]) -> list[Span]:
    """The whole newest iterations with at most MOST_SPANS spans."""
    if len(spans) <= MOST_SPANS:
        return list(spans)
    first = sorted(span.iteration for span in spans)[-MOST_SPANS]
    return [span for span in spans if span.iteration > first]


class _Places:
    """Where an event stands: process, thread, microseconds from the first node on."""

    def __init__(self, plan: ExecutionPlan, first_s: float, nodes: Mapping[str, PlanNode]) -> None:
        self._per_host, self._first_s, self._nodes = plan.devices_per_host, first_s, nodes

    def at(self, rank: int, thread: int, moment_s: float) -> Event:
        return {
            "pid": rank // self._per_host,
            "tid": rank * len(THREADS) + thread,
            "ts": round(1e6 * (moment_s - self._first_s), 1),
        }

    def thread_of(self, node: str) -> int:
        return CALLS if self._nodes[node].kind in ("call", "evaluate") else MOVES

    def slice_of(self, span: Span, row: Mapping[str, Any]) -> Event:
        shown = {name: row[name] for name in SHOWN if name in row}
        return {
            "name": span.node,
            "cat": span.kind,
            "ph": "X",
            **self.at(span.rank, self.thread_of(span.node), span.started_s),
            "dur": round(1e6 * max(span.ended_s - span.started_s, 0.0), 1),
            "args": {"iteration": span.iteration + 1, **shown},
        }

    def names(self, ranks: Sequence[int]) -> Iterator[Event]:
        """The names of processes and threads, and the threads' order."""
        for host in sorted({rank // self._per_host for rank in ranks}):
            yield _name("process_name", host, 0, {"name": f"host {host}"})
        for rank in ranks:
            for thread, what in THREADS.items():
                place = self.at(rank, thread, self._first_s)
                yield _name("thread_name", place["pid"], place["tid"], {"name": f"rank {rank}: {what}"})
                yield _name("thread_sort_index", place["pid"], place["tid"], {"sort_index": place["tid"]})


def _name(what: str, process: int, thread: int, arguments: Event) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _waits(place: _Places, spans: Sequence[Span]) -> Iterator[Event]:
    """A slice for each time that a rank was in a node before the node's last rank was."""
    begun = begun_by_all(spans)
    for span in spans:
        until_s = min(begun[span.iteration, span.node], span.ended_s)
        if until_s > span.started_s:
            yield {
                "name": f"waits in {span.node}",
                "cat": "wait",
                "ph": "X",
                **place.at(span.rank, WAITS, span.started_s),
                "dur": round(1e6 * (until_s - span.started_s), 1),
                "args": {"iteration": span.iteration + 1},
            }


def _arrows(place: _Places, plan: ExecutionPlan, spans: Sequence[Span]) -> Iterator[Event]:
    """An arrow for each rank to which something moves: from the call whose end it waited for, on the rank that was
    the last to end it, through the move to the call that waits for it."""
    of: dict[Key, dict[int, Span]] = defaultdict(dict)
    for span in spans:
        of[span.iteration, span.node][span.rank] = span
    readers = {before: node for node in reversed(plan.nodes) for before in node.after if node.kind == "call"}
    number = 0
    for node in (node for node in plan.nodes if node.kind in MOVING):
        for iteration in sorted({t for t, name in list(of) if name == node.name}):
            writer = _writer(node, iteration, of)
            reader = readers.get(node.name)
            for rank in node.placements[-1].devices:
                move = of[iteration, node.name].get(rank)
                if writer is None or move is None or writer.started_s > move.ended_s:
                    continue
                number += 1
                after = of[iteration, reader.name].get(rank) if reader else None
                yield from _arrow(place, number, [writer, move, *([after] if after else [])])


def _writer(node: PlanNode, iteration: int, of: Mapping[Key, Mapping[int, Span]]) -> Span | None:
    """The span of the call before a move that was the last to end; None where it is not among the iterations."""
    before = [(iteration, name) for name in node.after] + [
        (iteration - 1, name) for name in node.after_previous
    ]
    spans = [span for key in before if key in of for span in of[key].values() if span.kind in CALL_KINDS]
    return max(spans, key=lambda span: span.ended_s, default=None)


def _arrow(place: _Places, number: int, spans: Sequence[Span]) -> Iterator[Event]:
    """Flow events inside the slices that they join; their times do not go back."""
    reached_s = spans[0].started_s
    for position, span in enumerate(spans):
        phase = "s" if position == 0 else "f" if position == len(spans) - 1 else "t"
        middle_s = (span.started_s + span.ended_s) / 2
        wanted_s = max(middle_s, span.ended_s - INSIDE_S) if position == 0 else middle_s
        moment_s = min(max(wanted_s, reached_s), span.ended_s)
        reached_s = moment_s
        event = {
            "name": "moves",
            "cat": "flow",
            "ph": phase,
            "id": number,
            **place.at(span.rank, place.thread_of(span.node), moment_s),
        }
        yield event | ({"bp": "e"} if phase == "f" else {})
