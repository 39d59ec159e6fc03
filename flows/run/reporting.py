"""The report of a run, from what its folder has. Loads neither Prefect nor torch.

Of a long run's lineage only the newest part is read, so a report takes seconds and a bounded size.
"""

import json
import logging
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from prefect_rlhf.flows.run.downloads import REVISIONS
from prefect_rlhf.flows.run.origins import lessons_of
from prefect_rlhf.flows.run.records import Comparison, is_number, json_lines, metrics_rows
from prefect_rlhf.flows.run.run_folder import CONFIG, SUMMARY, existing_run_folder
from prefect_rlhf.flows.run.summary import model_name, rows_by_plan, versions
from prefect_rlhf.flows.view.clocks import Span, predecessors_of, spans_of, work_s
from prefect_rlhf.flows.view.pictures.bars import Measured
from prefect_rlhf.flows.view.pictures.curves import Curve
from prefect_rlhf.flows.view.report.comparison import MOST_RUNS, comparison_page
from prefect_rlhf.flows.view.report.contents import Contents, Samples
from prefect_rlhf.flows.view.report.page import run_page
from prefect_rlhf.flows.view.report.pipeline import pipeline_page
from prefect_rlhf.flows.view.report.trace import trace_events
from prefect_rlhf.flows.view.words import plain_text
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.checkpoint.changes import PLAN, RunPlan, last_accepted, logged_changes, read_plan
from prefect_rlhf.rlhf_tasks.checkpoint.commits import newest_step, step_folders
from prefect_rlhf.rlhf_tasks.checkpoint.journals import LINEAGE, METRICS
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError, read_manifest
from prefect_rlhf.rlhf_tasks.config.hub_names import name_of_folder
from prefect_rlhf.rlhf_tasks.config.settings import public_document
from prefect_rlhf.rlhf_tasks.data.hub import read_pins
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from prefect_rlhf.rlhf_tasks.system.durable import replace_file
from prefect_rlhf.rlhf_tasks.system.reading import read_json, reading, shown
from prefect_rlhf.rlhf_tasks.user_code.rewards import SAMPLES

REPORT = "report.html"
STAGES = "stages.json"  # in a pipeline's folder: the names of its stages, which are those of their folders
NEWEST_BYTES = 32 << 20  # of the lineage that are read: tens of thousands of nodes
TIMELINE_ITERATIONS = 3  # more would be too fine to read
SAMPLES_READ = 64  # of an iteration, among which those of equal prompts are looked for
SAMPLES_SHOWN = 6
MOST_COMMITS = 12
ROWS_SHOWN, ROWS_READ = (
    12,
    200_000,
)  # of the rows that a run has learned from, where there are not more than these
ROWS_TITLE = "Rows that it learned from most often (prefect-rlhf lineage --out FILE has all)"
_SAMPLE_FILE = re.compile(r"(\d{1,18})-.*\.jsonl")  # begins with the iteration

Row = Mapping[str, Any]

logger = logging.getLogger(__name__)


def write_report(folder: Path, ended: str | None = None, to: Path | None = None) -> Path:
    """Write the report of a run, or of a pipeline with all its stages. Returns the file's path. Raises ConfigError
    for a folder that is neither's.

    ended  how the run has ended, in words; default: as its folder shows
    to     the file; default: `report.html` in the run folder
    """
    file = to or folder / REPORT
    if not (folder / CONFIG).exists() and not (folder / STAGES).is_file():
        raise ConfigError(
            f"{folder} is neither a run's folder, which has {CONFIG}, nor a pipeline's, which has {STAGES}. Name one "
            "that a run or a pipeline has written."
        )
    stages = _stages(folder)
    page = pipeline_page(folder.resolve().name, stages) if stages else run_page(contents_of(folder, ended))
    replace_file(file, page)
    return file


def _stages(folder: Path) -> list[Contents]:
    """The stages of a pipeline that have begun, in order; none of a run's own folder."""
    if (folder / CONFIG).exists():
        return []
    path, remedy = folder / STAGES, "The pipeline writes it again when it continues."
    with reading(path, "not as a pipeline wrote it", remedy=remedy):
        runs = [folder / Path(name).name for name in read_json(path)["stages"]]
    begun = [contents_of(run) for run in runs if (run / CONFIG).is_file()]
    if not begun:
        raise ConfigError(f"no stage of {folder} has begun, so there is nothing to report.")
    return begun


