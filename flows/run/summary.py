"""What a run leaves: its figures, from `lineage.jsonl` and `metrics.jsonl`, and the card of its model."""

import json
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from flows.run.planned_and_measured import JournalRow
from flows.run.prepare import Prepared
from flows.view.clocks import idle_while_ready_s, overlapping_s, predecessors_of, running_s, spans_of
from planner.report.text import plan_table
from rlhf_tasks.checkpoint.plan_log import RunPlan, plan_at
from rlhf_tasks.config.public import public_document
from rlhf_tasks.spec import ExecutionPlan


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; none when the file is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def metrics_of_step(metrics: Sequence[JournalRow], step: int) -> JournalRow:
    """The row of the iteration that a step follows; an empty one for step 0, unless it was evaluated,
    and where a damaged journal lost it."""
    return next((row for row in metrics if row["iteration"] == step - 1), {})


def run_figures(plans: Sequence[RunPlan], lineage: Sequence[JournalRow]) -> dict[str, Any]:
    """The figures of a run's committed iterations; no downtime between generations or attempts is in them.

    plans                     which plan each iteration went by; `calls` are those of the last one
    plan_changes              at which iterations the plan changed
    orchestration_overhead_s  per iteration: seconds in which a rank idled although its next node could run,
                              as a mean over ranks; beside it that of the worst rank
    overlaps_s                seconds that train calls ran beside each other or beside the next generation
    """
    parts = rows_by_plan(plans, lineage)
    count = len({row["iteration"] for row in lineage})
    wall_s = sum(running_s(spans_of(p.plan, rows)) for p, rows in parts)
    idle = _added(_idle(p.plan, rows) for p, rows in parts)
    last, last_rows = parts[-1]
    return {
        "iterations": count,
        "seconds": round(wall_s, 3),
        "seconds_per_iteration": round(wall_s / count, 4),
        "plan_changes": [planned.iteration for planned in plans[1:]],
        "calls": _calls(last.plan, last_rows),
        "bytes_reallocated": sum(_bytes_sent(p.plan, rows, "reallocate") for p, rows in parts),
        "bytes_redistributed": sum(_bytes_sent(p.plan, rows, "transfer") for p, rows in parts),
        "orchestration_overhead_s": round(sum(idle.values()) / len(idle) / count, 5),
        "orchestration_overhead_worst_rank_s": round(max(idle.values()) / count, 5),
        "overlaps_s": _rounded(_added(_overlaps(p.plan, rows) for p, rows in parts)),
    }


def in_short(summary: Mapping[str, Any]) -> str:
    """A summary in a line: iterations, their seconds, memory of the fullest rank, and the last generation's pace."""
    parts = [f"{summary['iterations']} iterations, which took the ranks {summary['seconds']:.0f} s"]
    peaks = summary["planned_and_measured"]["peak_memory_bytes"].values()
    if peaks:  # an older version told no memory
        parts.append(f"at most {max(peak['measured'] for peak in peaks) / 1e9:.1f} GB on a rank")
    pace = summary["metrics"].get("throughput/tokens_per_s")
    if pace is not None:
        parts.append(f"{pace:.0f} tokens/s generated")
    return ", ".join(parts)


def rows_by_plan(
    plans: Sequence[RunPlan], lineage: Sequence[JournalRow]
) -> list[tuple[RunPlan, list[JournalRow]]]:
    """The rows of the iterations that went by each plan; plans that no iteration went by are left out."""
    parts: dict[int, tuple[RunPlan, list[JournalRow]]] = {}
    for row in lineage:
        planned = plan_at(plans, row["iteration"])
        parts.setdefault(planned.iteration, (planned, []))[1].append(row)
    return [parts[iteration] for iteration in sorted(parts)]


def _idle(plan: ExecutionPlan, rows: Sequence[JournalRow]) -> dict[int, float]:
    spans = spans_of(plan, rows)
    return idle_while_ready_s(spans, predecessors_of(plan, sorted({span.iteration for span in spans})))


def _added(parts: Iterable[Mapping[Any, float]]) -> dict[Any, float]:
    total: dict[Any, float] = defaultdict(float)
    for part in parts:
        for key, seconds in part.items():
            total[key] += seconds
    return dict(total)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def _calls(plan: ExecutionPlan, lineage: Sequence[JournalRow]) -> dict[str, dict[str, Any]]:
    """Per call: its placement and the median of its seconds (first rank in to last rank out)."""
    seconds = defaultdict(list)
    for row in lineage:
        seconds[row["node"]].append(row["ended_s"] - row["started_s"])
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


def _overlaps(plan: ExecutionPlan, lineage: Sequence[JournalRow]) -> dict[str, float]:
    spans = spans_of(plan, lineage)
    trains = [node.name for node in plan.nodes if node.kind == "call" and node.trains]
    generates = [node.name for node in plan.nodes if node.kind == "call" and node.call.kind == "generate"]
    pairs = [(a, b, 0) for i, a in enumerate(trains) for b in trains[i + 1 :]]
    pairs += [(train, generate, 1) for train in trains for generate in generates]
    named = {
        f"{first} and {second}" + (" of the next iteration" if shift else ""): overlapping_s(
            spans, first, second, shift
        )
        for first, second, shift in pairs
    }
    return {name: seconds for name, seconds in named.items() if seconds > 0}


def _bytes_sent(plan: ExecutionPlan, lineage: Sequence[JournalRow], kind: str) -> int:
    names = {node.name for node in plan.nodes if node.kind == kind}
    return sum(row["bytes_sent"] for row in lineage if row["node"] in names)


PACKAGES = ("prefect-rlhf", "torch", "transformers", "prefect", "distributed")


def model_card(prepared: Prepared, run: str, role: str, metrics: Mapping[str, Any]) -> str:
    """The card as Markdown with Hugging Face's header: run, metrics, data, plan, versions, configuration.

    run, role  the run's name, and the role of the exported model
    metrics    of the iteration after which the model is exported; may be empty
    """
    config = prepared.config
    header = {"library_name": "transformers", "tags": ["prefect-rlhf", config.type.replace("_", "-")]}
    folder = config.roles()[role].folder
    if config.exports_adapters:
        header |= {"library_name": "peft", "base_model": folder}
    reached = "".join(
        f"| {name} | {'' if value is None else f'{value:.4g}'} |\n"
        for name, value in metrics.items()
        if name != "iteration"  # counted from 0: the heading has it as people count
    )
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n",
        f"# {run}\n",
        f"The {role} of a {config.type} run of prefect-rlhf over {prepared.iterations} iterations. "
        f"It started from `{folder}`.\n",
        f"## Metrics of iteration {metrics.get('iteration', -1) + 1}\n\n| metric | value |\n|---|---|\n{reached}"
        if reached
        else "",
        f"## Data\n\n{len(prepared.rows)} rows of `{config.data.name}`, SHA-256 of their content "
        f"`{prepared.rows.digest}`.\n",
        f"## Execution plan\n\n```text\n{plan_table(prepared.plans[-1].plan)}\n```\n",
        "## Versions\n\n" + "".join(f"- {name} {found}\n" for name, found in versions.items()),
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(public_document(config), sort_keys=False)}```\n",
    ]
    return "\n".join(part for part in parts if part)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"
