"""A user's rewards and environment before a run: looked up in their source, given secrets, called once on request.

A reward, and the packages around it, may do anything when they are imported, so they are looked up without importing
them. What the source does not show, such as an import that fails, is found by `config validate --rewards` or by the
rewards' process in the run. How a rank calls them is in rlhf_tasks/user_code.
"""

import ast
import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.algorithms.examples import first_example
from prefect_rlhf.rlhf_tasks.config.base import Judges, RunConfig
from prefect_rlhf.rlhf_tasks.config.functions import PickledFunction, is_pickled
from prefect_rlhf.rlhf_tasks.config.packages import refusal
from prefect_rlhf.rlhf_tasks.config.responses import (
    ROLLOUT,
    AgentConfig,
    EnvironmentConfig,
    RewardConfig,
    ToolConfig,
)
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.rows import prompt_example
from prefect_rlhf.rlhf_tasks.data.tokenizer import Observations, Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import own_or_base
from prefect_rlhf.rlhf_tasks.system.reading import FUNCTIONS, module_file, names_bound, parsed
from prefect_rlhf.rlhf_tasks.user_code import builtin_environments, builtin_rewards
from prefect_rlhf.rlhf_tasks.user_code.child import secret_named
from prefect_rlhf.rlhf_tasks.user_code.environments import EnvironmentProcess, observed
from prefect_rlhf.rlhf_tasks.user_code.episodes import Answer, Episode, shown
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.forms import BUILTIN, Answers, Parameters, total
from prefect_rlhf.rlhf_tasks.user_code.llm_judge import judge
from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess
from prefect_rlhf.rlhf_tasks.user_code.sandbox import refuse_sandbox

_PYTHON = re.compile(r"python[\d.]*")
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
"""An argument whose name ends so, and has a literal value, causes a warning. Its name has no other effect."""
INSTEAD = "or name an environment variable: {env: VARIABLE}"
COMPLETION_TOKENS = 16


def check_rewards(
    rewards: Sequence[RewardConfig],
    columns: Sequence[str],
    is_here: bool,
    folder: Path | None = None,
    agent: AgentConfig | None = None,
) -> None:
    """Raises ConfigError for the first reward that cannot be found or called.

    columns  the rows' columns, without the prompt
    agent    of the run: what a rollout_func returns for rewards is not known before
    is_here  whether rewards run on this machine, with this process's environment
    folder   of a run that has begun
    """
    are_all = agent is None or agent.rollout is None
    for reward in rewards:
        if is_here:
            _refuse_unset(f"reward {reward.location}", reward.arguments)
        lacks = next((column for column in reward.only if column not in columns), None)
        if lacks is not None:
            raise ConfigError(
                f"reward {reward.location}: it judges rows by their column {lacks!r}, which the rows lack "
                f"({', '.join(columns) or 'they have no further ones'})."
            )
        if reward.function is None:
            continue
        if reward.function.startswith(f"{BUILTIN}:"):
            _try_builtin(reward, columns)
            continue
        if isinstance(reward.function, PickledFunction):
            if (parameters := Parameters.inspected(reward.function.function)) is not None:
                _check_parameters(reward, parameters, columns, are_all)
            continue
        if is_pickled(reward.location):
            _refuse_lost_code(reward, folder)
            continue
        function = _find(reward)
        if function is not None:
            _check_parameters(reward, _parameters_of(function), columns, are_all)


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
    if environment.kind is None:
        _refuse_unfit(environment)
    elif is_here and (reason := refusal(environment.kind)):
        raise ConfigError(f"environment {environment.factory}: {reason}")
    return list(_literals("environment.kwargs", environment.kwargs))


def check_agent(agent: AgentConfig) -> None:
    """Raises ConfigError for an agent whose program, or the file that its Python runs, is not there; for a
    rollout_func that its source shows not to be there, or not to take prompts and a trainer."""
    if agent.rollout is not None:
        _check_rollout(agent.rollout)
        return
    program = agent.words[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"agent.command: there is no program {program!r} here. Install it, or give its path."
        )
    behind = dropwhile(lambda word: not _PYTHON.fullmatch(Path(word).name), agent.words)
    options_and_file = takewhile(lambda word: word not in ("-m", "-c"), behind)
    file = next((word for word in options_and_file if word.endswith(".py")), None)
    if file is not None and not Path(file).is_file():
        raise ConfigError(f"agent.command: there is no file {file}. Correct the path.")


