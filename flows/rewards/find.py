"""Checks that a configured reward exists and that its parameters fit, from its source and without importing it.

A reward, and the packages around it, may do anything when they are imported. What the source does not show, such as
an import that fails, is found by `config validate --rewards` or by the rewards' process in the run.
"""

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.config.sections import RewardFunction
from rlhf_tasks.rewards.forms import Parameters, RewardError
from rlhf_tasks.rewards.user_code import secret_named
from rlhf_tasks.system.source import FUNCTIONS, module_file, names_bound

_SECRETS = ("key", "token", "password", "secret")


def check_rewards(rewards: Sequence[RewardFunction], columns: Sequence[str], is_here: bool) -> list[str]:
    """Warnings about the rewards. Raises ConfigError for the first one that cannot be found or called.

    columns  the rows' columns, without the prompt
    is_here  whether rewards run on this machine, with this process's environment
    """
    for reward in rewards:
        function = _find(reward)
        if is_here:
            _refuse_unset(reward)
        if function is not None:
            _check_parameters(reward, function, columns)
    return [warning for number, reward in enumerate(rewards) for warning in _literals(number, reward.kwargs)]


def blocks_named(rewards: Sequence[RewardFunction]) -> list[str]:
    """The Prefect Secret blocks that rewards' kwargs name."""
    named = {secret_named(value) for reward in rewards for value in reward.kwargs.values()}
    return sorted(name for kind, name in filter(None, named) if kind == "block")


def _find(reward: RewardFunction) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function's definition; None where the source does not show it, for example because it is imported."""
    place, _, name = reward.function.rpartition(":")
    try:
        path = Path(place) if place.endswith(".py") else module_file(place)
    except ModuleNotFoundError:
        raise ConfigError(
            f"reward {reward.function}: there is no module {place!r}. Install it, or name a file: "
            "path/to/file.py:function."
        ) from None
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(
            f"reward {reward.function}: {path} cannot be read ({error.strerror}). Name an existing file."
        ) from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"reward {reward.function}: {path} is not valid Python ({error}).") from None
    names = set(names_bound(tree.body))
    if name not in names and "*" not in names:
        functions = ", ".join(node.name for node in tree.body if isinstance(node, FUNCTIONS)) or "none"
        raise ConfigError(
            f"reward {reward.function}: {path} has no function {name!r} (functions there: {functions})."
        )
    defined = [node for node in tree.body if isinstance(node, FUNCTIONS) and node.name == name]
    return defined[-1] if defined and not defined[-1].decorator_list else None


def _check_parameters(
    reward: RewardFunction, function: ast.FunctionDef | ast.AsyncFunctionDef, columns: Sequence[str]
) -> None:
    """Raises ConfigError when a function's parameters match no form, or nothing supplies a required one."""
    found = function.args
    positional = [argument.arg for argument in (*found.posonlyargs, *found.args)]
    named = [argument.arg for argument in found.kwonlyargs]
    required = positional[: len(positional) - len(found.defaults)]
    required += [name for name, default in zip(named, found.kw_defaults, strict=True) if default is None]
    parameters = Parameters([*positional, *named], required, found.kwarg is not None)
    try:
        form = parameters.form(reward.function, reward.kwargs)
        parameters.refuse_missing(reward.function, form, reward.kwargs, columns)
    except RewardError as error:
        raise ConfigError(str(error)) from None


def _refuse_unset(reward: RewardFunction) -> None:
    for argument, value in reward.kwargs.items():
        named = secret_named(value)
        if named is not None and named[0] == "env" and named[1] not in os.environ:
            raise ConfigError(
                f"reward {reward.function}: its kwargs name the environment variable {named[1]!r} for {argument}, "
                "which is not set. Set it where the command or the worker runs."
            )


def _literals(number: int, kwargs: Mapping[str, object]) -> Iterator[str]:
    """A warning for each argument whose name suggests a secret and whose value is in the configuration."""
    for argument, value in kwargs.items():
        if argument.lower().endswith(_SECRETS) and isinstance(value, str):
            yield (
                f"rewards.{number}.kwargs.{argument} is given in the configuration, which runs write to disk. "
                f"If it is a secret, name it: {argument}: {{env: VARIABLE}} or {argument}: {{block: PREFECT_SECRET}}."
            )
