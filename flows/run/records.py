"""What run folders say of their runs: a record of each, and what differs between several. Loads no torch or Prefect.

A folder is read as data: nothing that it names is run, and its configuration need not be one of this version.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from prefect_rlhf.flows.run.run_folder import CONFIG, FORMAT, SUMMARY, is_in_use
from prefect_rlhf.flows.view.terminal import shown_metrics
from prefect_rlhf.rlhf_tasks.checkpoint.changes import PLAN, logged_changes, read_plan
from prefect_rlhf.rlhf_tasks.checkpoint.journals import METRICS
from prefect_rlhf.rlhf_tasks.config.cluster import ByHand
from prefect_rlhf.rlhf_tasks.config.settings import public
from prefect_rlhf.rlhf_tasks.spec import CallNode
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, read_json, reading, shown

MOST_RUNS = 10_000  # that are listed: a folder with more is not one of runs
OWN_KEYS = ("name", "output_dir", "resume")
"""Settings that always differ between runs and say nothing of what they do."""

MetricsRow = Mapping[str, float | None]


@dataclass(frozen=True)
class RunRecord:
    """One run, as its folder says.

    name       the folder, relative to the one that is listed
    config     its configuration, as the run wrote it
    state      finished: all iterations are done and the model is written; ended: a process must resume it; damaged:
               its folder cannot be read, and nothing more is known of it
    metrics    of its committed iterations, the first one first
    total      its iterations; None where only its rows would say
    started    when its folder was made
    damage     of a damaged one: what is wrong
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    state: Literal["running", "finished", "ended", "damaged"]
    metrics: Sequence[MetricsRow]
    total: int | None
    started: datetime
    summary: Mapping[str, Any]
    damage: str = ""

    @property
    def algorithm(self) -> str:
        return str(self.config.get("type", ""))

    @property
    def model(self) -> str:
        """The actor as the configuration names it."""
        actor = dict(self.config.get("models") or {}).get("actor", "")
        return actor if isinstance(actor, str) else "(inline)"

    @property
    def done(self) -> int:
        """Committed iterations."""
        return int(self.metrics[-1]["iteration"] or 0) + 1 if self.metrics else 0

    @property
    def last(self) -> MetricsRow:
        """The metrics of the last committed iteration."""
        return self.metrics[-1] if self.metrics else {}

    @property
    def headline(self) -> tuple[str, float] | None:
        """The metric of the last iteration that says most of it."""
        if not (names := shown_metrics(self.last)):
            return None
        value = self.last[names[0]]
        assert value is not None, "a metric without a value is not shown"
        return names[0], value

    @property
    def seconds(self) -> float:
        """What its iterations took the ranks."""
        if self.state == "finished" and "seconds" in self.summary:
            return float(self.summary["seconds"])
        return sum(float(row.get("time/iteration") or 0.0) for row in self.metrics)


@dataclass(frozen=True)
class Comparison:
    """Several runs beside each other. Every tuple has a value for each run, None where it has none.

    settings  dotted key -> values, only of keys that differ; without arguments of a user's code
    metrics   name -> of the last committed iteration; those of times are left out
    seconds   all iterations, one of them, and each call -> as the ranks' clocks say, a call's median
    plan      call -> where it ran, as a configuration would say it
    """

    runs: tuple[RunRecord, ...]
    settings: Mapping[str, tuple[Any, ...]]
    metrics: Mapping[str, tuple[float | None, ...]]
    seconds: Mapping[str, tuple[float | None, ...]]
    plan: Mapping[str, tuple[str | None, ...]]


def records_in(folder: Path) -> list[RunRecord]:
    """The runs in a folder, and in its folders (stages of a pipeline), the latest first. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder. Name the folder of your runs, which is runs by default."
        )
    configs = [path for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{CONFIG}")]
    runs = [path.parent for path in configs if (path.parent / FORMAT).is_file()]
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"{folder} has more than {MOST_RUNS:,} runs. Name a folder further down.")
    records = [_record_or_damage(run, str(run.relative_to(folder))) for run in runs]
    return sorted(records, key=lambda record: record.started, reverse=True)


def _record_or_damage(folder: Path, name: str) -> RunRecord:
    """The record of a run, though its folder be damaged: one must not hide the others."""
    try:
        return record_of(folder, name)
    except ConfigError as error:
        damage = str(error).removeprefix(f"{folder}/")
        return RunRecord(folder, name, {}, "damaged", (), None, _started(folder), {}, damage)


def record_of(folder: Path, name: str | None = None) -> RunRecord:
    """The record of a run. Raises ConfigError where the folder is no run's, or is damaged."""
    if not (folder / FORMAT).is_file() or not (folder / CONFIG).is_file():
        what = "is not a run folder" if folder.is_dir() else "is no folder"
        raise ConfigError(f"{folder} {what}. `prefect-rlhf runs list` shows the runs that there are.")
    config = read_json(folder / CONFIG)
    if not isinstance(config.get("models") or {}, dict):
        raise ConfigError(f"{folder / CONFIG}: models must be a mapping, found {shown(config['models'])}.")
    summary = _summary(folder / SUMMARY)
    metrics = list(metrics_rows(folder / METRICS))
    total = config.get("total_iterations", summary.get("iterations"))
    is_finished = bool(summary) and summary.get("metrics") == (metrics[-1] if metrics else {})
    return RunRecord(
        folder=folder,
        name=name or folder.name,
        config=config,
        state="running" if _is_running(folder) else "finished" if is_finished else "ended",
        metrics=metrics,
        total=total if isinstance(total, int) else None,
        started=_started(folder),
        summary=summary,
    )


