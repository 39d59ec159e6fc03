"""What a commit appends to the run's journals: one line of metrics per iteration, one of lineage per node."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence

from rlhf_tasks.spec import NodeResult

METRICS = "metrics.jsonl"
LINEAGE = "lineage.jsonl"

IterationResults = Mapping[str, Mapping[int, NodeResult]]
"""Node -> rank -> result."""


class MetricsLines:
    """The lines of an attempt's iterations, made in their order.

    peak_flops_per_s  of all the run's devices together; None where nobody knows it, and `mfu` is left out
    """

    def __init__(self, peak_flops_per_s: float | None = None) -> None:
        self._peak_flops_per_s = peak_flops_per_s
        self._generation: tuple[int, int] | None = None
        self._ended_s = 0.0

    def line(self, iteration: int, results: IterationResults) -> str:
        """One iteration's metrics: those of `reported`, and `mfu`: the models' work (parallel/flops.py) over what
        the devices could have done meanwhile.

        Meanwhile: since the iteration before ended, for iterations overlap; from its own start where the one before
        was of another generation or attempt.
        A value that is not finite stands as null: JSON has no other word for it (a step that was skipped has such).
        """
        line = reported(iteration, results)
        seconds = self._seconds([result for ranks in results.values() for result in ranks.values()])
        if self._peak_flops_per_s is not None and seconds > 0:
            flops = sum(result.flops for ranks in results.values() for result in ranks.values())
            line["mfu"] = flops / (seconds * self._peak_flops_per_s)
        finite = {name: value if math.isfinite(value) else None for name, value in line.items()}
        return json.dumps(finite, allow_nan=False)

    def _seconds(self, results: Sequence[NodeResult]) -> float:
        if not results:
            return 0.0
        key, ended_s = results[0].key, max(result.ended_s for result in results)
        began_s = min(result.started_s for result in results)
        if self._generation == (key.attempt, key.generation):
            began_s = self._ended_s
        self._generation, self._ended_s = (key.attempt, key.generation), ended_s
        return ended_s - began_s


def reported(iteration: int, results: IterationResults) -> dict[str, float]:
    """`iteration`, what its nodes report, and `time/<node>` in seconds, from the first rank's start to the last
    rank's end. A name that several nodes use is prefixed with the node's.
    """
    told = {node: next(iter(ranks.values())).metrics for node, ranks in results.items() if ranks}
    names = [name for metrics in told.values() for name in metrics]
    line: dict[str, float] = {"iteration": iteration}
    for node, metrics in told.items():
        for name, value in metrics.items():
            line[name if names.count(name) == 1 else f"{node}/{name}"] = value
    for node, ranks in results.items():
        if ranks:
            ended_s = max(result.ended_s for result in ranks.values())
            line[f"time/{node}"] = ended_s - min(result.started_s for result in ranks.values())
    return line


def lineage_lines(iteration: int, results: IterationResults) -> Iterator[str]:
    """What each node of an iteration ran on: attempt, generation, versions, clocks, bytes, work, memory, digest."""
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
                "flops": sum(result.flops for result in ranks.values()),
                "peak_bytes": {rank: result.peak_bytes for rank, result in sorted(ranks.items())},
                "digest": first.digest,
            }
        )
