"""Planned against measured: what the planner expected of a run's plan beside what its ranks' clocks say."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from flows.clocks import generation_of
from flows.planning import hardware_of, problem_of
from planner.price import PlanPrice, price_plan
from rlhf_tasks.config import AnyConfig, ConfigError
from rlhf_tasks.spec import CallNode, ExecutionPlan

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Planned:
    """What a plan was expected to cost.

    price          of every node, of an iteration, and the peaks of tensors' memory
    process_bytes  memory of a rank's process besides; of several classes the largest
    source         where the figures come from: a measured profile or a preset
    """

    price: PlanPrice
    process_bytes: int
    source: str


def planned(config: AnyConfig, plan: ExecutionPlan) -> Planned:
    """The expectation for a run, from measured profiles of its models where there are some.

    Raises ConfigError when the plan cannot be priced, in the planner's sentence.
    """
    model = problem_of(config, hardware_of(config)).model
    try:
        price = price_plan(plan, model)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    classes = model.classes
    names = ", ".join(profile.name for profile in classes.profiles)
    source = f"{'measured profile' if any(model.measured) else 'preset'} of {names}"
    return Planned(price, max(profile.process_bytes for profile in classes.profiles), source)


def planned_and_measured(plan: ExecutionPlan, expected: Planned, lineage: Sequence[Row]) -> dict[str, Any]:
    """{source, iteration, calls, peak_memory_bytes}: each a pair {planned, measured}, in seconds and bytes.

    A call's measured seconds are the median over iterations, from its last rank's start to its last rank's end:
    what ranks wait for each other is no part of it. An iteration's are the median from one end to the next. The
    first iteration of a call counts only where it is the one, and no time between two generations does.
    """
    spans: dict[tuple[str, int], float] = {}
    ends: dict[int, float] = defaultdict(float)
    peaks: dict[str, int] = defaultdict(int)
    generations = {row["iteration"]: generation_of(row) for row in lineage}
    for row in lineage:  # an iteration that an older version ran tells no memory
        clocks = row["clocks"].values()
        spans[row["node"], row["iteration"]] = row["ended_s"] - max(start for start, _ in clocks)
        ends[row["iteration"]] = max(ends[row["iteration"]], row["ended_s"])
        for rank, size_bytes in row.get("peak_bytes", {}).items():
            peaks[rank] = max(peaks[rank], size_bytes)
    price, first = expected.price, min(ends)
    kept = [t for t in sorted(ends) if t > first] or [first]
    starts = min(row["started_s"] for row in lineage)
    pairs = [(t, after) for t, after in pairwise(sorted(ends)) if generations[t] == generations[after]]
    between = [ends[after] - ends[t] for t, after in pairs] or [ends[first] - starts]
    calls = {
        node.name: (price.duration_s[node.name], median(spans[node.name, t] for t in kept))
        for node in plan.nodes
        if isinstance(node, CallNode)
    }
    memory = {
        rank: (price.peaks[int(rank)].total_bytes + expected.process_bytes, peak)
        for rank, peak in sorted(peaks.items())
    }
    return {
        "source": expected.source,
        "iteration": _pair(price.iteration_time_s, median(between)),
        "calls": {name: _pair(*pair) for name, pair in calls.items()},
        "peak_memory_bytes": {rank: _pair(*pair) for rank, pair in memory.items()},
    }


def _pair(expected: float, found: float) -> dict[str, float]:
    return {"planned": round(expected, 5), "measured": round(found, 5)}
