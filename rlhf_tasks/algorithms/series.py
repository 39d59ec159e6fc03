"""A series: one training that recurs on the rows that are new, and an evaluation that decides whose model is used.

Each run of a series is a pipeline: `train`, then `candidate`, the evaluation of the new model, and `champion`, that
of the model that is used so far. Torch-free.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    ConfigError,
    PipelineConfig,
    RunConfig,
    apply_override,
    make_config,
    make_pipeline,
    resolve_paths,
    stages_of,
    with_file,
)
from prefect_rlhf.rlhf_tasks.config.cluster import ClusterConfig
from prefect_rlhf.rlhf_tasks.config.files import faults_of, read_yaml
from prefect_rlhf.rlhf_tasks.config.settings import MOST_SECONDS, Settings
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig

SERIES = "series"
"""The `type` of a file with a series."""
TRAIN, CANDIDATE, CHAMPION = "train", "candidate", "champion"  # stages of a run
_OF_THE_SERIES = ("name", "output_dir", "cluster", "resume")
_FOREIGN = {"training": _OF_THE_SERIES, "evaluation": (*_OF_THE_SERIES, "models")}
"""Keys that the series states itself, in training and evaluation."""


class SeriesConfig(Settings):
    """A training that recurs on the rows that are new; its model is promoted where it is better."""

    type: Literal["series"] = "series"
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=200,
        description="Name of the folder with the series' runs and champion.",
    )
    output_dir: str = Field(default="runs", description="Folder of that folder; all hosts must share it.")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Where the ranks run.")
    training: dict[str, Any] = Field(
        description="Configuration of a run that trains. The first run begins with its models.actor, each later one "
        "with the champion; data.train may grow between them.",
    )
    evaluation: dict[str, Any] = Field(
        description="Configuration of the evaluation (type: evaluate) on held-out rows, without models.",
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        description="A new model is promoted where the confidence interval of its mean score, less the champion's, "
        "lies above this.",
    )
    confidence: float = Field(default=0.95, ge=0.5, le=0.9999, description="Confidence of that interval.")
    approval: Literal["none", "required"] = Field(
        default="none",
        description="required: a person promotes or rejects a better model, by a form in Prefect.",
    )
    approval_timeout_s: int = Field(
        default=86400,
        gt=0,
        le=int(MOST_SECONDS),
        description="Seconds to wait for that person; then the champion is kept.",
    )


def load_series(path: str | Path, overrides: Sequence[str] = ()) -> SeriesConfig:
    """Read a series' configuration from YAML.

    `file` in training and evaluation names a file with the rest of it, as in a stage of a pipeline; keys that belong
    to the series are left out of it. overrides: `key.sub=value`. Raises ConfigError.
    """
    document = read_yaml(Path(path))
    for part, foreign in _FOREIGN.items():
        if isinstance(stated := document.get(part), Mapping):
            whole = with_file(stated, Path(path).parent)
            document[part] = {key: whole[key] for key in whole if key in stated or key not in foreign}
    for change in overrides:
        apply_override(document, change)
    return make_series(document)


def make_series(document: Mapping[str, Any]) -> SeriesConfig:
    """Validate a parsed configuration. Raises ConfigError with a sentence for each fault."""
    try:
        return SeriesConfig.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(faults_of(error, SeriesConfig)) from None


def series_folder(series: SeriesConfig, base: Path | None = None) -> Path:
    """The folder of a series: its runs, by number, and `models/champion`."""
    return (base or Path.cwd()) / Path(series.output_dir).expanduser() / series.name


def training_of(series: SeriesConfig) -> RunConfig:
    """The training as it stands in the file, with absolute paths. Raises ConfigError."""
    _refuse_foreign_keys(series)
    try:
        config = resolve_paths(make_config({**series.training, "cluster": series.cluster}), Path.cwd())
    except ConfigError as fault:
        raise ConfigError(f"training: {fault}") from None
    if not isinstance(config, TrainingConfig) or "actor" not in config.roles():
        raise ConfigError(
            f"training: a run of type {config.type!r} trains no language model. Name one that does, such as sft."
        )
    return config


def stages_of_run(
    series: SeriesConfig,
    number: str,
    rows: str | dict[str, float],
    champion: Path | None,
    held_out: Sequence[str] = (),
) -> tuple[PipelineConfig, dict[str, RunConfig]]:
    """A run of a series as a pipeline, and its stages.

    number    of the run: its folder's name
    rows      the files of its rows, as `data.train` has them
    champion  the folder of the model to compare with; None: there is none yet
    held_out  the files of the rows that all models answer; default: those of the evaluation
    Raises ConfigError.
    """
    training_of(series)
    train = {**series.training, "name": TRAIN, "data": {**series.training["data"], "train": rows}}
    if champion is not None:
        train["models"] = {**series.training["models"], "actor": str(champion)}
    judged = {CANDIDATE: f"stage:{TRAIN}"} | ({} if champion is None else {CHAMPION: str(champion)})
    evaluation = dict(series.evaluation)
    if held_out:
        evaluation["data"] = {**evaluation["data"], "train": list(held_out)}
    scores = [{**evaluation, "name": name, "models": {"actor": model}} for name, model in judged.items()]
    pipeline = make_pipeline(
        {
            "name": number,
            "output_dir": str(series_folder(series)),
            "cluster": series.cluster.model_dump(),
            "stages": [train, *scores],
        }
    )
    stages = stages_of(pipeline)
    if stages[CANDIDATE].type != "evaluate":
        raise ConfigError(
            f"evaluation: its type is {stages[CANDIDATE].type!r}, and a series compares scores. Give type: evaluate."
        )
    return pipeline, stages


def _refuse_foreign_keys(series: SeriesConfig) -> None:
    for part, document in (("training", series.training), ("evaluation", series.evaluation)):
        foreign = [key for key in _FOREIGN[part] if key in document]
        if foreign:
            whose = "are those that are compared" if foreign[0] == "models" else "belongs to the series"
            raise ConfigError(f"{part}: {foreign[0]} {whose}. Leave it out.")
