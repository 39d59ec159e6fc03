"""The registry of algorithms: one record each, by the name in a configuration's `type`. Torch-free.

Built-in algorithms are the folders beside this file; `presets.py` has further names of theirs, with other defaults.
Others are entry points of the group `prefect_rlhf.algorithms` in any installed package, or modules by their dotted
names, which have `ALGORITHM`. A record is imported only when it is asked for.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, NamedTuple

from pydantic import create_model

from prefect_rlhf.rlhf_tasks import algorithms
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import PolicyConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    AGENT_COLUMNS,
    AGENT_COUNTS,
    STAYS,
    TOOL_CALLS,
    from_older_versions,
    with_environment,
)
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.responses import SamplingConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.rows import DatasetValue, Reader
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import LENGTHS
from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall
from prefect_rlhf.rlhf_tasks.system.reading import (
    ConfigError,
    module_file,
    names_bound,
    names_imported,
    one_line,
    parsed,
    shown,
)

GROUP = "prefect_rlhf.algorithms"
OURS = "prefect-rlhf"
NO_ALGORITHM = "shared"  # the only folder beside this file that is none
PRESETS = "prefect_rlhf.rlhf_tasks.algorithms.presets"
FIRST = ("ppo", "grpo", "sft")  # lists and forms begin with these


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The record of an algorithm: everything that the command line, flows, planner and ranks need to know of it.

    config        its class of configurations; the default of the field `type` is the algorithm's name
    graph         a configuration -> the model function calls of one iteration
    dataset_keys  the keys that the calls take from the data set
    read_row      a row of the data -> an example, a tuple whose lists are token ids, or a list of examples. Raises
                  DataError for a bad row
    fetch         an example -> its value under each of `dataset_keys`
    functions     name of the module that has a function for each call, named as the call. Only ranks import it, so
                  it may import torch
    row_options   fields of the configuration that `read_row` takes by keyword
    stored_keys   the keys that `fetch` gives, if the configuration's `values_of` makes other keys from them
    package       name of the installed package that it comes from; the registry sets it
    """

    config: type[RunConfig]
    graph: Callable[[Any], list[ModelFunctionCall]]
    dataset_keys: tuple[str, ...]
    read_row: Reader[Any]
    fetch: Callable[[Any], Mapping[str, DatasetValue]]
    functions: str
    row_options: tuple[str, ...] = ()
    stored_keys: tuple[str, ...] = ()
    package: str = OURS

    @property
    def name(self) -> str:
        """The algorithm's name, as in a configuration's `type`."""
        return self.config.model_fields["type"].default

    def preset(self, name: str, about: str | None, **defaults: Any) -> "Algorithm":
        """The same algorithm under another name, with other defaults of some fields.

        about  the docstring of its configurations
        """
        fields: dict[str, Any] = {"type": (Literal[name], name)}
        for field, value in defaults.items():
            changed = copy(self.config.model_fields[field])
            changed.default = value
            fields[field] = (changed.annotation, changed)
        title = "".join(part.capitalize() for part in name.split("_"))
        config = create_model(f"{title}Config", __base__=self.config, __doc__=about, **fields)
        return replace(self, config=config)

    def nominal(self) -> RunConfig:
        """A configuration for drawing the graph: with every model, the smallest sizes, and defaults otherwise."""
        models: Any = self.config.model_fields["models"].annotation
        named = models.model_construct(**dict.fromkeys(models.model_fields, ""))
        sampling = SamplingConfig(max_completion_length=1)
        made = self.config.model_construct(models=named, total_iterations=1, sampling=sampling)
        return made.model_copy(update={"batch_size": made.group_size})

    def calls(self, config: RunConfig) -> list[ModelFunctionCall]:
        """The calls of a configuration.

        Raises ConfigError when one has no function, when a train call would learn from skipped samples, and for an
        environment that does not answer all that is drawn.
        """
        calls = self.graph(config)
        if isinstance(config, Scores) and config.played is not None:
            counts = [TOOL_CALLS] if config.tools else [AGENT_COUNTS] if config.agent else []
            counts += [AGENT_COLUMNS] if config.agent and config.agent.rollout else []
            lengths = [LENGTHS] if config.agent else []
            calls = with_environment(calls, config.on_reward_error == "skip", counts, lengths)
        if isinstance(config, PolicyConfig):
            calls = from_older_versions(calls, config)
        calls = in_parts(calls, config.chunks if isinstance(config, Scores) else 1)
        self._refuse_missing(calls)
        marks = {key for call in calls for key in call.outputs if call.remap.get(key, key) == STAYS}
        blind = [call.name for call in calls if call.kind == "train_step" and marks - set(call.inputs)]
        if blind:
            raise ConfigError(
                f"on_reward_error: skip is not for {_whose(self.name, self.package)}: its call {blind[0]!r} does not "
                f"read {' and '.join(sorted(marks))}, so it would learn from skipped samples. Choose stop."
            )
        return calls

    def options(self, config: RunConfig) -> dict[str, Any]:
        """What `read_row` takes besides row and tokenizer."""
        return {name: getattr(config, name) for name in self.row_options}

    def reader(self, config: RunConfig) -> Reader[Any]:
        """`read_row` with its options."""
        return partial(self.read_row, **self.options(config))

    def values(self, example: Any) -> dict[str, DatasetValue]:
        """An example's value under each key that is stored. Raises ConfigError when `fetch` leaves one out."""
        values, stored = self.fetch(example), self.stored_keys or self.dataset_keys
        missing = [key for key in stored if key not in values]
        if missing:
            raise ConfigError(
                f"{_whose(self.name, self.package)} takes the key {missing[0]!r} from the data set, but its fetch "
                "does not return it. Fix or uninstall that package."
            )
        return {key: values[key] for key in stored}

    def _refuse_missing(self, calls: Sequence[ModelFunctionCall]) -> None:
        """Raises ConfigError for a call without a function, and for one in segments with a function of its own. Reads
        only the module's source: it may import torch."""
        module = self.functions
        try:
            file = module_file(module)
        except ModuleNotFoundError:
            raise ConfigError(
                f"{_whose(self.name, self.package)} has its functions in {module}, but there is no such module. "
                "Fix or uninstall that package."
            ) from None
        if file is None:  # e.g. a compiled module: the ranks will find out
            return
        try:
            body = parsed(file.read_bytes(), str(file)).body
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as fault:
            raise ConfigError(
                f"{_whose(self.name, self.package)} has its functions in {file}, which is not valid Python "
                f"({one_line(str(fault))}). Fix or uninstall that package."
            ) from None
        bound = set(names_bound(body))
        if "*" in bound:
            return
        missing = [call.name for call in calls if call.name not in bound]
        if missing:
            raise ConfigError(
                f"{_whose(self.name, self.package)} has the call {missing[0]!r} in its graph but no function of that "
                f"name in {module}. Fix or uninstall that package."
            )
        ours = names_imported(body, "prefect_rlhf")
        own = [call for call in calls if call.segment_tokens and call.name not in ours]
        if own and self.package != OURS:
            raise ConfigError(
                f"sampling.segment_tokens={own[0].segment_tokens}: {_whose(self.name, self.package)} draws by a "
                f"function {own[0].name!r} of its own, which knows no segments. Leave it out."
            )


