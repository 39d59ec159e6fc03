"""Python rewards: finding them, calling them by known conventions, and checking what they return.

Torch-free. Training never runs a reward in its own process: see reward_process.py.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

Values = list[float | None]
"""One value per answer; None where a reward has no opinion, which counts as 0 and not in its mean."""


class RewardError(RuntimeError):
    """A Python reward that cannot be found, failed, was late or returned something else than values."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What rewards judge: n answers.

    prompts         text, or messages where the rows are conversations
    completions     text of the responses, without special tokens
    completion_ids  their token ids
    columns         the rows' further columns: name -> n values, None where a row lacks it
    """

    prompts: list[Any]
    completions: list[str]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]

    @staticmethod
    def of_columns(rows: Sequence[str], completions: list[str], completion_ids: list[list[int]]) -> "Answers":
        """From the key `columns`: one JSON object per sample, with `prompt` among its entries."""
        parsed = [json.loads(row) for row in rows]
        names = dict.fromkeys(name for row in parsed for name in row if name != "prompt")
        columns = {name: [row.get(name) for row in parsed] for name in names}
        return Answers([row.get("prompt") for row in parsed], completions, completion_ids, columns)


Reward = Callable[[Answers], Any]


def load_reward(location: str, kwargs: Mapping[str, Any]) -> Reward:
    """The reward at `module:function` or `file.py:function`, as a function of answers.

    Three conventions are known by their parameters' names:
        f(prompts, completions, completion_ids=None, **columns) -> list          TRL's; may be async
        compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict  verl's, per answer
        reward_func(queries, prompts, labels) -> list | tensor | dict             OpenRLHF's
    Raises RewardError when it is not there or its parameters fit none of them.
    """
    place, _, name = location.rpartition(":")
    try:
        function = getattr(_module(place), name)
    except AttributeError:
        raise RewardError(f"reward {location}: {place} has no function {name!r}.") from None
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(f"reward {location}: importing {place} raised {_named(error)}.") from error
    if not callable(function):
        raise RewardError(f"reward {location}: {name!r} is not a function.")
    accepted = inspect.signature(function).parameters
    for signs, adapt in _CONVENTIONS.items():
        if signs <= accepted.keys():
            return adapt(function, kwargs)
    raise RewardError(
        f"reward {location}: takes ({', '.join(accepted)}). "
        "Give it the parameters (prompts, completions, **columns)."
    )


def call_reward(name: str, reward: Reward, answers: Answers) -> Values:
    """Call a reward and check what it returns. Raises RewardError naming the reward and the fault."""
    try:
        returned = reward(answers)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    except Exception as error:
        raise RewardError(f"reward {name!r} raised {_named(error)}.") from error
    if hasattr(returned, "tolist"):  # a tensor or an array
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise RewardError(f"reward {name!r} returned {type(returned).__name__} instead of a list of numbers.")
    if len(returned) != len(answers.completions):
        raise RewardError(
            f"reward {name!r} returned {len(returned)} values for {len(answers.completions)} answers."
        )
    return [_checked(name, place, value) for place, value in enumerate(returned)]


def _checked(name: str, place: int, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardError(f"reward {name!r} returned {value!r} for answer {place}: not a number.") from None
    if not math.isfinite(number):
        raise RewardError(f"reward {name!r} returned {number} for answer {place}: not a finite number.")
    return number


async def _awaited(value: Any) -> Any:
    return await value


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _module(place: str) -> ModuleType:
    """A module by its name, or the one in a file."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise RewardError(f"reward file {path}: no such file.")
    name = f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _accepted(function: Callable, offered: Mapping[str, Any]) -> dict[str, Any]:
    """What a function takes of the arguments offered: all of them where it has **kwargs."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def _trl(function: Callable, kwargs: Mapping[str, Any]) -> Reward:
    def reward(answers: Answers) -> Any:
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(answers.prompts, answers.completions, strict=True)
        ]
        offered = {**answers.columns, "completion_ids": answers.completion_ids, **kwargs}
        return function(prompts=answers.prompts, completions=completions, **_accepted(function, offered))

    return reward


def _verl(function: Callable, kwargs: Mapping[str, Any]) -> Reward:
    def reward(answers: Answers) -> list[Any]:
        nothing = [None] * len(answers.completions)
        models = answers.columns.get("reward_model", nothing)
        rows = zip(
            answers.columns.get("data_source", nothing),
            answers.completions,
            [(model or {}).get("ground_truth") for model in models],
            answers.columns.get("extra_info", nothing),
            strict=True,
        )
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        scores = [
            function(**_accepted(function, {**dict(zip(names, row, strict=True)), **kwargs})) for row in rows
        ]
        return [score["score"] if isinstance(score, dict) else score for score in scores]

    return reward


def _openrlhf(function: Callable, kwargs: Mapping[str, Any]) -> Reward:
    def reward(answers: Answers) -> Any:
        queries = [
            f"{prompt}{text}" for prompt, text in zip(answers.prompts, answers.completions, strict=True)
        ]
        labels = next((answers.columns[n] for n in ("label", "labels", "answer") if n in answers.columns), [])
        returned = function(
            queries=queries, prompts=answers.prompts, labels=labels, **_accepted(function, kwargs)
        )
        return returned["rewards"] if isinstance(returned, dict) else returned

    return reward


_CONVENTIONS: dict[frozenset[str], Callable[[Callable, Mapping[str, Any]], Reward]] = {
    frozenset({"solution_str", "ground_truth"}): _verl,
    frozenset({"queries", "prompts", "labels"}): _openrlhf,
    frozenset({"prompts", "completions"}): _trl,
}
