"""Pipelines: several runs in one file, in which a stage takes the models that earlier ones have trained. Torch-free.

A stage is a run's configuration, with a name. It names the model of an earlier stage as `stage:NAME`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from rlhf_tasks.algorithms.configurations import PIPELINE, apply_override, make_config, resolve_paths
from rlhf_tasks.config.base import RunConfig, TrainingConfig
from rlhf_tasks.config.cluster import ClusterConfig
from rlhf_tasks.config.files import faults_of, read_yaml
from rlhf_tasks.config.settings import Settings
from rlhf_tasks.system.reading import ConfigError, shown

STAGE = "stage:"
MODEL = "model"  # in a stage's run folder
_OF_THE_PIPELINE = ("cluster", "output_dir", "resume")


class PipelineConfig(Settings):
    """Runs one after another, from one file."""

    type: Literal["pipeline"] = "pipeline"
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=200,
        description="Name of the folder with the stages' run folders. The same name again continues there.",
    )
    output_dir: str = Field(default="runs", description="Folder of that folder; all hosts must share it.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the stages that give none.")
    cluster: ClusterConfig = Field(
        default=ClusterConfig(), description="Where the ranks of all stages run; started once."
    )
    stages: tuple[dict[str, Any], ...] = Field(
        min_length=1,
        description="Configurations of runs, in order, each with a name; models may be `stage:NAME`.",
    )


def load_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a pipeline's configuration from YAML.

    A stage with the key `file` begins with the run's configuration in that file, whose path is relative to the
    pipeline's file. The stage's other keys take the place of the file's; cluster, output_dir and resume of the file
    are left out.

    overrides  `key.sub=value`, as of a run; `stages.0.total_iterations=3` changes the first stage
    Raises ConfigError.
    """
    document = read_yaml(Path(path))
    stages = document.get("stages")
    if isinstance(stages, list):
        document["stages"] = [_with_file(stage, Path(path).parent) for stage in stages]
    for change in overrides:
        apply_override(document, change)
    return make_pipeline(document)


def make_pipeline(document: Mapping[str, Any]) -> PipelineConfig:
    """Validate a parsed configuration. Raises ConfigError with a sentence for each fault."""
    try:
        return PipelineConfig.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(faults_of(error, PipelineConfig)) from None


def is_pipeline(path: Path) -> bool:
    """Whether a file has a pipeline's configuration. Raises ConfigError for one that is no YAML mapping."""
    return read_yaml(path).get("type") == PIPELINE


def stages_of(pipeline: PipelineConfig, base: Path | None = None) -> dict[str, RunConfig]:
    """Name -> configuration of each stage, in order, with absolute paths. The stages' runs lie in `folder_of`.

    base  the folder that relative paths refer to; default: the current one
    Raises ConfigError, naming the stage, for two of one name, a model of a later or unknown stage or of one that
    exports none that fits, keys that belong to the pipeline, and every fault of a stage's configuration.
    """
    base = base or Path.cwd()
    folder, found = folder_of(pipeline, base), dict[str, RunConfig]()
    names = list(_names(pipeline.stages))
    for name, document in zip(names, pipeline.stages, strict=True):
        foreign = [key for key in _OF_THE_PIPELINE if key in document]
        if foreign:
            raise ConfigError(
                f"stage {name!r}: {foreign[0]} belongs to the pipeline, which has one for all stages. Move it there."
            )
        settled = {
            "seed": pipeline.seed,
            **document,
            "models": _settled(document.get("models"), name, names, found, folder),
            "output_dir": str(folder),
            "cluster": pipeline.cluster.model_dump(),
        }
        try:
            found[name] = resolve_paths(make_config(settled), base)
        except ConfigError as fault:
            raise ConfigError(f"stage {name!r}: {fault}") from None
        _refuse_no_scores(name, found, folder)
    return found


def folder_of(pipeline: PipelineConfig, base: Path | None = None) -> Path:
    """The folder of a pipeline's results: summary.json, and a run folder for each stage, named by it."""
    return (base or Path.cwd()) / Path(pipeline.output_dir).expanduser() / pipeline.name


def _with_file(stage: Any, folder: Path) -> Any:
    if not isinstance(stage, Mapping) or "file" not in stage:
        return stage
    if not isinstance(stage["file"], str):
        raise ConfigError(f"stages: file must be a path, found {shown(stage['file'])}.")
    of_file = {k: v for k, v in read_yaml(folder / stage["file"]).items() if k not in _OF_THE_PIPELINE}
    return of_file | {key: value for key, value in stage.items() if key != "file"}


def _names(stages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    seen: list[str] = []
    for place, document in enumerate(stages):
        name = document.get("name")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"stages.{place} has no name. Give each stage one: its results stand under it.")
        if name in seen:
            raise ConfigError(f"two stages have the name {name!r}. Rename one of them.")
        seen.append(name)
        yield name


def _settled(
    models: Any, name: str, names: Sequence[str], earlier: Mapping[str, RunConfig], folder: Path
) -> Any:
    """A stage's models, with the folder of each that an earlier stage trains."""
    if not isinstance(models, Mapping):
        return models
    return {
        role: str(folder / _trained(source.removeprefix(STAGE), name, names, earlier) / MODEL)
        if isinstance(source, str) and source.startswith(STAGE)
        else source
        for role, source in models.items()
    }


def _trained(taken: str, name: str, names: Sequence[str], earlier: Mapping[str, RunConfig]) -> str:
    """The name of a stage whose model another one takes. Raises ConfigError where there is no such model before."""
    if taken not in names:
        raise ConfigError(
            f"stage {name!r} takes the model of {taken!r}, but the stages are {', '.join(names)}. Name one of them."
        )
    if taken not in earlier:
        which = "itself" if taken == name else f"{taken!r}, which comes after it"
        raise ConfigError(f"stage {name!r} takes the model of {which}. A stage takes those of earlier ones.")
    if not isinstance(earlier[taken], TrainingConfig):
        raise ConfigError(
            f"stage {name!r} takes the model of {taken!r}, but a run of type {earlier[taken].type!r} trains none. "
            "Name a stage that trains."
        )
    return taken


def _refuse_no_scores(name: str, found: Mapping[str, RunConfig], folder: Path) -> None:
    """Raises ConfigError where a stage has scores from the model of an earlier one that trains a language model."""
    heads = {str(folder / taken / MODEL): (taken, _exported_head(config)) for taken, config in found.items()}
    for role, parts in found[name].roles().items():
        taken, head = heads.get(parts.folder, (name, parts.head))
        if parts.head == "scalar" and head == "lm" and parts.optimizer is None:
            raise ConfigError(
                f"stage {name!r} takes models.{role} from {taken!r}, whose model gives no scores. Name a stage of "
                "type reward_model."
            )


def _exported_head(config: RunConfig) -> str:
    """The head of the model that a run exports: the actor's, or that of the first role that trains."""
    roles = config.roles()
    trained = [role for role, parts in roles.items() if parts.optimizer is not None]
    return "" if not trained else roles["actor" if "actor" in trained else trained[0]].head