def keep_stages(folder: Path, names: Iterable[str]) -> None:
    """Write the order of a pipeline's stages into its folder. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(folder / STAGES, json.dumps({"stages": list(names)}) + "\n")


def write_comparison(compared: Comparison, to: Path) -> Path:
    """Write runs beside each other as one page. Returns its path. Raises ConfigError for more runs than colours."""
    if len(compared.runs) > MOST_RUNS:
        raise ConfigError(
            f"{len(compared.runs)} runs are too many for one page, whose curves have {MOST_RUNS} colours. Name fewer."
        )
    tables = {
        "Settings that differ": compared.settings,
        "Seconds": compared.seconds,
        "Plans": compared.plan,
        "Metrics of the last iteration": compared.metrics,
    }
    replace_file(to, comparison_page([contents_of(run.folder) for run in compared.runs], tables))
    return to


def write_trace(folder: Path, to: Path) -> int:
    """Write a run's newest iterations as a Chrome trace. Returns the number of events. Raises ConfigError for a
    folder that is no run's, or has no committed iteration."""
    folder, _ = existing_run_folder(folder)
    part, rows = newest_part(folder)
    if part is None:
        raise ConfigError(f"{folder} has no committed iteration yet, so there is nothing to trace.")
    events = trace_events(part.plan, rows, spans_of(part.plan, rows))
    replace_file(to, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)


def leave_report(folder: Path, ended: str | None = None) -> None:
    """Write the report at a run's end. Nothing that goes wrong here counts against the run."""
    try:
        write_report(folder, ended)
    except Exception:
        logger.exception("the report of %s could not be written", folder)


def contents_of(folder: Path, ended: str | None = None) -> Contents:
    """What the report of a run shows. Raises ConfigError for a folder that is no run's."""
    folder, config = existing_run_folder(folder)
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else {}
    complete, total = newest_step(folder) or 0, getattr(config, "total_iterations", None)
    part, rows = newest_part(folder)
    spans = spans_of(part.plan, rows) if part else []
    last = max((span.iteration for span in spans), default=0)
    looked_at = (min((span.iteration for span in spans), default=0), last)
    return Contents(
        run=folder.name,
        folder=str(folder),
        algorithm=config.type.replace("_", " "),
        model=model_name(config),
        complete=complete,
        total=total,
        ended=ended or _ending(bool(summary), complete, total),
        curves=_curves(folder / METRICS),
        plan=part.plan if part else None,
        nodes=_nodes(part.plan, rows, summary) if part else [],
        lanes=_lanes(summary),
        spans=[span for span in spans if span.iteration > last - TIMELINE_ITERATIONS],
        looked_at=looked_at,
        work_s=_work(part.plan, spans) if part else {},
        summary=summary,
        samples=early_and_late(folder / SAMPLES),
        lineage=_lineage(folder, config, rows),
        configuration=yaml.safe_dump(public_document(config), sort_keys=False, allow_unicode=True),
        versions=", ".join(f"{name} {number}" for name, number in versions().items()),
    )


def _ending(finished: bool, complete: int, total: int | None) -> str:
    if finished:
        return (
            "It has finished." if total in (None, complete) else "It was stopped before its last iteration."
        )
    return f"It has not finished: {complete} iterations are committed."


# --- journals ---


def _curves(path: Path) -> dict[str, Curve]:
    """Metric -> its finite values."""
    iterations: dict[str, array[int]] = defaultdict(lambda: array("q"))
    values: dict[str, array[float]] = defaultdict(lambda: array("d"))
    for row in metrics_rows(path):
        iteration = int(row["iteration"] or 0)
        for name, value in row.items():
            if value is not None and name != "iteration":
                iterations[name].append(iteration + 1)
                values[name].append(value)
    return {name: Curve(np.array(iterations[name]), np.array(values[name])) for name in values}


def newest_part(folder: Path) -> tuple[RunPlan | None, list[Row]]:
    """The plan of a run's last iterations, and their rows of the lineage: whole iterations in its last
    NEWEST_BYTES. (None, []) where no iteration is committed, or its plan is not there any more."""
    path = folder / LINEAGE
    if not path.exists() or not (folder / PLAN).exists():
        return None, []
    plans = [RunPlan(iteration=0, plan=read_plan(folder / PLAN, "Put it back.")), *logged_changes(folder)]
    parts = rows_by_plan(plans, _tail(path, NEWEST_BYTES))
    return parts[-1] if parts else (None, [])


