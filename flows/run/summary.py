"""The results of a run: its figures, from `lineage.jsonl` and `metrics.jsonl`; the planner's expectation beside the
measurements of the ranks' clocks; and the card of its model.
"""

import json
import logging
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import yaml

from prefect_rlhf.flows.run.planning import figures_of
from prefect_rlhf.flows.run.prepare import Prepared
from prefect_rlhf.flows.view.clocks import (
    generation_of,
    idle_while_ready_s,
    overlapping_s,
    predecessors_of,
    running_s,
    spans_of,
)
from prefect_rlhf.planner.plan.steady_state import steady_state
from prefect_rlhf.planner.plan.workload import fullest_share
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses
from prefect_rlhf.planner.pricing.figures import RanCall, RanTurns, drifted, keep_figures
from prefect_rlhf.planner.pricing.plans import PlanPrice, price_plan
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.report import figures_source, not_measured
from prefect_rlhf.planner.text import format_devices, plan_table, steady_bars
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.checkpoint.changes import PLAN, RunPlan, logged_changes, plan_at, read_plan
from prefect_rlhf.rlhf_tasks.checkpoint.journals import METRICS
from prefect_rlhf.rlhf_tasks.config.hub_names import base_of_name, hub_data, hub_model, name_of_folder
from prefect_rlhf.rlhf_tasks.config.settings import public_document
from prefect_rlhf.rlhf_tasks.data.hub_files import header_of_card
from prefect_rlhf.rlhf_tasks.data.token_file import ROWS, TokenFile
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import own_or_base
from prefect_rlhf.rlhf_tasks.profiling.measurements import LEAST_S, MOST_S
from prefect_rlhf.rlhf_tasks.spec import CallNode, EvaluateNode, ExecutionPlan

PACKAGES = ("prefect-rlhf", "torch", "transformers", "prefect", "distributed")
MOST_CARD_BYTES = 1 << 20
ENOUGH = 3
"""Iterations under a plan, including the first, before its figures count."""

JournalRow = Mapping[str, Any]

logger = logging.getLogger(__name__)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; none when the file is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def metrics_of_step(metrics: Sequence[JournalRow], step: int) -> JournalRow:
    """The row of the last iteration before a step. Empty for step 0, unless it was evaluated, and if a damaged
    journal lost the row."""
    return next((row for row in metrics if row["iteration"] == step - 1), {})


