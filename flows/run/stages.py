"""What is known of a pipeline's stages without running them: whether they can run, and which are finished.

Loads neither Prefect nor torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.run.prepare import Prepared, check_without_models, prepare
from flows.run.run_folder import CONFIG, SUMMARY, existing_run_folder
from flows.run.run_identity import compared, refuse_changes
from rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from rlhf_tasks.checkpoint.commits import newest_step
from rlhf_tasks.system.reading import read_json


def check_stages(configs: Mapping[str, RunConfig]) -> list[str]:
    """Check what can be checked before the first stage starts; returns warnings, each with the stage's name.

    A stage whose models are there is prepared as a run is, and must be unchanged where it was begun. The models of
    the others are still to be trained; their data and rewards are looked at. Raises ConfigError, naming the stage.
    """
    warnings = list[str]()
    for name, config in configs.items():
        try:
            warnings += [f"stage {name}: {warning}" for warning in _check(config)]
        except ConfigError as fault:
            raise ConfigError(f"stage {name!r}: {fault}") from None
    return warnings


def _check(config: RunConfig) -> list[str]:
    if all(Path(role.folder, "config.json").exists() for role in config.roles().values()):
        folder = Path(config.output_dir, str(config.name))
        prepared = _unchanged(config) if (folder / CONFIG).exists() else prepare(config)
        return list(prepared.warnings)
    return check_without_models(config)


def result_of(config: RunConfig) -> dict[str, Any] | None:
    """The summary of a stage that is finished; None of one that is not.

    Raises ConfigError for a stage that has changed since it was begun, and for a summary that cannot be read.
    """
    folder, found = Path(config.output_dir, str(config.name)), None
    if (folder / SUMMARY).exists():
        remedy = f"Remove it: the stage {config.name} writes it again."
        found = read_json(folder / SUMMARY, remedy=remedy)
    if (folder / CONFIG).exists():
        _unchanged(config)
    return found


def _unchanged(config: RunConfig) -> Prepared:
    """A stage that was begun. Raises ConfigError for what has changed since its last commit, or before the first."""
    folder, before = existing_run_folder(Path(config.output_dir, str(config.name)))
    prepared = prepare(config, folder)
    refuse_changes(folder, prepared)
    if newest_step(folder) is None and compared(before) != compared(config):
        raise ConfigError(
            f"{folder} was begun with another configuration and has nothing committed yet. Remove it, or give the "
            "stage another name."
        )
    return prepared