def _tail(path: Path, most_bytes: int) -> list[dict[str, Any]]:
    """The rows of the whole iterations at the end of a lineage."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(size - most_bytes, 0))
        lines = file.read(most_bytes).split(b"\n")
    is_cut = size > most_bytes
    rows = [_lineage_row(path, line) for line in (lines[1:-1] if is_cut else lines[:-1]) if line]
    if is_cut and rows:
        first = rows[0]["iteration"]
        rows = [row for row in rows if row["iteration"] > first]
    return rows


def _lineage_row(path: Path, line: bytes) -> dict[str, Any]:
    """A row of the lineage. Raises ConfigError for a line that is none."""
    with reading(path, "a line is not valid JSON"):
        row = json.loads(line)
    if not isinstance(row, dict) or not _is_of_a_node(row):
        raise ConfigError(f"{path}: a line is no row of the lineage: {shown(row)}.")
    return row


def _is_of_a_node(row: Row) -> bool:
    """Whether a row has what is read of it here."""
    clocks = row.get("clocks")
    return (
        isinstance(row.get("node"), str)
        and all(isinstance(row.get(name), int) for name in ("iteration", "attempt", "generation"))
        and all(is_number(row.get(name)) for name in ("iteration", "started_s", "ended_s"))
        and isinstance(clocks, dict)
        and bool(clocks)
        and all(
            rank.isdecimal() and isinstance(span, list) and len(span) == 2 and all(map(is_number, span))
            for rank, span in clocks.items()
        )
    )


# --- seconds ---


def _nodes(plan: ExecutionPlan, rows: Sequence[Row], summary: Row) -> list[Measured]:
    """The seconds of calls and evaluations, from the last rank's start to the last rank's end, in the plan's order.
    The first iteration counts only if it is the only one."""
    calls = summary.get("planned_and_measured", {}).get("calls", {})
    numbers = {row["iteration"] for row in rows}
    first = min(numbers) if len(numbers) > 1 else -1
    spent: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["iteration"] > first:
            spent[row["node"]].append(row["ended_s"] - max(start for start, _ in row["clocks"].values()))
    bars = []
    for node in plan.nodes:
        if node.kind in ("call", "evaluate") and spent[node.name]:
            low, median, high = np.quantile(spent[node.name], (0.1, 0.5, 0.9)).clip(0).tolist()
            kind = node.call.kind if node.kind == "call" else node.kind
            planned = calls[node.name]["planned"] if node.name in calls else None
            bars.append(Measured(node.name, kind, median, low, high, planned))
    return bars


def _work(plan: ExecutionPlan, spans: Sequence[Span]) -> dict[int, dict[str, float]]:
    return work_s(spans, predecessors_of(plan, sorted({span.iteration for span in spans})))


def _lanes(summary: Row) -> dict[str, list[Span]]:
    """Devices -> their bars in the planned iteration."""
    return {
        devices: [Span(0, 0, node, kind, start_s, end_s) for node, kind, start_s, end_s in bars]
        for devices, bars in summary.get("planned_lanes", {}).items()
    }


# --- samples ---


def early_and_late(folder: Path) -> list[Samples]:
    """Samples of the first and of the last iteration that wrote some: first those of prompts that are in both."""
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        if match := _SAMPLE_FILE.fullmatch(path.name):  # a user's own files are beside them
            files[int(match[1])] = path  # of several dp ranks the first
    ends = sorted({min(files), max(files)}) if files else []
    both = [_samples(files[iteration]) for iteration in ends]
    prompts = [{plain_text(row["prompt"], 1 << 20): row for row in rows} for rows in both]
    common = [prompt for prompt in prompts[0] if all(prompt in other for other in prompts)] if prompts else []
    if len(ends) > 1 and common:
        both = [
            [rows[prompt] for prompt in common]
            + [row for prompt, row in rows.items() if prompt not in common]
            for rows in prompts
        ]
    return [
        Samples(iteration, rows[:SAMPLES_SHOWN]) for iteration, rows in zip(ends, both, strict=True) if rows
    ]


def _samples(path: Path) -> list[dict[str, Any]]:
    """The first samples of a file. Raises ConfigError for a line that is none."""
    rows = list[dict[str, Any]]()
    for place, row in islice(json_lines(path, "sample"), SAMPLES_READ):
        rewards, columns = row.get("rewards") or {}, row.get("columns") or {}
        if (
            not all(_is_talk(row.get(name)) for name in ("prompt", "completion"))
            or not (isinstance(rewards, dict) and isinstance(columns, dict))
            or not all(
                value is None or isinstance(value, int | float)
                for value in (row.get("score"), row.get("reward_model"), *rewards.values())
            )
        ):
            raise ConfigError(f"{place}: is no sample: {shown(row)}.")
        rows.append(row)
    return rows


def _is_talk(value: Any) -> bool:
    """Whether a value is text, or messages."""
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(message, dict) for message in value)
    )


# --- lineage ---


def _lineage(folder: Path, config: RunConfig, rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    return {
        "Data": _data(folder, config),
        **_taught(folder),
        "From the Hugging Face Hub": _pins(folder),
        "Models at the start": _models(folder),
        "Commits that are kept": _commits(folder),
        "Attempts and rebuilds of the ranks": _attempts(rows),
        "Plans": _plans(folder),
        "Changes that were accepted last": _accepted(folder),
    }


def _data(folder: Path, config: RunConfig) -> list[dict[str, Any]]:
    rows = []
    for what, file in (("rows", "data.sha256"), ("held-out rows", "held-out.sha256")):
        if (folder / file).exists():
            digest = (folder / file).read_text(encoding="utf-8").strip()
            name = config.data.name if what == "rows" else "evaluation"
            rows.append({"what": what, "from": str(name), "SHA-256 of their content": digest[:64]})
    return rows


def _taught(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Which rows have taught the model, as far as that is known: of each stretch, and row by row. A run that trains
    nothing has neither."""
    stretches, rows = list[dict[str, Any]](), list[dict[str, Any]]()
    with suppress(ConfigError, OSError):
        for lesson in lessons_of(folder):
            seen = lesson.times > 0
            stretches.append(
                {
                    "from iteration": lesson.origin["step"] + 1,
                    "samples": f"{lesson.origin['sample']} to {lesson.end - 1}",
                    "rows": f"{int(seen.sum())} of {len(lesson.rows)}",
                    "reward code": ", ".join(
                        f"{name} {code[:16]}" for name, code in lesson.origin["rewards"].items()
                    ),
                }
            )
            often = set(lesson.times.argsort(kind="stable")[::-1][:ROWS_SHOWN].tolist())
            named = enumerate(lesson.rows.identities() if len(seen) <= ROWS_READ else ())
            rows += [
                {"row": place, "hash": digest[:16], "times": int(lesson.times[index])}
                for index, (place, digest) in named
                if index in often and seen[index]
            ]
    rows.sort(key=lambda row: -row["times"])
    return {"What taught it": stretches, ROWS_TITLE: rows[:ROWS_SHOWN]}


