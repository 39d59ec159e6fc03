"""Run configuration: one YAML file, whose `type` names the algorithm.

Torch-free and fast to import. Every configuration is frozen and refuses unknown keys. Field names are TRL's where
TRL has the same setting; `bench.trl_names` lists what differs. `load_config` reads a file with overrides and reports
every fault in a sentence.

A pipeline is several runs in one file. A stage of it is a run's configuration with a name, and names the model of an
earlier stage as `stage:NAME`.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema

from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.cluster import ByHand, ClusterConfig, ManualAssignments
from prefect_rlhf.rlhf_tasks.config.files import MOST_PLAN_BYTES, faults_of, parse_yaml, read_yaml
from prefect_rlhf.rlhf_tasks.config.functions import is_pickled
from prefect_rlhf.rlhf_tasks.config.hub_names import HubName, hub_data, hub_model, is_address
from prefect_rlhf.rlhf_tasks.config.responses import ROLLOUT
from prefect_rlhf.rlhf_tasks.config.row_objects import Rows
from prefect_rlhf.rlhf_tasks.config.settings import Settings
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.spec import CallAssignment
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, one_line, reading, shown

ASSIGNMENTS: TypeAdapter[ManualAssignments] = TypeAdapter(ManualAssignments)
SEARCHED = ("auto", "adaptive")
"""The values of `plan` for which the plan is searched."""

MADE_PLANS = ("heuristic", *SEARCHED)
"""The values of `plan` for which the program makes the plan."""

_NAMED_BY_USERS = re.compile(r"(.*\.)?(data\.(train|column_map)|planning\.device)\.")
"""The mappings whose keys are a user's names: files, columns and devices may have dots."""

PIPELINE = "pipeline"
"""The `type` of a file of several runs."""

FIGURES = (".yaml", ".yml")
"""The suffixes that mark a `device` as a file of figures; without them it is the name of a preset."""


class OfAnyAlgorithm:
    """Annotation of a `RunConfig` in a schema: its `type` selects the class of a registered algorithm."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        union = reduce(or_, (algorithm(name).config for name in algorithm_names()))
        return handler.generate_schema(Annotated[union, Field(discriminator="type")])


def load_config(path: str | Path, overrides: Sequence[str] = (), base: Path | None = None) -> RunConfig:
    """Read a run configuration from YAML, apply overrides and make its relative paths absolute.

    overrides  `key.sub=value` with a YAML value; a number is an index into a list: `rewards.0.weight=2`
    base       the folder that relative paths refer to; None: the current folder
    Raises ConfigError for a missing or malformed file and for every fault in a field.
    """
    document = read_yaml(Path(path))
    for change in overrides:
        apply_override(document, change)
    return resolve_paths(make_config(document), base or Path.cwd())


def make_config(document: Mapping[str, Any]) -> RunConfig:
    """Validate a parsed configuration. Raises ConfigError with a sentence for each fault."""
    kind = document.get("type")
    names = algorithm_names()
    if not isinstance(kind, str) or (kind not in names and "." not in kind):
        if kind == PIPELINE:
            raise ConfigError(
                "type: a pipeline is no single run. `prefect-rlhf run pipeline` runs its stages."
            )
        if kind == "series":
            raise ConfigError("type: a series is no single run. `prefect-rlhf run series` runs its next one.")
        if isinstance(kind, str) and (written := kind.replace("-", "_")) in names:
            raise ConfigError(f"type: {shown(kind)} is written {written!r} in a file.")
        raise ConfigError(f"type: must be one of {', '.join(names)}, found {shown(kind)}.")
    model = algorithm(kind).config
    try:
        return model.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(faults_of(error, model)) from None


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration with overrides applied, as in `load_config`. Raises ConfigError for a fault in a field."""
    document = config.model_dump(mode="json")
    for change in overrides:
        apply_override(document, change)
    return make_config(document)


def manual_assignments(config: RunConfig) -> dict[str, CallAssignment] | None:
    """The plan given by hand, inline or in the YAML file that `plan` names; None: the program makes it.

    Raises ConfigError when the file is missing or malformed.
    """
    plan = config.plan
    if isinstance(plan, str):
        return None if plan in MADE_PLANS else read_assignments(Path(plan), config.cluster.per_host)
    return {call: ByHand.parse(text).assignment(config.cluster.per_host) for call, text in plan.items()}


def read_assignments(path: Path, devices_per_host: int) -> dict[str, CallAssignment]:
    """The assignments in a YAML file: {call: placement}.

    Raises ConfigError naming the file, and the call whose strategy does not fit its devices.
    """
    try:
        plan = ASSIGNMENTS.validate_python(read_yaml(path, MOST_PLAN_BYTES))
    except ValidationError as error:
        raise ConfigError(f"{path}: {faults_of(error)}") from None
    assignments = {}
    for call, text in plan.items():
        try:
            assignments[call] = ByHand.parse(text).assignment(devices_per_host)
        except ValueError as error:
            raise ConfigError(f"{path}: {call}: {one_line(str(error), most=2000)}") from None
    return assignments


_CODE = re.compile(rf"({ROLLOUT})?(.+\.py)((?(1):\w+))", re.DOTALL)
"""A word of an agent's command that names a file of Python, or a rollout_func in one."""


