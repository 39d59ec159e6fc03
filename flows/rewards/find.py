"""Checks that a configured reward exists and that its parameters fit, from its source and without importing it.

A reward, and the packages around it, may do anything when they are imported. What the source does not show, such as
an import that fails, is found by `config validate --rewards` or by the rewards' process in the run.
"""

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.config.base import Judges, RunConfig, Scores
from rlhf_tasks.config.rewards import EnvironmentConfig, RewardConfig
from rlhf_tasks.system.reading import FUNCTIONS, module_file, names_bound, parsed
from rlhf_tasks.user_code import builtin_environments, builtin_rewards
from rlhf_tasks.user_code.child import secret_named
from rlhf_tasks.user_code.errors import RewardError
from rlhf_tasks.user_code.forms import BUILTIN, Parameters

_SECRETS = (
    "key",
    "token",
    "password",
    "passwd",
    "pwd",
    "secret",
    "auth",
    "authorization",
    "bearer",
    "credentials",
)
"""Ends of names of arguments whose literal values are warned of. Where a value goes does not depend on its name."""


def check_rewards(rewards: Sequence[RewardConfig], columns: Sequence[str], is_here: bool) -> None:
    """Raises ConfigError for the first reward that cannot be found or called.

    columns  the rows' columns, without the prompt
    is_here  whether rewards run on this machine, with this process's environment
    """
    for reward in rewards:
        if is_here:
            _refuse_unset(f"reward {reward.location}", reward.arguments)
        if reward.function is None:
            continue
        if reward.function.startswith(f"{BUILTIN}:"):
            _try_builtin(reward, columns)
            continue
        function = _find(reward)
        if function is not None:
            _check_parameters(reward, function, columns)


def literal_secrets(config: RunConfig) -> list[str]:
    """Warnings about arguments of rewards that are secrets by their names and stand in the configuration itself."""
    rewards = config.rewards if isinstance(config, Judges) else ()
    return [
        warning
        for number, reward in enumerate(rewards)
        for warning in _literals(
            f"rewards.{number}.{'kwargs' if reward.url is None else 'headers'}", reward.arguments
        )
    ]


def check_environment(environment: EnvironmentConfig, is_here: bool) -> list[str]:
    """Warnings about an environment. Raises ConfigError for one that its source shows not to be there, or a class of
    it without the methods `reset` and `step`. is_here: as in `check_rewards`"""
    if is_here:
        _refuse_unset(f"environment {environment.factory}", environment.kwargs)
    _refuse_unfit(environment)
    return list(_literals("environment.kwargs", environment.kwargs))


def _refuse_unfit(environment: EnvironmentConfig) -> None:
    place, _, name = environment.factory.rpartition(":")
    if place == BUILTIN:
        if name not in builtin_environments.__all__:
            raise ConfigError(
                f"environment {environment.factory}: there is none of that name. Built in are "
                f"{', '.join(builtin_environments.__all__)}."
            )
        return
    found = _read(f"environment {environment.factory}", place)
    if found is None:
        return
    path, tree = found
    names = set(names_bound(tree.body))
    if name not in names and "*" not in names:
        raise ConfigError(
            f"environment {environment.factory}: {path} has no {name!r}. Name a class or a function."
        )
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if not classes or classes[-1].bases or classes[-1].decorator_list:
        return  # what it inherits is not known here
    methods = set(names_bound(classes[-1].body))
    for method in ("reset", "step"):
        if method not in methods:
            raise ConfigError(
                f"environment {environment.factory}: {name} has no method {method!r}. Give it reset(row, seed) and "
                "step(text)."
            )


def blocks_named(config: RunConfig) -> list[str]:
    """The Prefect Secret blocks that the arguments of a run's rewards and environment name."""
    environment = config.environment if isinstance(config, Scores) else None
    rewards = config.rewards if isinstance(config, Judges) else ()
    users = (*rewards, *([environment] if environment else []))
    named = {secret_named(value) for each in users for value in each.arguments.values()}
    return sorted(name for kind, name in filter(None, named) if kind == "block")


