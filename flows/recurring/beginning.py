"""The beginning of a series' run: its new rows, its stages, and all that can be checked before anything starts. Loads
neither Prefect nor torch.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from prefect_rlhf.flows.recurring import champions
from prefect_rlhf.flows.recurring.comparison import FEWEST_ROWS
from prefect_rlhf.flows.recurring.new_rows import copy_new_rows, same_rows
from prefect_rlhf.flows.run.run_folder import refuse_unwritable
from prefect_rlhf.flows.run.run_identity import CheckedStages, check_stages
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.algorithms.series import (
    CANDIDATE,
    TRAIN,
    SeriesConfig,
    series_folder,
    stages_of_run,
    training_of,
)
from prefect_rlhf.rlhf_tasks.data.dataset import data_set
from prefect_rlhf.rlhf_tasks.system.durable import replace_file, sync
from prefect_rlhf.rlhf_tasks.system.reading import read_json

NOTHING_NEW = "no row is new since the last run: nothing to do"


class SeriesRun(NamedTuple):
    """A run of a series that is begun and checked.

    folder    of the series
    name      the run's number, its folder's name
    begun     run.json: the champion it is compared with, its rows
    stages    name -> configuration
    warnings  a sentence each
    """

    series: SeriesConfig
    folder: Path
    name: str
    begun: dict[str, Any]
    stages: dict[str, RunConfig]
    checked: CheckedStages
    warnings: list[str]

    @property
    def place(self) -> Path:
        """The run's folder."""
        return self.folder / self.name


def open_series(config: SeriesConfig) -> Path:
    """The folder of a series, which is made where it is not there. Raises ConfigError."""
    folder = series_folder(config)
    refuse_unwritable(folder, "output_dir")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def check_series(config: SeriesConfig) -> list[str]:
    """Check a series' configuration as its next run would, on all its rows. Returns warnings. Raises ConfigError."""
    folder, training = series_folder(config), training_of(config)
    champion = champions.champion_of(folder)
    model = None if champion is None else champions.model_of(folder, champion)
    sources = {source.path: source.weight for source in training.data.sources}
    _, stages = stages_of_run(config, "next", sources, model)
    _refuse_few_rows(stages[CANDIDATE])
    return check_stages(stages).warnings


def begin_run(config: SeriesConfig) -> SeriesRun | None:
    """Begin the next run of a series, or continue the one that was interrupted; None where no row is new.

    The caller has taken the series' folder. Raises ConfigError before anything starts: for a champion that is gone,
    too few held-out rows, and all that is wrong with data, models and rewards.
    """
    folder = series_folder(config)
    champions.settle(folder)
    runs, champion = champions.runs_of(folder), champions.champion_of(folder)
    training = training_of(config)
    if runs and champions.decision_of(folder, runs[-1]) is None:
        name = runs[-1]
    else:
        name = f"{int(runs[-1]) + 1 if runs else 1:04d}"
        if not _take_rows(training, folder, name, champion):
            return None
    begun = read_json(folder / name / champions.BEGUN)
    compared_with = None if begun["champion"] is None else champions.model_of(folder, begun["champion"])
    try:
        _, stages = stages_of_run(config, name, begun["train"], compared_with)
        _refuse_few_rows(stages[CANDIDATE])
        checked = check_stages(stages)
    except ConfigError:
        if not (folder / name / TRAIN).exists():  # nothing of it has begun: the next one takes its rows
            shutil.rmtree(folder / name)
        raise
    return SeriesRun(config, folder, name, begun, stages, checked, [*begun["warnings"], *checked.warnings])


def _take_rows(training: RunConfig, folder: Path, name: str, champion: str | None) -> bool:
    """Begin a run's folder with the rows that no champion has learned from; False where no row is new."""
    promoted = {
        change["run"] for change in champions.changes_of(folder) if change["change"] == champions.PROMOTED
    }
    fresh = folder / f".{name}.fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    try:
        used = [folder / run for run in sorted(promoted)]
        rows = copy_new_rows(training, used, fresh, folder / name)
        runs = champions.runs_of(folder)
        if not rows.number or (runs and same_rows(fresh, folder / runs[-1])):
            return False
        begun = {
            "champion": champion,
            "rows": rows.number,
            "train": rows.train,
            "warnings": _warnings(training, rows.gone, rows.bad),
        }
        replace_file(fresh / champions.BEGUN, json.dumps(begun, indent=2) + "\n")
        fresh.rename(folder / name)
        sync(folder)
        return True
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _warnings(training: RunConfig, gone: int, bad: int) -> list[str]:
    said = []
    if gone:
        said.append(
            f"{gone} rows that champions have learned from are no longer in {training.data.name}: files have shrunk "
            "or were rewritten. Nothing is unlearned; each row with another content counts as new."
        )
    if bad:
        said.append(
            f"{bad} rows of {training.data.name} cannot be read and are left out (data.on_bad_row: skip)."
        )
    return said


def _refuse_few_rows(config: RunConfig) -> None:
    rows = data_set(config.data).count()
    if rows < FEWEST_ROWS:
        raise ConfigError(
            f"evaluation: {config.data.name} has {rows} rows, too few for any margin: an interval of mean "
            f"differences needs at least {FEWEST_ROWS}. Add held-out rows."
        )