def run_figures(plans: Sequence[RunPlan], lineage: Sequence[JournalRow]) -> dict[str, Any]:
    """The figures of a run's committed iterations; no downtime between generations or attempts is in them.

    plans                     which plan each iteration went by; `calls` are those of the last one
    plan_changes              at which iterations the plan changed; reasons_of_changes: of those that changed the
                              devices, iteration -> why
    orchestration_overhead_s  per iteration: seconds in which a rank idled although its next node could run,
                              as a mean over ranks; beside it that of the worst rank
    overlaps_s                seconds that train calls ran beside each other or beside the next generation
    """
    parts = rows_by_plan(plans, lineage)
    count = sum(len({row["iteration"] for row in rows}) for _, rows in parts)
    wall_s = sum(running_s(spans_of(p.plan, rows)) for p, rows in parts)
    idle = _added(_idle(p.plan, rows) for p, rows in parts)
    last, last_rows = parts[-1] if parts else (plans[-1], [])
    return {
        "iterations": len({row["iteration"] for row in lineage}),
        "seconds": round(wall_s, 3),
        "seconds_per_iteration": round(wall_s / max(count, 1), 4),
        "plan_changes": [planned.iteration for planned in plans[1:]],
        "reasons_of_changes": {planned.iteration: planned.why for planned in plans if planned.why},
        "calls": _calls(last.plan, last_rows),
        "bytes_reallocated": sum(_bytes_sent(p.plan, rows, "reallocate") for p, rows in parts),
        "bytes_redistributed": sum(_bytes_sent(p.plan, rows, "transfer") for p, rows in parts),
        "orchestration_overhead_s": round(sum(idle.values()) / max(len(idle) * count, 1), 5),
        "orchestration_overhead_worst_rank_s": round(max(idle.values(), default=0.0) / max(count, 1), 5),
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
    """The rows of the iterations that went by each plan. Plans that no iteration went by are left out, and iterations
    of a plan that its user has removed."""
    ran: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for row in lineage:
        ran[row["iteration"]].update((row["node"], int(rank)) for rank in row["clocks"])
    gone_by = {iteration: _plan_of(plans, iteration, nodes) for iteration, nodes in ran.items()}
    parts: dict[int, tuple[RunPlan, list[JournalRow]]] = {}
    for row in lineage:
        if (planned := gone_by[row["iteration"]]) is not None:
            parts.setdefault(planned.iteration, (planned, []))[1].append(row)
    return [parts[iteration] for iteration in sorted(parts)]


def _plan_of(plans: Sequence[RunPlan], iteration: int, ran: AbstractSet[tuple[str, int]]) -> RunPlan | None:
    """The plan that an iteration went by, which has its nodes; None if it is not there any more.

    A run that lost the commit of a change repeats iterations before the change by the newest plan.
    """
    logged = plan_at(plans, iteration)
    for planned in (logged, *(plan for plan in plans if plan.iteration > iteration)):
        if ran <= {(node.name, rank) for node in planned.plan.nodes for rank in node.devices}:
            return planned
    return None


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
            "cp": node.placement.strategy.cp,
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


def model_name(config: RunConfig) -> str:
    """How people call the model of a run, by its first role."""
    folder = Path(name_of_folder(next(iter(config.roles().values())).folder).partition("@")[0])
    return (
        folder.parent.name if folder.name == "model" else folder.name
    )  # a run leaves its model as RUN/model


# --- planned and measured ---


@dataclass(frozen=True, slots=True)
class Planned:
    """The expected cost of a plan.

    price          of every node, of an iteration, and the peaks of tensors' memory
    active_bytes   call -> memory beyond parameters on its fullest device
    process_bytes  memory of a rank's process besides; of several classes the largest
    peak_flops_per_s  of all devices of the cluster together
    source         where the figures come from: a profile or a preset, and measured figures of runs
    note           why what is measured may be far from it, and what to do; "" where something was measured
    figures        the file for what is measured in this run
    """

    price: PlanPrice
    active_bytes: dict[str, float]
    process_bytes: int
    peak_flops_per_s: float
    source: str
    figures: Path
    note: str = ""

    @property
    def needs(self) -> dict[int, float]:
        """Device -> most bytes of tensors that it holds."""
        return {device: peak.total_bytes for device, peak in self.price.peaks.items()}


def planned(config: RunConfig, plan: ExecutionPlan, problem: Problem) -> Planned:
    """The expectation for a run, from measured profiles of its models where there are some.

    problem  what the configuration asks of the planner
    Raises ConfigError when the plan cannot be priced, in the planner's sentence.
    """
    model = problem.model
    try:
        price = price_plan(plan, model)
        active_bytes = {
            node.name: max(model.call(node.call, node.assignment).active_bytes)
            for node in plan.nodes
            if isinstance(node, CallNode)
        }
    except ValueError as error:
        raise ConfigError(str(error)) from error
    classes = model.classes
    process_bytes = max(profile.process_bytes for profile in classes.profiles)
    peak_flops_per_s = _peak_flops_per_s(model.classes)
    figures = figures_of(config, problem)
    source = figures_source(model)
    return Planned(price, active_bytes, process_bytes, peak_flops_per_s, source, figures, not_measured(model))


def _peak_flops_per_s(classes: DeviceClasses) -> float:
    per_host = (classes.profiles[number].flops_per_s for number in classes.of_host)
    return classes.cluster.devices_per_host * sum(per_host)


def planned_and_measured(
    plan: ExecutionPlan, expected: Planned, lineage: Sequence[JournalRow]
) -> dict[str, Any]:
    """{source, note, iterations, drifted, iteration, calls, call_memory_bytes, peak_memory_bytes}; times and memory
    as pairs {planned, measured}, in seconds and bytes: memory while each call runs, on the device that then holds
    most, and at most, by device.

    lineage  of the iterations that went by the plan
    turns    call -> what was measured of its turns, in the median, where environments answer
    drifted  which calls, `iteration`, and which calls' memory, are off by more than the planner's limit
             (planner/pricing/figures.py)

    A call's measured seconds are the median over iterations, from its last rank's start to its last rank's end. So
    the time that early ranks wait for the last one does not count. An iteration's seconds are the median from one
    iteration's end to the next. The first iteration counts only if it is the only one. Time between two generations
    does not count. An evaluation counts in the iterations that have one; without any it is left out. `iteration` is
    one without an evaluation, if there is such. Rounds after the first are left out.
    """
    if not lineage:  # no iteration went by the plan
        empty = ("turns", "calls", "call_memory_bytes", "peak_memory_bytes")
        none = {"drifted": [], "iteration": {}} | {key: dict[str, Any]() for key in empty}
        return {"source": expected.source, "note": expected.note, "iterations": 0, **none}
    spans: dict[tuple[str, int], float] = {}
    peaks: dict[str, int] = defaultdict(int)
    held: dict[str, int] = defaultdict(int)
    for row in lineage:  # an iteration that an older version ran tells no memory
        clocks = row["clocks"].values()
        spans[row["node"], row["iteration"]] = row["ended_s"] - max(start for start, _ in clocks)
        for rank, size_bytes in row.get("peak_bytes", {}).items():
            peaks[rank] = max(peaks[rank], size_bytes)
            held[row["node"]] = max(held[row["node"]], size_bytes)
    price, spare = expected.price, _spare_rounds(plan)
    iterations, gaps = sorted({row["iteration"] for row in lineage}), _gaps_s(lineage)
    counted = iterations[1:] or iterations
    evaluated = {t for node in _evaluations(plan) for t in _worked(node, iterations, lineage)}
    plain = {t: gap for t, gap in gaps.items() if t not in evaluated}
    calls = {
        node.name: (price.due_s[node.name], median(spans[node.name, t] for t in at))
        for node in plan.nodes
        if isinstance(node, CallNode | EvaluateNode)
        and node.name not in spare
        and (at := _worked(node, counted, lineage))
    }
    memory = {
        rank: (price.peaks[int(rank)].total_bytes + expected.process_bytes, peak)
        for rank, peak in sorted(peaks.items())
    }
    call_memory = {
        name: (size_bytes + expected.process_bytes, held[name])
        for name, size_bytes in price.call_bytes.items()
        if name in held and name not in spare
    }
    iteration = (_iteration_s(plan, price, evaluated=not plain), median((plain or gaps).values()))
    judged = {**calls, "iteration": iteration} | {
        _memory_in(name): pair for name, pair in call_memory.items()
    }
    return {
        "source": expected.source,
        "note": expected.note,
        "iterations": len(iterations),
        "turns": _turns(plan, counted, lineage),
        "drifted": [name for name, pair in judged.items() if drifted(*pair)],
        "iteration": _pair(*iteration),
        "calls": {name: _pair(*pair) for name, pair in calls.items()},
        "call_memory_bytes": {name: _pair(*pair) for name, pair in call_memory.items()},
        "peak_memory_bytes": {rank: _pair(*pair) for rank, pair in memory.items()},
    }


def _turns(
    plan: ExecutionPlan, iterations: Sequence[int], lineage: Sequence[JournalRow]
) -> dict[str, dict[str, float]]:
    """Call -> the median of each figure of its turns, where environments answer."""
    found: dict[str, dict[str, list[float]]] = {}
    calls = {node.name: call for call, nodes in plan.calls.items() for node in nodes}
    for row in lineage:
        if row["iteration"] in iterations:
            for name, value in row.get("turns", {}).items():
                found.setdefault(calls[row["node"]], defaultdict(list))[name].append(value)
    return {
        call: {name: median(values) for name, values in of_call.items()} for call, of_call in found.items()
    }


def _gaps_s(lineage: Sequence[JournalRow]) -> dict[int, float]:
    """Iteration -> seconds since the one before ended, in one generation; if there are none, the first one's own."""
    ends: dict[int, float] = defaultdict(float)
    for row in lineage:
        ends[row["iteration"]] = max(ends[row["iteration"]], row["ended_s"])
    generations = {row["iteration"]: generation_of(row) for row in lineage}
    pairs = [(t, after) for t, after in pairwise(sorted(ends)) if generations[t] == generations[after]]
    first = min(ends)
    own_s = ends[first] - min(row["started_s"] for row in lineage)
    return {after: ends[after] - ends[t] for t, after in pairs} or {first: own_s}


def _spare_rounds(plan: ExecutionPlan) -> set[str]:
    """The nodes of rounds after the first, which compute only where those before did not suffice. They are priced
    as the first round is."""
    calls = [node for node in plan.nodes if isinstance(node, CallNode)]
    if all(node.call.rounds == 1 for node in calls):
        return set()
    return {node.name for node in calls if node.part.number > 0}


def planned_lanes(plan: ExecutionPlan, price: PlanPrice) -> dict[str, list[list[Any]]]:
    """Devices, e.g. `0-3` -> the bars of the planned iteration: [node, kind, start in seconds, end]."""
    return {
        format_devices(lane.devices): [
            [bar.node, bar.kind, round(bar.start_s, 5), round(bar.end_s, 5)] for bar in lane.bars
        ]
        for lane in steady_bars(plan, price)
    }


def _evaluations(plan: ExecutionPlan) -> list[EvaluateNode]:
    return [node for node in plan.nodes if isinstance(node, EvaluateNode)]


def _iteration_s(plan: ExecutionPlan, price: PlanPrice, evaluated: bool) -> float:
    """Planned seconds of an iteration with, or of one without, the evaluation; a plan's price has their mean."""
    nodes = _evaluations(plan)
    if not nodes:
        return price.iteration_time_s
    seconds = price.due_s if evaluated else price.duration_s | {node.name: 0.0 for node in nodes}
    seconds = seconds | {node.name: 0.0 for node in nodes if node.at_start}  # of the first iteration alone
    return steady_state(plan, seconds, price.copy_s).iteration_time_s


def _worked(
    node: CallNode | EvaluateNode, iterations: Sequence[int], lineage: Sequence[JournalRow]
) -> list[int]:
    """Of some iterations, those in which a node had something to do; all of a call's, even where it only scored."""
    if isinstance(node, CallNode):
        return list(iterations)
    worked = {row["iteration"] for row in lineage if row["node"] == node.name and row["flops"] > 0}
    return [t for t in iterations if t in worked]


def keep_drift(plan: ExecutionPlan, expected: Planned, figures: Mapping[str, Any]) -> bool:
    """Keep a run's measurements of the calls that drifted from the plan: the next plan uses them. A file that cannot
    be written does not end the run.

    figures  of `planned_and_measured`; those of fewer than ENOUGH iterations say too little to be kept
    No figures of evaluations are kept, since no price is corrected by them.
    """
    evaluations = {name for node in _evaluations(plan) for name in (node.name, _memory_in(node.name))}
    if figures["iterations"] < ENOUGH or evaluations.issuperset(figures["drifted"]):
        return False
    spare = _spare_rounds(plan)
    calls = {call: [node for node in nodes if node.name not in spare] for call, nodes in plan.calls.items()}
    measured = {
        call: fmean(figures["calls"][node.name]["measured"] for node in nodes)
        for call, nodes in calls.items()
    }
    ran = [
        RanCall(
            call=call,
            assignment=nodes[0].assignment,
            seconds=measured[call],
            active_bytes=_most_active_bytes([node.name for node in nodes], expected, figures),
            turns=_ran_turns(nodes[0], figures["turns"].get(call)),
        )
        for call, nodes in calls.items()
        if LEAST_S <= measured[call] <= MOST_S
    ]
    try:
        keep_figures(expected.figures, ran)
    except OSError as error:
        logger.warning("the measured figures of this run are not kept: %s", error)
        return False
    return True


def _ran_turns(node: CallNode, played: Mapping[str, float] | None) -> RanTurns | None:
    """What is kept of a call's turns, if it has some."""
    if played is None:
        return None
    return RanTurns(
        drawn=played["completions/mean_length"],
        observed=played["turns/observed"],
        mean_s=played["throughput/think_s"],
        longest_s=played["throughput/longest_think_s"],
        among=fullest_share(node.call, node.assignment.placement.strategy.dp),
    )


def _most_active_bytes(nodes: Sequence[str], expected: Planned, figures: Mapping[str, Any]) -> float | None:
    """The most bytes beyond parameters that a part of a call took; None where no part is off the plan.

    The size of the parameters is known, so the whole deviation is the call's own.
    """
    if not any(_memory_in(node) in figures["drifted"] for node in nodes):
        return None
    memory = figures["call_memory_bytes"]
    return max(
        max(expected.active_bytes[node] + memory[node]["measured"] - memory[node]["planned"], 0.0)
        for node in nodes
        if node in memory
    )


def _memory_in(call: str) -> str:
    """How a call's memory is called among what drifted."""
    return f"memory in {call}"


def _pair(expected: float, measured: float) -> dict[str, float]:
    return {"planned": round(expected, 5), "measured": round(measured, 5)}


# --- the model's card ---


class Made(NamedTuple):
    """What a card says of how a model was made.

    iterations, rows  of the whole run, and the number of its rows
    digest            of these
    stated            the configuration as its user wrote it
    """

    iterations: int
    rows: int
    digest: str
    plan: ExecutionPlan
    stated: RunConfig


def model_card(prepared: Prepared, run: str, role: str, metrics: Mapping[str, Any]) -> str:
    """The card of a run's model: `card_of` a prepared run."""
    rows, plan = prepared.rows, prepared.plans[-1].plan
    made = Made(prepared.iterations, len(rows), rows.digest, plan, prepared.named)
    return card_of(prepared.config, made, run, role, metrics)


def card_of_commit(
    config: RunConfig, stated: RunConfig, folder: Path, role: str, step: int, merged: bool = False
) -> str:
    """The card of the model of a commit, from the run's folder. Raises ConfigError where that is damaged.

    stated  the configuration in the folder; of `config` the models are folders
    merged  whether it is the whole model, although the run exports adapters
    """
    rows, changes = TokenFile.open(folder / ROWS), logged_changes(folder)
    plan = changes[-1].plan if changes else read_plan(folder / PLAN, "")
    made = Made(config.iterations(len(rows)), len(rows), rows.digest, plan, stated)
    metrics = metrics_of_step(read_jsonl(folder / METRICS), step)
    return card_of(config, made, folder.name, role, metrics, merged)


def card_of(
    config: RunConfig, made: Made, run: str, role: str, metrics: Mapping[str, Any], merged: bool = False
) -> str:
    """The card as Markdown with Hugging Face's header: run, metrics, data, plan, versions, configuration.

    config     its models are folders
    run, role  the run's name, and the role of the exported model
    metrics    of the iteration after which the model is exported; may be empty
    """
    began = _file_name(name_of_folder(config.roles()[role].folder))
    data = ", ".join(_file_name(source.path) for source in config.data.sources)
    reached = "".join(
        f"| {name} | {'' if value is None else f'{value:.4g}'} |\n"
        for name, value in metrics.items()
        if name != "iteration"  # counted from 0: the heading has it as people count
    )
    parts = [
        f"---\n{yaml.safe_dump(_header(config, role, merged), sort_keys=False)}---\n",
        f"# {run}\n",
        f"The {role} of a {config.type} run of prefect-rlhf over {made.iterations} iterations. "
        f"It started from `{began}`.\n",
        f"## Metrics of iteration {metrics.get('iteration', -1) + 1}\n\n| metric | value |\n|---|---|\n{reached}"
        if reached
        else "",
        f"## Data\n\n{made.rows} rows of `{data}`, SHA-256 of their content `{made.digest}`.\n",
        f"## Execution plan\n\n```text\n{plan_table(made.plan)}\n```\n",
        "## Versions\n\n" + "".join(f"- {name} {found}\n" for name, found in versions().items()),
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(_without_places(made.stated), sort_keys=False)}```\n",
    ]
    return "\n".join(part for part in parts if part)


def _without_places(stated: RunConfig) -> dict[str, Any]:
    """A configuration in which files and folders have their names alone: a card is for everybody."""
    document = public_document(stated)
    for key in ("output_dir", "resume"):
        document.pop(key, None)
    if isinstance(plan := document.get("plan"), str):
        document["plan"] = _file_name(plan)
    for section in ("data", "models", "evaluation", "planning", "environment", "agent", "tools", "rewards"):
        document |= {section: _file_names(document[section])} if section in document else {}
    return document


def _file_names(value: Any) -> Any:
    """The same with `_file_name` of each text, and of each key."""
    if isinstance(value, dict):
        return {_file_name(key): _file_names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_file_names(item) for item in value]
    return _file_name(value) if isinstance(value, str) else value


def _file_name(text: str) -> str:
    """What stands after the last slash of an absolute path; another text as it is."""
    is_path = Path(text).is_absolute() and len(Path(text).parts) > 2 and "\n" not in text  # not `/no_think`
    return Path(text).name if is_path else text


def _header(config: RunConfig, role: str, merged: bool) -> dict[str, Any]:
    """What the Hub reads of a card. It takes only ids of its own for a base model and data sets."""
    folder = config.roles()[role].folder
    base = base_id(folder)
    adapters = config.exports_adapters and not merged
    relation = {"base_model": base, "base_model_relation": "adapter" if adapters else "finetune"}
    names = [hub_data(source.path) for source in config.data.sources if not Path(source.path).exists()]
    datasets = list(dict.fromkeys(name.id for name in names if name is not None))
    license_ = _license(folder)
    return {
        "library_name": "peft" if adapters else "transformers",
        **(relation if base else {}),
        **({"datasets": datasets} if datasets else {}),
        **({"license": license_} if license_ else {}),
        "tags": ["prefect-rlhf", config.type.replace("_", "-")],
    }


def base_id(folder: str) -> str | None:
    """The id on the Hub of the model in a folder of its cache, or of the base of an adapter elsewhere that is put on
    one; None of any other folder."""
    names = (name_of_folder(folder), base_of_name(folder) or "")
    return next((name.partition("@")[0] for name in names if name and hub_model(name)), None)


def _license(folder: str) -> str | None:
    """The license that the card beside a model states, if there is one that does."""
    card = own_or_base(folder, "README.md")
    with suppress(ConfigError, OSError):
        text = card.read_bytes()[:MOST_CARD_BYTES].decode("utf-8", "replace")
        stated = header_of_card(text, card).get("license")
        return stated if isinstance(stated, str) else None
    return None


def versions() -> dict[str, str]:
    """Of Python and the packages that results depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"