def _find(reward: RewardConfig) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function's definition; None where the source does not show it, for example because it is imported."""
    place, _, name = reward.location.rpartition(":")
    found = _read(f"reward {reward.location}", place)
    if found is None:
        return None
    path, tree = found
    names = set(names_bound(tree.body))
    if name not in names and "*" not in names:
        functions = ", ".join(node.name for node in tree.body if isinstance(node, FUNCTIONS)) or "none"
        raise ConfigError(
            f"reward {reward.location}: {path} has no function {name!r} (functions there: {functions})."
        )
    defined = [node for node in tree.body if isinstance(node, FUNCTIONS) and node.name == name]
    return defined[-1] if defined and not defined[-1].decorator_list else None


def _read(what: str, place: str) -> tuple[Path, ast.Module] | None:
    """The source of a module or file and its syntax tree; None where a module has none. Raises ConfigError."""
    try:
        path = Path(place) if place.endswith(".py") else module_file(place)
    except ModuleNotFoundError:
        raise ConfigError(
            f"{what}: there is no module {place!r}. Install it, or name a file: path/to/file.py:function."
        ) from None
    if path is None:
        return None
    try:
        return path, parsed(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(
            f"{what}: {path} cannot be read ({error.strerror}). Name an existing file."
        ) from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{what}: {path} is not valid Python ({error}).") from None


def _try_builtin(reward: RewardConfig, columns: Sequence[str]) -> None:
    """Raises ConfigError where a built-in reward does not exist, or refuses its arguments or the rows' columns."""
    name = reward.name
    function = getattr(builtin_rewards, name) if name in builtin_rewards.__all__ else None
    if function is None:
        raise ConfigError(
            f"reward {reward.location}: there is none of that name. Built in are "
            f"{', '.join(builtin_rewards.__all__)}."
        )
    try:
        names = [
            each for each in Parameters.of(function).names if each not in ("completions", "completion_ids")
        ]
        Parameters(names, (), takes_any=False).refuse_unknown(reward.location, reward.kwargs)
        nothing = {name: [] for name in columns}
        function(**{**nothing, "completions": [], "completion_ids": [], **reward.kwargs})
    except RewardError as error:
        raise ConfigError(str(error)) from None


def _check_parameters(
    reward: RewardConfig, function: ast.FunctionDef | ast.AsyncFunctionDef, columns: Sequence[str]
) -> None:
    """Raises ConfigError when a function's parameters match no form, or nothing supplies a required one."""
    found = function.args
    positional = [argument.arg for argument in (*found.posonlyargs, *found.args)]
    named = [argument.arg for argument in found.kwonlyargs]
    required = positional[: len(positional) - len(found.defaults)]
    required += [name for name, default in zip(named, found.kw_defaults, strict=True) if default is None]
    parameters = Parameters([*positional, *named], required, found.kwarg is not None)
    try:
        form = parameters.form(reward.location, reward.kwargs)
        parameters.refuse_missing(reward.location, form, reward.kwargs, columns)
    except RewardError as error:
        raise ConfigError(str(error)) from None


def _refuse_unset(who: str, arguments: Mapping[str, Any]) -> None:
    for argument, value in arguments.items():
        named = secret_named(value)
        if named is not None and named[0] == "env" and named[1] not in os.environ:
            raise ConfigError(
                f"{who}: its arguments name the environment variable {named[1]!r} for {argument}, which is not set. "
                "Set it where the command or the worker runs."
            )


def _literals(key: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """A warning for each argument whose name suggests a secret and whose value is in the configuration."""
    for argument, value in arguments.items():
        if argument.lower().endswith(_SECRETS) and isinstance(value, str):
            yield (
                f"{key}.{argument} is given in the configuration, which runs write to disk. If it is a secret, name "
                f"it: {argument}: {{env: VARIABLE}} or {argument}: {{block: PREFECT_SECRET}}."
            )