def _check_rollout(location: str) -> None:
    what, (place, _, name) = f"agent.command: rollout_func {location}", location.rpartition(":")
    if is_pickled(location):
        return
    source = _read(what, place)
    if source is None:
        return
    path, tree = source
    names = set(names_bound(tree.body))
    if name not in names and "*" not in names:
        raise ConfigError(f"{what}: {path} has no {name!r}. Name a function: {ROLLOUT}file.py:function.")
    defined = [node for node in tree.body if isinstance(node, FUNCTIONS) and node.name == name]
    if not defined or defined[-1].decorator_list:
        return
    taken = [each.arg for each in (*defined[-1].args.posonlyargs, *defined[-1].args.args)]
    needed = len(taken) - len(defined[-1].args.defaults)
    if needed > 2 or (len(taken) < 2 and defined[-1].args.vararg is None):
        raise ConfigError(
            f"{what}: it takes ({', '.join(taken)}). Give it the parameters (prompts, trainer)."
        )


def check_tools(tools: Sequence[ToolConfig], is_here: bool) -> list[str]:
    """Warnings about a run's tools. Raises ConfigError for a secret that is not set, and for builtin:python where its
    sandbox does not work. is_here: as in `check_rewards`"""
    for tool in tools if is_here else ():
        _refuse_unset(f"tool {tool.where}", tool.kwargs)
        if tool.function == f"{BUILTIN}:python":
            try:
                refuse_sandbox(tool.kwargs.get("sandbox", "bwrap"), f"tool {tool.function}")
            except RewardError as error:
                raise ConfigError(str(error)) from None
    return [
        warning
        for number, tool in enumerate(tools)
        for warning in _literals(f"tools.{number}.kwargs", tool.kwargs)
    ]


def _refuse_unfit(environment: EnvironmentConfig) -> None:
    place, _, name = environment.factory.rpartition(":")
    if place == BUILTIN:
        if name not in builtin_environments.__all__:
            raise ConfigError(
                f"environment {environment.factory}: no environment of that name is built in. There are "
                f"{', '.join(builtin_environments.__all__)}."
            )
        return
    source = _read(f"environment {environment.factory}", place)
    if source is None:
        return
    path, tree = source
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
    """The Prefect Secret blocks that the arguments of a run's rewards, environment and tools name."""
    environment, tools = (config.environment, config.tools) if isinstance(config, Scores) else (None, ())
    rewards = config.rewards if isinstance(config, Judges) else ()
    users = (*rewards, *tools, *([environment] if environment else []))
    named = {secret_named(value) for each in users for value in each.arguments.values()}
    return sorted(name for kind, name in filter(None, named) if kind == "block")


def _find(reward: RewardConfig) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function's definition; None where the source does not show it, for example because it is imported."""
    place, _, name = reward.location.rpartition(":")
    source = _read(f"reward {reward.location}", place)
    if source is None:
        return None
    path, tree = source
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
            f"reward {reward.location}: no reward of that name is built in. There are "
            f"{', '.join(builtin_rewards.__all__)}."
        )
    try:
        names = [
            each for each in Parameters.of(function).names if each not in ("completions", "completion_ids")
        ]
        Parameters(names, (), takes_any=False).refuse_unknown(reward.location, reward.kwargs)
        if isinstance(function, type):
            lacks = [column for column in function(**reward.kwargs).columns if column not in columns]
            if lacks:
                raise RewardError(
                    f"reward {reward.location}: it names the column {lacks[0]!r}, which the rows lack "
                    f"({', '.join(columns) or 'they have no further ones'})."
                )
            return
        nothing = {name: [] for name in columns}
        function(**{**nothing, "completions": [], "completion_ids": [], **reward.kwargs})
    except RewardError as error:
        raise ConfigError(str(error)) from None
    except TypeError as error:  # an argument that must be given is missing
        raise ConfigError(f"reward {reward.location}: {error}.") from None


def judge_of(reward: RewardConfig, folder: str) -> tuple[judge, int]:
    """The judge that is a role of the run, and the tokens of its longest question without prompt and response. Where
    its tokenizer is not in `folder`, a token counts 4 characters.

    Raises ConfigError where it refuses its arguments.
    """
    try:
        asks = judge(**reward.kwargs)
        texts = asks.questions("", "", dict.fromkeys(asks.columns, ""))
    except RewardError as error:
        raise ConfigError(str(error)) from None
    except TypeError as error:  # an argument that it does not have
        raise ConfigError(f"reward {reward.location}: {error}.") from None
    if folder and own_or_base(Path(folder), "tokenizer.json").is_file():
        return asks, max(map(len, Tokenizer.from_folder(folder).turns(texts)))
    return asks, max(map(len, texts)) // 4


def _refuse_lost_code(reward: RewardConfig, folder: Path | None) -> None:
    if folder is None or not (folder / reward.location.rpartition(":")[0]).is_file():
        raise ConfigError(
            f"reward {reward.location}: the run folder has no such file. It holds a function that was defined in a "
            "notebook or script: give the run that function again, or name one in a file."
        )