def _started(folder: Path) -> datetime:
    return datetime.fromtimestamp((folder / FORMAT).stat().st_mtime, UTC)


def _summary(path: Path) -> dict[str, Any]:
    """A run's summary, empty where there is none. Raises ConfigError where its seconds are none."""
    summary = read_json(path) if path.is_file() else {}
    calls = summary.get("calls") or {}
    if not is_number(summary.get("seconds", 0.0)):
        raise ConfigError(f"{path}: seconds must be a number, found {shown(summary['seconds'])}.")
    if not isinstance(calls, dict) or not all(
        isinstance(call, dict) and is_number(call.get("median_s")) for call in calls.values()
    ):
        raise ConfigError(f"{path}: calls must have the seconds of each call, found {shown(calls)}.")
    return summary


def comparison(folders: Sequence[Path]) -> Comparison:
    """Runs beside each other, in the given order. Raises ConfigError where a folder is no run's."""
    runs = tuple(map(record_of, folders))
    settings = _beside([dict(_flat(public(dict(run.config)))) for run in runs])
    return Comparison(
        runs,
        {
            key: values
            for key, values in settings.items()
            if key not in OWN_KEYS and any(value != values[0] for value in values)
        },
        _beside([dict(_metrics(run)) for run in runs]),
        _beside(list(map(_seconds, runs))),
        _beside([_places(run.folder) for run in runs]),
    )


def _beside(of_runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Key -> its values in each mapping, in the order in which keys come first."""
    keys = dict.fromkeys(key for values in of_runs for key in values)
    return {key: tuple(values.get(key) for values in of_runs) for key in keys}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that a document holds; a list's items by their numbers."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items:
        yield key, value
    for name, inner in items:
        yield from _flat(inner, f"{key}.{name}" if key else str(name))


def _metrics(run: RunRecord) -> Iterator[tuple[str, float | None]]:
    """The last row, without what the seconds say."""
    for name, value in run.last.items():
        if name != "iteration" and not name.startswith("time/"):
            yield name, value


def _seconds(run: RunRecord) -> dict[str, float]:
    calls = dict(run.summary.get("calls") or {})
    times = [float(row["time/iteration"] or 0.0) for row in run.metrics if "time/iteration" in row]
    each = {"an iteration": sum(times) / len(times)} if times else {}
    return {"all iterations": run.seconds, **each, **{name: call["median_s"] for name, call in calls.items()}}


def _places(folder: Path) -> dict[str, str]:
    """Call -> its placement in the plan that the run goes by now; nothing where there is none to be read."""
    plan = None
    with suppress(ConfigError):
        changes = logged_changes(folder)
        plan = changes[-1].plan if changes else read_plan(folder / PLAN, "")
    if plan is None:
        return {}
    calls = {node.call.name: node for node in plan.nodes if isinstance(node, CallNode)}
    return {name: str(ByHand.of(node.assignment)) for name, node in calls.items()}


def json_lines(path: Path, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of a file of JSON lines; a last line that is being written is left out, and of a file that
    is not there nothing comes. Raises ConfigError naming file:line for a line that is no object.

    what  a line is, for the sentence
    """
    if not path.exists():
        return
    with reading(path, "cannot be read"):
        file = path.open(encoding="utf-8", errors="replace")
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            if line.isspace():
                continue
            with reading(f"{path}:{number}", f"is no {what}"):
                row = json.loads(line)
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: is no {what}: {shown(row)}.")
            yield f"{path}:{number}", row


def metrics_rows(path: Path) -> Iterator[MetricsRow]:
    """The rows of a journal of metrics, as `json_lines`. Raises ConfigError, too, for a value that is no number."""
    for place, row in json_lines(path, "row of metrics"):
        if not isinstance(row.get("iteration"), int) or not is_number(row["iteration"]):
            raise ConfigError(f"{place}: is no row of metrics: {shown(row)}.")
        wrong = next((name for name, value in row.items() if not (value is None or is_number(value))), None)
        if wrong is not None:
            raise ConfigError(f"{place}: the metric {shown(wrong)} is no number: {shown(row[wrong])}.")
        yield row


def is_number(value: Any) -> bool:
    """Whether a value of a JSON document is a finite number, and a whole one has at most 62 bits."""
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, int) and abs(value) < 2**62


def _is_running(folder: Path) -> bool:
    try:
        return is_in_use(folder)
    except OSError:  # a folder that this account may only read: its run is not ours
        return False