def in_parts(calls: Sequence[ModelFunctionCall], chunks: int) -> list[ModelFunctionCall]:
    """The calls of a graph, those cut into `chunks` parts that can be: all but train_steps and what reads these.

    A train_step takes all samples, whichever parts they come from. Raises ConfigError where a call is cut already.
    """
    if chunks == 1:
        return list(calls)
    cut = next((call for call in calls if call.chunks > 1), None)
    if cut is not None:
        raise ConfigError(
            f"chunks={chunks}: the graph cuts {cut.name!r} into {cut.chunks} parts itself. Leave chunks at 1."
        )
    made = {key: call.name for call in calls for key in call.outputs}
    whole = {call.name for call in calls if call.kind == "train_step"}
    while more := {
        call.name
        for call in calls
        if call.name not in whole and whole & {made.get(key) for key in call.inputs}
    }:
        whole |= more
    return [call if call.name in whole else call.model_copy(update={"chunks": chunks}) for call in calls]


class _EntryOf(NamedTuple):
    """The entry point of a record, and its package."""

    package: str
    entry: EntryPoint


def algorithm_names() -> list[str]:
    """The names of all algorithms, without importing any.

    Raises ConfigError for an invalid name and for two algorithms with one name.
    """
    others = sorted(_sources().keys() - set(FIRST))
    return [*FIRST, *others]


