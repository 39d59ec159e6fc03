"""Run configuration: one YAML file, whose `type` names the algorithm.

Torch-free and fast to import. Every configuration is frozen and refuses unknown keys. Field names are TRL's where
TRL has the same setting; `bench.trl_names` lists what differs. `load_config` reads a file with overrides and reports
every fault in a sentence.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema

from rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from rlhf_tasks.config.base import RunConfig
from rlhf_tasks.config.cluster import ManualAssignments
from rlhf_tasks.config.files import MOST_PLAN_BYTES, faults_of, parse_yaml, read_yaml
from rlhf_tasks.spec import CallAssignment
from rlhf_tasks.system.reading import ConfigError, reading, shown

ASSIGNMENTS: TypeAdapter[ManualAssignments] = TypeAdapter(ManualAssignments)
MADE_PLANS = ("heuristic", "auto")
"""The values of `plan` for which the program makes the plan."""

PIPELINE = "pipeline"
"""The `type` of a file of several runs (rlhf_tasks/algorithms/pipelines.py)."""

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
    if not isinstance(kind, str) or kind not in names:
        if kind == PIPELINE:
            raise ConfigError(
                "type: a pipeline is no single run. `prefect-rlhf run pipeline` runs its stages."
            )
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
    return {call: manual.assignment(config.cluster.per_host) for call, manual in plan.items()}


def read_assignments(path: Path, devices_per_host: int) -> dict[str, CallAssignment]:
    """The assignments in a YAML file: {call: {devices or hosts, dp, tp, pp, ...}}.

    Raises ConfigError naming the file, and the call whose strategy does not fit its devices.
    """
    try:
        plan = ASSIGNMENTS.validate_python(read_yaml(path, MOST_PLAN_BYTES))
    except ValidationError as error:
        raise ConfigError(f"{path}: {faults_of(error)}") from None
    assignments = {}
    for call, manual in plan.items():
        try:
            assignments[call] = manual.assignment(devices_per_host)
        except ValueError as error:
            raise ConfigError(f"{path}: {call}: {error}") from None
    return assignments


def resolve_paths(config: RunConfig, base: Path) -> RunConfig:
    """The configuration with every relative path made absolute, because workers have other current folders."""

    def absolute(path: str, key: str) -> str:
        if "\0" in path:
            raise ConfigError(f"{key}={shown(path)} is no path: it has a null character. Leave that out.")
        with reading(path, "no path"):
            return str(base / Path(path).expanduser())

    document = config.model_dump()
    document["output_dir"] = absolute(config.output_dir, "output_dir")
    train = config.data.train
    paths = {path: absolute(path, "data.train") for path in ([train] if isinstance(train, str) else train)}
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
        evaluation["data"] = absolute(evaluation["data"], "evaluation.data")
    document["models"] = {
        role: absolute(source, f"models.{role}") if isinstance(source, str) else source
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
    code += [(f"rewards.{n}", one, "function") for n, one in enumerate(document.get("rewards", ()))]
    for place, holder, key in code:
        location, _, name = (holder.get(key) or "").rpartition(":")
        if location.endswith(".py"):
            holder[key] = f"{absolute(location, f'{place}.{key}')}:{name}"
    return type(config).model_validate(document)


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one key of a parsed document in place, and create missing mappings above it."""
    dotted, equals, text = override.partition("=")
    keys, what = dotted.strip().split("."), f"override {shown(override)}"
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