def resolve_paths(config: RunConfig, base: Path) -> RunConfig:
    """The configuration with every relative path made absolute, because workers have other current folders. A name on
    the Hugging Face Hub stays as it is where there is no such path."""

    def absolute(path: str, key: str, named: Callable[[str], HubName | None] | None = None) -> str:
        """named: what of a Hub a text names, unless there is such a path"""
        if isinstance(path, Rows) or (named is not None and is_address(path)):
            return path  # who reads an address that names nothing refuses it as it was written
        if "\0" in path:
            raise ConfigError(f"{key}={shown(path)} is no path: it has a null character. Leave that out.")
        with reading(path, "no path"):
            there = base / Path(path).expanduser()
            is_name = named is not None and named(path) is not None
            return path if is_name and not there.exists() else str(there)

    document = config.model_dump()
    document["output_dir"] = absolute(config.output_dir, "output_dir")
    train = config.data.train
    paths = {
        path: absolute(path, "data.train", hub_data)
        for path in ([train] if isinstance(train, str) else train)
    }
    if isinstance(train, dict) and len({*paths.values()}) < len(paths):
        twice = next(path for path in paths.values() if [*paths.values()].count(path) > 1)
        raise ConfigError(f"data.train names {twice} twice. Give it one weight.")
    document["data"]["train"] = (
        {paths[path]: weight for path, weight in train.items()}
        if isinstance(train, dict)
        else paths[train]
        if isinstance(train, str)
        else tuple(paths[path] for path in train)
    )
    evaluation = document.get("evaluation")
    if evaluation is not None:
        evaluation["data"] = absolute(evaluation["data"], "evaluation.data", hub_data)
    document["models"] = {
        role: absolute(source, f"models.{role}", hub_model) if isinstance(source, str) else source
        for role, source in document["models"].items()
    }

    def figures(device: str) -> str:
        return absolute(device, "planning.device") if device.endswith(FIGURES) else device

    device = config.planning.device
    if device is not None:
        document["planning"]["device"] = (
            figures(device) if isinstance(device, str) else {figures(one): n for one, n in device.items()}
        )
    if config.resume not in ("never", "auto"):
        document["resume"] = absolute(config.resume, "resume")
    if isinstance(config.plan, str) and config.plan not in MADE_PLANS:
        document["plan"] = absolute(config.plan, "plan")
    code = [("environment", document.get("environment") or {}, "factory")]
    code += [(f"tools.{n}", one, "function") for n, one in enumerate(document.get("tools", ()))]
    code += [(f"rewards.{n}", one, "function") for n, one in enumerate(document.get("rewards", ()))]
    for place, holder, key in code:
        location, _, name = (holder.get(key) or "").rpartition(":")
        kind, colon, file = location.rpartition(":")  # such as skyrl:file.py:Class
        if file.endswith(".py"):
            holder[key] = f"{kind}{colon}{absolute(file, f'{place}.{key}')}:{name}"
    agent = document.get("agent")
    if agent is not None and not is_pickled(agent["command"]):
        words = [_CODE.fullmatch(word) or word for word in shlex.split(agent["command"])]
        agent["command"] = shlex.join(
            word
            if isinstance(word, str)
            else f"{word[1] or ''}{absolute(word[2], 'agent.command')}{word[3] or ''}"
            for word in words
        )
    return type(config).model_validate(document)


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one key of a parsed document in place, and create missing mappings above it."""
    dotted, equals, text = override.partition("=")
    dotted, what = dotted.strip(), f"override {shown(override)}"
    names = _NAMED_BY_USERS.match(dotted)
    keys = [*dotted[: names.end() - 1].split("."), dotted[names.end() :]] if names else dotted.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{what} is not of the form key.sub=value.")
    with reading(what, "not valid YAML") as place:
        value = parse_yaml(text, place)
    target: Any = document
    for position, key in enumerate(keys):
        where = ".".join(keys[:position])
        place: Any = int(key) if isinstance(target, list) and key.isdecimal() else key
        if isinstance(target, list) and (place == key or place >= len(target)):
            raise ConfigError(f"{what}: {where} has no item {key!r}.")
        if not isinstance(target, dict | list):
            raise ConfigError(f"{what}: {where} is a value, not a mapping.")
        if position == len(keys) - 1:
            target[place] = value
        elif isinstance(target, dict) and target.get(place) is None:
            target[place] = {}
        target = target[place]


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
        document["stages"] = [with_file(stage, Path(path).parent) for stage in stages]
    for change in overrides:
        apply_override(document, change)
    return make_pipeline(document)


def make_pipeline(document: Mapping[str, Any]) -> PipelineConfig:
    """Validate a parsed configuration. Raises ConfigError with a sentence for each fault."""
    try:
        return PipelineConfig.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(faults_of(error, PipelineConfig)) from None


def type_of(path: Path) -> Any:
    """The `type` in a file. Raises ConfigError for one that is no YAML mapping."""
    return read_yaml(path).get("type")


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


def with_file(stage: Any, folder: Path) -> Any:
    """A stage's document, with the keys of the file that it names. Raises ConfigError.

    folder  to which the file's path is relative
    """
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