def _models(folder: Path) -> list[dict[str, Any]]:
    path = folder / "models.json"
    if not path.exists():
        return []
    return [
        {"model": name_of_folder(model), "file": name, "SHA-256": str(digest)[:16]}
        for model, files in read_json(path).items()
        if isinstance(files, Mapping)
        for name, digest in files.items()
        if str(name).endswith((".safetensors", "config.json"))
    ][:MOST_COMMITS]


def _pins(folder: Path) -> list[dict[str, Any]]:
    return [{"name": name, "commit": pin.commit} for name, pin in read_pins(folder / REVISIONS).items()]


def _accepted(folder: Path) -> list[dict[str, Any]]:
    try:
        accepted = last_accepted(folder)
    except CheckpointError:
        accepted = None
    if accepted is None:
        return []
    return [{"at commit": accepted.step, "change": change} for change in accepted.changes]


def _commits(folder: Path) -> list[dict[str, Any]]:
    commits = []
    for step in sorted(step_folders(folder))[-MOST_COMMITS:]:
        try:
            manifest = read_manifest(step)
        except CheckpointError:
            commits.append({"commit": step.name, "attempt": None, "versions": "damaged", "written": ""})
            continue
        roles = ", ".join(f"{role} {version}" for role, version in manifest.versions.items())
        written = datetime.fromtimestamp(step.stat().st_mtime, UTC)
        commits.append(
            {
                "commit": step.name,
                "attempt": manifest.attempt,
                "versions": roles,
                "written": f"{written:%Y-%m-%d %H:%M:%S} UTC",
            }
        )
    return commits


def _attempts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each life of the process groups, of the iterations that were read; none where there was one only."""
    lives: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row in rows:
        lives[row["attempt"], row["generation"]].append(row["iteration"])
    if len(lives) < 2:
        return []
    return [
        {"attempt": attempt, "rebuild": generation, "iterations": f"{min(of) + 1} to {max(of) + 1}"}
        for (attempt, generation), of in sorted(lives.items())
    ]


def _plans(folder: Path) -> list[dict[str, Any]]:
    changes = logged_changes(folder) if (folder / PLAN).exists() else ()
    if not changes:
        return []
    return [{"from iteration": 1, "plan": PLAN, "why": ""}] + [
        {"from iteration": change.iteration + 1, "plan": f"plan-{number}.json", "why": change.why or "faster"}
        for number, change in enumerate(changes, 2)
    ]
