"""Checks of a pipeline's stages without running them: whether they can run, and which are finished.

Loads neither Prefect nor torch.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flows.run.planning import rank_counts
from flows.run.prepare import Prepared, check_without_models, prepare
from flows.run.run_folder import CONFIG, SUMMARY, existing_run_folder, refuse_foreign
from flows.run.run_identity import compared, refuse_changes
from rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from rlhf_tasks.checkpoint.commits import newest_step
from rlhf_tasks.parallel.layout.weight_files import is_model_folder
from rlhf_tasks.system.reading import read_json


class CheckedStages(NamedTuple):
    """The result of checking a pipeline's stages.

    warnings  each with its stage's name
    prepared  stage -> what was prepared of it, where its models are there
    ranks     of a host, for all stages
    """

    warnings: list[str]
    prepared: dict[str, Prepared]
    ranks: int


def check_stages(configs: Mapping[str, RunConfig]) -> CheckedStages:
    """Check what can be checked before the first stage starts.

    A stage whose models exist is prepared as a run is, and must be unchanged if it was begun. The models of other
    stages do not exist yet; of those, data and rewards are checked. Raises ConfigError, naming the stage.
    """
    ranks = max(rank_counts(config)[0] for config in configs.values())
    checked = CheckedStages([], {}, ranks)
    for name, config in configs.items():
        try:
            if all(is_model_folder(role.folder) for role in config.roles().values()):
                checked.prepared[name] = prepare_stage(config, ranks)
                warnings: Iterable[str] = checked.prepared[name].warnings
            else:
                warnings = check_without_models(config)
        except ConfigError as fault:
            raise ConfigError(f"stage {name!r}: {fault}") from None
        checked.warnings.extend(f"stage {name}: {warning}" for warning in warnings)
    return checked


def prepare_stage(config: RunConfig, ranks: int | None = None) -> Prepared:
    """Prepare a stage whose models exist, as `prepare` does.

    config  its name is that of its run folder
    Raises ConfigError, also for what has changed since its last commit, or before the first.
    """
    if (begun := begun_folder(config)) is None:
        return prepare(config, ranks=ranks)
    folder, before = existing_run_folder(begun)
    refuse_foreign(folder)
    prepared = prepare(config, folder, ranks)
    refuse_changes(folder, prepared)
    if newest_step(folder) is None and compared(before) != compared(config):
        raise ConfigError(
            f"{folder} was begun with another configuration and has nothing committed yet. Remove it, or give the "
            "stage another name."
        )
    return prepared


def begun_folder(config: RunConfig) -> Path | None:
    """The run folder of a stage that was begun; None of one that was not."""
    folder = Path(config.output_dir, str(config.name))
    return folder if (folder / CONFIG).exists() else None


def summary_of(config: RunConfig) -> dict[str, Any] | None:
    """The summary of a finished stage; None of another one. Raises ConfigError where it cannot be read."""
    path = Path(config.output_dir, str(config.name), SUMMARY)
    if not path.exists():
        return None
    return read_json(path, remedy=f"Remove it: the stage {config.name} writes it again.")