def _parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    signature = function.args
    positional = [argument.arg for argument in (*signature.posonlyargs, *signature.args)]
    named = [argument.arg for argument in signature.kwonlyargs]
    required = positional[: len(positional) - len(signature.defaults)]
    required += [name for name, default in zip(named, signature.kw_defaults, strict=True) if default is None]
    return Parameters([*positional, *named], required, signature.kwarg is not None)


def _check_parameters(
    reward: RewardConfig, parameters: Parameters, columns: Sequence[str], are_all: bool
) -> None:
    """Raises ConfigError when a function's parameters match no form, or nothing supplies a required one."""
    try:
        form = parameters.form(reward.location, reward.kwargs)
        if are_all:
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


def refuse_blocks_without_server(config: RunConfig) -> list[str]:
    """The names of the blocks in a configuration.

    Raises ConfigError when there are some and no server is configured: a run's own server has no blocks at first.
    """
    names = blocks_named(config)
    if not names:
        return []
    from prefect.settings import PREFECT_API_URL  # here, since Prefect takes seconds to import

    if not PREFECT_API_URL.value():
        raise ConfigError(
            f"a reward's or environment's kwargs name the Prefect Secret block {names[0]!r}, and no server is "
            f"configured. Set PREFECT_API_URL to one that has it, {INSTEAD}."
        )
    return names


async def secret_blocks(config: RunConfig) -> dict[str, str]:
    """Block -> its value, from the configured server. Raises ConfigError for a block that does not exist."""
    values: dict[str, str] = {}
    names = refuse_blocks_without_server(config)
    if not names:
        return values
    from prefect.blocks.system import Secret
    from prefect.settings import PREFECT_API_URL

    for name in names:
        try:
            block = await Secret.aload(name)
        except ValueError:
            raise ConfigError(
                f"a reward's or environment's kwargs name the Prefect Secret block {name!r}, which does not exist on "
                f"the server {PREFECT_API_URL.value()}. Make it, {INSTEAD}."
            ) from None
        values[name] = str(block.get())
    return values


class Tried(NamedTuple):
    """The result of a reward or an environment.

    name   with what it is, for sentences
    gave   in words
    where  the row that it was given
    fault  "" where it did not fail
    """

    name: str
    gave: str
    seconds: float
    where: str
    fault: str


def try_rewards(config: Scores) -> Iterator[Tried]:
    """Call the rewards one after another. The completion that they judge is the end of the row's own prompt.

    Raises ConfigError for a Prefect block that does not exist, or where no server is configured.
    """
    blocks = asyncio.run(secret_blocks(config))
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    placed, example = first_example(config, prompt_example, tokenizer)
    ids = example.prompt_ids[-COMPLETION_TOKENS:]
    read = [tokenizer.decode(example.prompt_ids, special_tokens=True)]
    answers = Answers.of_columns([example.columns], [tokenizer.decode(ids)], [ids], read)
    for reward in config.scoring_rewards:
        tried = config.model_copy(update={"rewards": (reward,), "on_reward_error": "stop"})
        alone = RewardProcess(tried, blocks=blocks)
        started_s = time.monotonic()
        gave, fault = "no verdict", ""
        try:
            (value,) = alone.submit(answers).result().values[reward.name]
            if value is not None:
                gave = f"{total(value):g}"
        except RewardError as error:
            fault = str(error)
        finally:
            alone.close()
        yield Tried(f"reward {reward.name}", gave, time.monotonic() - started_s, placed.where, fault)


def try_environment(config: Scores) -> Iterator[Tried]:
    """Answer one turn, where the run has an environment. The turn is the end of the row's own prompt."""
    if config.environment is None:
        return
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    placed, example = first_example(config, prompt_example, tokenizer)
    ids, row = example.prompt_ids[-COMPLETION_TOKENS:], json.loads(example.columns)
    blocks = asyncio.run(secret_blocks(config))
    process = EnvironmentProcess(config.model_copy(update={"on_reward_error": "stop"}), blocks)
    started_s = time.monotonic()
    gave, fault = "", ""
    try:
        (answer,) = process.answers([Episode(0, row, config.seed, [tokenizer.decode(ids)])])
        assert isinstance(answer, Answer), "failures are raised"
        gave = f"reward {answer.reward:g}, over"
        if not answer.done:
            observed(Observations(tokenizer), config, answer.observation, row.get("prompt"), ids[-1])
            gave = f"reward {answer.reward:g}, {shown(answer.observation)}"
    except RewardError as error:
        fault = str(error)
    finally:
        process.close()
    name = f"environment {config.environment.name}"
    yield Tried(name, gave, time.monotonic() - started_s, placed.where, fault)
