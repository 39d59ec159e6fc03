"""The champion of a series: the model that is used, by the alias `models/champion` in the series' folder.

SERIES/champions.jsonl    what happened, a line each: a run's model was promoted, or the champion was rolled back
       models/champion    a symbolic link to the champion's model folder; it is replaced by a rename
       0001/, 0002/, ...  the runs: each has a pipeline's folders, rows/ and run.json, and decision.json at its end

The log decides, and is written first: a promotion adds a run, a roll back takes the last one away. The alias follows
it, again at the next command if the process was killed between the two.
"""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect_rlhf.flows.run.run_folder import taken
from prefect_rlhf.rlhf_tasks.algorithms.configurations import MODEL, ConfigError
from prefect_rlhf.rlhf_tasks.algorithms.series import TRAIN
from prefect_rlhf.rlhf_tasks.system.durable import append_lines, replace_file, sync
from prefect_rlhf.rlhf_tasks.system.reading import read_json, reading

LOG = "champions.jsonl"
ALIAS = Path("models", "champion")
DECISION, BEGUN, ASKED = "decision.json", "run.json", "asked.json"
PROMOTED, KEPT, ROLLED_BACK = "promoted", "kept", "rolled back"


def runs_of(series: Path) -> list[str]:
    """The numbers of a series' runs, in order."""
    if not series.is_dir():
        return []
    return sorted(
        place.name for place in series.iterdir() if (place / BEGUN).is_file() and place.name.isdecimal()
    )


def model_of(series: Path, run: str) -> Path:
    """The folder of the model that a run has trained."""
    return series / run / TRAIN / MODEL


def changes_of(series: Path) -> list[dict[str, Any]]:
    """The lines of the log. Raises ConfigError where it is damaged."""
    path = series / LOG
    if not path.exists():
        return []
    with reading(path, "not a log of champions", remedy="Put it back as it was written."):
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end was not acknowledged
        return [dict(json.loads(line)) for line in lines]


def line_of_champions(series: Path) -> list[str]:
    """The runs whose models are champions one after another; the last one is the present champion."""
    champions: list[str] = []
    for change in changes_of(series):
        if change["change"] == PROMOTED:
            champions.append(change["run"])
        else:
            champions.pop()
    return champions


def champion_of(series: Path) -> str | None:
    """The run whose model is the champion; None where there is none yet. Raises ConfigError where it is gone."""
    champions = line_of_champions(series)
    if not champions:
        return None
    model = model_of(series, champions[-1])
    if not (model / "config.json").is_file() and not (model / "adapter_config.json").is_file():
        remedy = f"take the champion before it: prefect-rlhf champion rollback {series}"
        if _why_no_roll_back(series):
            remedy = "begin another series (name)."
        raise ConfigError(
            f"the champion of {series} is the model of run {champions[-1]}, but {model} is gone. Put it back, or "
            f"{remedy}"
        )
    return champions[-1]


def decision_of(series: Path, run: str) -> dict[str, Any] | None:
    """How a run was decided; None where it is not yet."""
    path = series / run / DECISION
    return read_json(path) if path.exists() else None


def decide(series: Path, run: str, decision: dict[str, Any]) -> None:
    """Record a run's decision and carry it out. Raises OSError."""
    replace_file(series / run / DECISION, json.dumps(decision, indent=2) + "\n")
    settle(series)


def ask_until(
    series: Path, run: str, timeout_s: float, unanswered: dict[str, Any], asking: str | None
) -> float:
    """Write down that a person is asked about a run, unless it is written already. Returns the seconds that are left.

    unanswered  the decision where there is no answer in time, whether or not a process is there to see it
    asking      the flow run that is suspended until the answer, without a process; None: its process waits
    """
    path = series / run / ASKED
    if not path.exists():
        question = {"until": time.time() + timeout_s, "flow_run": asking, "unanswered": unanswered}
        replace_file(path, json.dumps(question, indent=2) + "\n")
    return max(1.0, read_json(path)["until"] - time.time())