@cache
def algorithm(name: str) -> Algorithm:
    """The record of an algorithm.

    Raises ConfigError naming the package when its record cannot be imported or is not valid. For an unknown name the
    error lists the algorithms.
    """
    if "." in name:
        package, entry = name, EntryPoint(name, f"{name}:ALGORITHM", GROUP)
    elif name in _sources():
        package, entry = _sources()[name]
    else:
        raise ConfigError(
            f"there is no algorithm {shown(name)}; registered are {', '.join(algorithm_names())}."
        )
    if package == OURS:
        return entry.load()
    try:
        record = entry.load()
    except Exception as fault:
        raise ConfigError(
            f"{_whose(name, package)} ({entry.value}) cannot be imported: {type(fault).__name__}: "
            f"{one_line(str(fault))}. Fix or uninstall that package."
        ) from fault
    return _checked(record, name, package, entry.value)


def _checked(record: Any, name: str, package: str, value: str) -> Algorithm:
    """The record that another package has registered, with `package` set. Raises ConfigError if it is not valid."""
    whose, remedy = _whose(name, package), "Fix or uninstall that package."
    if not isinstance(record, Algorithm):
        raise ConfigError(
            f"{whose} ({value}) is not an Algorithm but of type {type(record).__name__}. {remedy}"
        )
    if not (isinstance(record.config, type) and issubclass(record.config, RunConfig)):
        raise ConfigError(
            f"{whose} has a configuration that is not a RunConfig: {shown(record.config)}. {remedy}"
        )
    for field in ("type", "models"):
        if field not in record.config.model_fields:
            raise ConfigError(f"{whose} has a configuration without the field {field!r}. {remedy}")
    if record.name != name:
        raise ConfigError(
            f"{whose} has configurations of type {shown(record.name)}: its entry point must have that name. {remedy}"
        )
    return replace(record, package=package)


@cache
def _sources() -> dict[str, _EntryOf]:
    """Name -> source of its record, built-in ones first. Raises ConfigError as `algorithm_names` does."""
    sources: dict[str, _EntryOf] = {}
    for name, source in _registered():
        if not name.isidentifier():
            raise ConfigError(
                f"the package {source.package} registers an algorithm called {shown(name)}. A name has letters, "
                "digits and underscores only: rename it or uninstall that package."
            )
        if name in sources:
            raise ConfigError(
                f"the packages {sources[name].package} and {source.package} both have an algorithm called {name!r}. "
                "Rename one or uninstall its package."
            )
        sources[name] = source
    return sources


def _registered() -> Iterator[tuple[str, _EntryOf]]:
    folders = [
        m.name for m in pkgutil.iter_modules(algorithms.__path__) if m.ispkg and m.name != NO_ALGORITHM
    ]
    places = {name: f"{algorithms.__name__}.{name}:ALGORITHM" for name in folders}
    file = module_file(PRESETS)
    assert file is not None, "presets are read from their source"
    named = names_bound(parsed(file.read_bytes()).body)
    places |= {name: f"{PRESETS}:{name}" for name in named if name.islower()}  # GRPO is what they are made of
    for name, place in places.items():
        yield name, _EntryOf(OURS, EntryPoint(name, place, GROUP))
    for entry in entry_points(group=GROUP):
        yield entry.name, _EntryOf("(unknown)" if entry.dist is None else entry.dist.name, entry)


def _whose(name: str, package: str) -> str:
    return f"the algorithm {name!r} of the package {package}"
