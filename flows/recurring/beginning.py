"""The beginning of a series' run: its new rows, its stages, and all that can be checked before anything starts. Loads
neither Prefect nor torch.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from prefect_rlhf.flows.recurring import champions
from prefect_rlhf.flows.recurring.comparison import FEWEST_ROWS
from prefect_rlhf.flows.recurring.new_rows import copy_held_out, copy_new_rows, saw_all
from prefect_rlhf.flows.run.downloads import fetched
from prefect_rlhf.flows.run.run_folder import refuse_unwritable
from prefect_rlhf.flows.run.run_identity import CheckedStages, check_stages
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.algorithms.examples import prepared_rows
from prefect_rlhf.rlhf_tasks.algorithms.series import (
    CANDIDATE,
    CHAMPION,
    TRAIN,
    SeriesConfig,
    series_folder,
    stages_of_run,
    training_of,
)
from prefect_rlhf.rlhf_tasks.system.durable import replace_file, sync
from prefect_rlhf.rlhf_tasks.system.reading import read_json

NOTHING_NEW = "no row is new since the last run: nothing to do"


class SeriesRun(NamedTuple):
    """A run of a series that is begun and checked.

    folder    of the series
    name      the run's number, its folder's name
    begun     run.json: the champion it is compared with, its rows, the copies of the held-out ones
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
    checked = check_stages(stages, weights=False)
    _refuse_few_rows(stages[CANDIDATE], checked)
    return checked.warnings


def begin_run(config: SeriesConfig, asking: str | None = None) -> SeriesRun | None:
    """Begin the next run of a series, or continue the one that was interrupted; None where no row is new, and
    where another flow run waits for a person's word about the last one.

    asking  the flow run's id: one that asked a person about its model begins anew to get the answer
    The caller has taken the series' folder. Raises ConfigError before anything starts: for a champion that is gone,
    too few held-out rows, and all that is wrong with data, models and rewards.
    """
    folder = series_folder(config)
    champions.settle(folder)
    if champions.waiting_for(folder, asking) is not None:
        return None
    runs, champion = champions.runs_of(folder), champions.champion_of(folder)
    if runs and champions.decision_of(folder, runs[-1]) is None:
        name = runs[-1]
    else:
        name = f"{int(runs[-1]) + 1 if runs else 1:04d}"
        if not _take_rows(config, folder, name, champion):
            return None
    begun = read_json(folder / name / champions.BEGUN)
    compared_with = None if begun["champion"] is None else champions.model_of(folder, begun["champion"])
    try:
        _, stages = stages_of_run(config, name, begun["train"], compared_with, list(begun["held_out"]))
        checked = check_stages(stages)
        _refuse_few_rows(stages[CANDIDATE], checked)
    except ConfigError as fault:
        if (folder / name / TRAIN).exists():
            raise
        shutil.rmtree(folder / name)  # nothing of it has begun: the next one takes its rows
        said = str(fault)
        for copy, source in begun["held_out"].items():
            said = said.replace(copy, source)
        raise ConfigError(said) from None
    return SeriesRun(config, folder, name, begun, stages, checked, [*begun["warnings"], *checked.warnings])


def _take_rows(config: SeriesConfig, folder: Path, name: str, champion: str | None) -> bool:
    """Begin a run's folder with the rows that no champion has learned from; False where no row is new: there is
    none, or the last run has seen them all and was not promoted."""
    training = fetched(training_of(config), weights=False).config
    sources = {source.path: source.weight for source in training.data.sources}
    _, stages = stages_of_run(config, name, sources, None)
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
        tried = [folder / run for run in runs[-1:] if run not in promoted]
        if not rows.number or any(saw_all(run, fresh) for run in tried):
            return False
        evaluation = fetched(stages[CANDIDATE], weights=False).config
        begun = {
            "champion": champion,
            "rows": rows.number,
            "train": rows.train,
            "held_out": copy_held_out(evaluation, fresh, folder / name),
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


def _refuse_few_rows(config: RunConfig, checked: CheckedStages) -> None:
    """Count the rows that are answered: without those beyond `data.max_rows` or left out."""
    if (champion := checked.prepared.get(CHAMPION)) is not None:
        rows = len(champion.rows)
    else:  # the new model does not exist yet: the one it begins with has its tokenizer
        models = config.models.model_copy(update={"actor": checked.prepared[TRAIN].config.models.actor})
        rows = len(prepared_rows(fetched(config, weights=False).config.model_copy(update={"models": models})))
    if rows < FEWEST_ROWS:
        raise ConfigError(
            f"evaluation: {config.data.name} has {rows} rows, too few for any margin: an interval of mean "
            f"differences needs at least {FEWEST_ROWS}. Add held-out rows."
        )
