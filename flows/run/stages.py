"""What is known of a pipeline's stages without running them: whether they can run, and which are finished.

Loads neither Prefect nor torch.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flows.run.prepare import HandedOver, Prepared, check_without_models, prepare
from flows.run.run_folder import CONFIG, SUMMARY, existing_run_folder, refuse_foreign
from flows.run.run_identity import compared, refuse_changes
from rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from rlhf_tasks.checkpoint.commits import newest_step
from rlhf_tasks.parallel.layout.adapter_folder import is_model_folder
from rlhf_tasks.system.reading import read_json


class CheckedStages(NamedTuple):
    """warnings: each with its stage's name; prepared: stage -> what was prepared of it, where its models are there"""

    warnings: list[str]
    prepared: dict[str, HandedOver]


def check_stages(configs: Mapping[str, RunConfig]) -> CheckedStages:
    """Check what can be checked before the first stage starts.

    A stage whose models are there is prepared as a run is, and must be unchanged where it was begun. The models of
    the others are still to be trained; their data and rewards are looked at. Raises ConfigError, naming the stage.
    """
    checked = CheckedStages([], {})
    for name, config in configs.items():
        try:
            if all(is_model_folder(role.folder) for role in config.roles().values()):
                folder = begun_folder(config)
                prepared = prepare(config) if folder is None else _unchanged(config, folder)
                checked.prepared[name] = HandedOver(config, folder, prepared)
                warnings: Iterable[str] = prepared.warnings
            else:
                warnings = check_without_models(config)
        except ConfigError as fault:
            raise ConfigError(f"stage {name!r}: {fault}") from None
        checked.warnings.extend(f"stage {name}: {warning}" for warning in warnings)
    return checked


def begun_folder(config: RunConfig) -> Path | None:
    """The run folder of a stage that was begun; None of one that was not."""
    folder = Path(config.output_dir, str(config.name))
    return folder if (folder / CONFIG).exists() else None


def result_of(config: RunConfig) -> dict[str, Any] | None:
    """The summary of a stage that is finished; None of one that is not.

    Raises ConfigError for a stage that has changed since it was begun, and for a summary that cannot be read.
    """
    folder, found = Path(config.output_dir, str(config.name)), None
    if (folder / SUMMARY).exists():
        remedy = f"Remove it: the stage {config.name} writes it again."
        found = read_json(folder / SUMMARY, remedy=remedy)
    if begun_folder(config) is not None:
        _unchanged(config, folder)
    return found


def _unchanged(config: RunConfig, folder: Path) -> Prepared:
    """A stage that was begun. Raises ConfigError for what has changed since its last commit, or before the first."""
    folder, before = existing_run_folder(folder)
    refuse_foreign(folder)
    prepared = prepare(config, folder)
    refuse_changes(folder, prepared)
    if newest_step(folder) is None and compared(before) != compared(config):
        raise ConfigError(
            f"{folder} was begun with another configuration and has nothing committed yet. Remove it, or give the "
            "stage another name."
        )
    return prepared
