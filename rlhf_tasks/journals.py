"""What a commit appends to the run's journals: one line of metrics per iteration, one of lineage per node."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_tasks.spec import NodeResult

METRICS = "metrics.jsonl"
LINEAGE = "lineage.jsonl"

IterationResults = Mapping[str, Mapping[int, NodeResult]]
"""Node -> rank -> result."""


def metrics_line(iteration: int, results: IterationResults) -> str:
    """One iteration's metrics: `iteration`, what its nodes report, and `time/<node>` in seconds, from the
    first rank's start to the last rank's end. A name that several nodes use is prefixed with the node's.

    A value that is not finite stands as null: JSON has no other word for it (a step that was skipped has such).
    """
    reported = {node: next(iter(ranks.values())).metrics for node, ranks in results.items() if ranks}
    names = [name for metrics in reported.values() for name in metrics]
    line: dict[str, Any] = {"iteration": iteration}
    for node, metrics in reported.items():
        for name, value in metrics.items():
            line[name if names.count(name) == 1 else f"{node}/{name}"] = value
    for node, ranks in results.items():
        if ranks:
            ended_s = max(result.ended_s for result in ranks.values())
            line[f"time/{node}"] = ended_s - min(result.started_s for result in ranks.values())
    finite = {name: value if math.isfinite(value) else None for name, value in line.items()}
    return json.dumps(finite, allow_nan=False)


def lineage_lines(iteration: int, results: IterationResults) -> Iterator[str]:
    """What each node of an iteration ran on: attempt, generation, versions, clocks, bytes, memory and digest."""
    for node, ranks in results.items():
        if not ranks:
            continue
        first = next(iter(ranks.values()))
        yield json.dumps(
            {
                "iteration": iteration,
                "node": node,
                "attempt": first.key.attempt,
                "generation": first.key.generation,
                "clocks": {
                    rank: (result.started_s, result.ended_s) for rank, result in sorted(ranks.items())
                },
                "started_s": min(result.started_s for result in ranks.values()),
                "ended_s": max(result.ended_s for result in ranks.values()),
                "versions": {k: v for result in ranks.values() for k, v in result.versions.items()},
                "bytes_sent": sum(result.bytes_sent for result in ranks.values()),
                "peak_bytes": {rank: result.peak_bytes for rank, result in sorted(ranks.items())},
                "digest": first.digest,
            }
        )
