"""`summary.json`: what a run did, in figures taken from the ranks' clocks."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flows.clocks import idle_while_ready_s, overlapping_s, predecessors_of, spans_of
from rlhf_tasks.spec import ExecutionPlan, NodeResult


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; none when the file is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def call_figures(plan: ExecutionPlan, results: Sequence[NodeResult]) -> dict[str, dict[str, Any]]:
    """Per call: its placement and the median of its seconds (first rank in to last rank out)."""
    low: dict[tuple[str, int], float] = {}
    high: dict[tuple[str, int], float] = {}
    for result in results:
        key = (result.key.node, result.key.iteration)
        low[key] = min(low.get(key, result.started_s), result.started_s)
        high[key] = max(high.get(key, result.ended_s), result.ended_s)
    seconds = defaultdict(list)
    for key in low:
        seconds[key[0]].append(high[key] - low[key])
    return {
        node.name: {
            "devices": list(node.placement.devices),
            "dp": node.placement.strategy.dp,
            "tp": node.placement.strategy.tp,
            "pp": node.placement.strategy.pp,
            "micro_batches": node.assignment.micro_batches,
            "median_s": round(median(seconds[node.name]), 4),
        }
        for node in plan.nodes
        if node.kind == "call" and seconds[node.name]
    }


def run_figures(plan: ExecutionPlan, results: Sequence[NodeResult]) -> dict[str, Any]:
    """The figures of one run's committed iterations.

    orchestration_overhead_s  per iteration: seconds in which a rank idled although its next node could run,
                              averaged over ranks (the worst rank beside it)
    """
    spans = spans_of(plan, results)
    iterations = sorted({span.iteration for span in spans})
    idle = idle_while_ready_s(spans, predecessors_of(plan, iterations))
    wall_s = max(s.ended_s for s in spans) - min(s.started_s for s in spans)
    count = max(1, len(iterations))
    return {
        "iterations": len(iterations),
        "seconds": round(wall_s, 3),
        "iteration_s": round(wall_s / count, 4),
        "calls": call_figures(plan, results),
        "bytes_reallocated": _bytes_sent(plan, results, "reallocate"),
        "bytes_redistributed": _bytes_sent(plan, results, "transfer"),
        "orchestration_overhead_s": round(sum(idle.values()) / max(1, len(idle)) / count, 5),
        "orchestration_overhead_worst_rank_s": round(max(idle.values(), default=0.0) / count, 5),
    }


def overlap_figures(plan: ExecutionPlan, results: Sequence[NodeResult]) -> dict[str, float]:
    """Seconds that calls ran beside each other: training of two roles, training and the next generation."""
    spans = spans_of(plan, results)
    trains = [node.name for node in plan.nodes if node.kind == "call" and node.trains]
    generates = [node.name for node in plan.nodes if node.kind == "call" and node.call.kind == "generate"]
    pairs = [(a, b, 0) for i, a in enumerate(trains) for b in trains[i + 1 :]]
    pairs += [(train, generate, 1) for train in trains for generate in generates]
    named = {
        f"{first} beside {second}" + (" of the next iteration" if shift else ""): overlapping_s(
            spans, first, second, shift
        )
        for first, second, shift in pairs
    }
    return {name: round(seconds, 3) for name, seconds in named.items() if seconds > 0}


def _bytes_sent(plan: ExecutionPlan, results: Iterable[NodeResult], kind: str) -> int:
    names = {node.name for node in plan.nodes if node.kind == kind}
    return sum(result.bytes_sent for result in results if result.key.node in names)
