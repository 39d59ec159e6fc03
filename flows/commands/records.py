"""`prefect-rlhf runs`: which runs there are, and what differs between some of them. Loads no torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from prefect_rlhf.flows.commands.options import refuse_folder
from prefect_rlhf.flows.run.records import Comparison, RunRecord, comparison, records_in
from prefect_rlhf.flows.run.reporting import write_comparison
from prefect_rlhf.flows.run.run_folder import refuse_unwritable
from prefect_rlhf.flows.view.terminal import as_time
from prefect_rlhf.planner.text import text_table
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, one_line, printable

MOST_CELL = 60  # characters of a setting's value in a table


def list_runs(folder: Path = Path("runs"), /) -> None:
    """List the runs in a folder, the latest first: algorithm, model, iterations, state, last metric, time.

    Parameters
    ----------
    folder
        The folder of the run folders.
    """
    records = records_in(folder)
    if not records:
        print(printable(f"{folder} has no runs yet."))
        return
    head = ("run", "algorithm", "model", "iterations", "state", "last metric", "started (UTC)", "took")
    print(printable(text_table(head, list(map(_row, records)))), end="")


def _row(record: RunRecord) -> tuple[str, ...]:
    if record.state == "damaged":
        damage = one_line(record.damage, most=MOST_CELL)
        return one_line(record.name), "", "", "", record.state, damage, _minute(record), ""
    metric = record.headline
    return (
        one_line(record.name),
        one_line(record.algorithm),
        one_line(_tail(record.model)),
        f"{record.done}/{'?' if record.total is None else record.total}",
        record.state,
        "" if metric is None else f"{metric[0]} {metric[1]:.4g}",
        _minute(record),
        as_time(record.seconds),
    )


def _minute(record: RunRecord) -> str:
    return f"{record.started:%Y-%m-%d %H:%M}"


def _tail(model: str) -> str:
    """The last two parts of a model's path; an id of the Hub has no more."""
    return "/".join(Path(model).parts[-2:]) if model else ""


def compare_runs(
    first: Path,
    second: Path,
    /,
    *further: Path,
    as_json: Annotated[bool, Parameter("--json", negative="")] = False,
    html: Annotated[Path | None, Parameter("--html")] = None,
) -> None:
    """Compare runs: the settings that differ, their last metrics, seconds and plans.

    Parameters
    ----------
    first
        A run's folder; its values are in the first column.
    second
        Another run's folder.
    further
        Folders of more runs.
    as_json
        Print JSON, with whole values.
    html
        A file: write it as a page that opens offline, with the runs' curves and samples side by side.
    """
    folders = (first, second, *further)
    twice = next((folder for folder in folders if folders.count(folder) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is named twice. Name different runs.")
    compared = comparison(folders)
    if html is not None:
        refuse_folder(html, "compared.html")
        refuse_unwritable(html.parent, "--html")
        print(printable(str(write_comparison(compared, html))))
        return
    if as_json:
        print(json.dumps(_document(compared), indent=2))
        return
    names = [one_line(str(folder)) for folder in folders]
    state = {
        "state": tuple(run.state for run in compared.runs),
        "iterations": tuple(run.done for run in compared.runs),
    }
    parts: Sequence[tuple[str, Mapping[str, tuple[Any, ...]]]] = (
        ("run", state),
        ("setting", compared.settings),
        ("metric", compared.metrics),
        ("seconds", compared.seconds),
        ("call", compared.plan),
    )
    tables = [
        text_table((head, *names), [(one_line(key), *map(_cell, row)) for key, row in values.items()])
        for head, values in parts
        if values
    ]
    print(printable("\n".join(tables)), end="")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    text = (
        f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    )
    return one_line(text, most=MOST_CELL)


def _document(compared: Comparison) -> dict[str, Any]:
    return {
        "runs": [str(run.folder) for run in compared.runs],
        "settings": compared.settings,
        "metrics": compared.metrics,
        "seconds": compared.seconds,
        "plan": compared.plan,
    }