def waiting_for(series: Path, asking: str | None = None) -> str | None:
    """A sentence where another flow run, which has no process, waits for a person's word about the last run. If the
    time for it is over, and that flow run has no answer, the run is decided instead.

    asking  the present flow run
    """
    for run in runs_of(series)[-1:]:
        path = series / run / ASKED
        if decision_of(series, run) is not None or not path.exists():
            return None
        question = read_json(path)
        if question["flow_run"] == asking and asking is not None:
            return None
        over = question["until"] < time.time()
        if question["flow_run"] is None or (over and not _may_be_answered(question["flow_run"])):
            if over:
                decide(series, run, question["unanswered"])
            return None
        return f"run {run} waits for a person's word, in the flow run {question['flow_run']}"
    return None


def _may_be_answered(flow_run: str) -> bool:
    """Whether the flow run that asked is resumed, or may be: its process can still wait for a worker."""
    from prefect_rlhf.flows.recurring.approval import is_resumed  # Prefect takes seconds to import

    return is_resumed(flow_run)


def settle(series: Path) -> None:
    """Carry out what is decided and was interrupted: the log's line of a promoted run, and the alias."""
    logged = {change["run"] for change in changes_of(series)}
    for run in runs_of(series)[-1:]:
        decision = decision_of(series, run)
        if decision is not None and decision["decision"] == PROMOTED and run not in logged:
            _log(series, PROMOTED, run, decision["reason"])
    champions = line_of_champions(series)
    if champions:
        _point_alias(series, champions[-1])


def roll_back(series: Path) -> tuple[str, str]:
    """Make the champion before the present one the champion again. Returns (former champion's run, new one's).

    Raises ConfigError where there is none, or its model is gone, or a run is not decided yet, or in progress.
    """
    refuse_no_series(series)
    with taken(series):
        settle(series)
        if (why := _why_no_roll_back(series)) is not None:
            raise ConfigError(why)
        former, earlier = line_of_champions(series)[:-3:-1]
        _log(series, ROLLED_BACK, former, f"back to {earlier}")
        settle(series)
    return former, earlier


def _why_no_roll_back(series: Path) -> str | None:
    """A sentence where the champion before the present one cannot become the champion again."""
    champions, runs = line_of_champions(series), runs_of(series)
    if runs and decision_of(series, runs[-1]) is None:
        return (
            f"run {runs[-1]} of {series} is compared with the present champion, and not decided yet. Let it end "
            f"(the series' own command continues it), or remove {series / runs[-1]}."
        )
    if len(champions) < 2:
        only = f"{champions[0]} is the only champion so far" if champions else "it has no champion yet"
        return f"{series}: there is no earlier champion to roll back to: {only}."
    former, earlier = champions[-1], champions[-2]
    if not model_of(series, earlier).is_dir():
        return (
            f"the champion before {former} is the model of run {earlier}, but {model_of(series, earlier)} is gone. "
            "Put it back."
        )
    return None


def refuse_no_series(series: Path) -> None:
    """Raises ConfigError where a folder is not one of a series."""
    if not runs_of(series):
        raise ConfigError(
            f"{series} is not the folder of a series: it has no runs. Name one such as runs/NAME."
        )


def _log(series: Path, change: str, run: str, why: str) -> None:
    path = series / LOG
    written = path.read_bytes() if path.exists() else b""
    line = {"time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "change": change, "run": run, "why": why}
    append_lines(path, written.rfind(b"\n") + 1, [json.dumps(line)])
    sync(series)


def _point_alias(series: Path, run: str) -> None:
    """Have the alias name a run's model: readers see the old one or the new one."""
    alias, target = series / ALIAS, os.path.relpath(model_of(series, run), (series / ALIAS).parent)
    if alias.is_symlink() and os.readlink(alias) == target:
        return
    alias.parent.mkdir(exist_ok=True)
    fresh = alias.with_name(".champion.fresh")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.rename(alias)
    sync(alias.parent)
