"""TRL's `environment_factory`: `trl:file.py:Class`, whose public methods are tools and whose `get_reward` scores.

As in TRL: a class, or a function that makes objects, called without arguments; `reset(**row)` may return a text,
which the policy has read at the end of its prompt. The schemas of the tools are the row's column `tools`, which the
chat template offers. Environments that make up their tasks themselves have rows by `prefect-rlhf rows`.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.random_state import RandomState
from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts import START, named, row_of, written
from prefect_rlhf.rlhf_tasks.user_code.errors import shortened
from prefect_rlhf.rlhf_tasks.user_code.tools.episode import ToolEpisode
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import format_named
from prefect_rlhf.rlhf_tasks.user_code.tools.loaded import Tool

OF_ROWS = ("prompt", "tools", START)
"""Columns of a row that are ours where `prefect-rlhf rows` has made it."""


class Environment:
    """An environment whose tools the policy calls. tool_format: of its calls (docs/how-to/tools.md)"""

    def __init__(self, name: str, tool_format: str = "hermes") -> None:
        factory = named(name, "environment")
        if factory is None:
            raise ValueError(f"{name!r} is no environment: name trl:file.py:Class or trl:module:Class.")
        if list(inspect.signature(factory).parameters)[:2] == ["prompts", "trainer"]:
            raise ValueError(
                f"{name} is a rollout_func, which draws by itself: an agent. Leave out environment, and write "
                f"agent: {{command: trl:{name}}}."
            )
        self._made, self._format = factory(), format_named(tool_format)
        methods = [each for each, _ in inspect.getmembers(type(self._made), inspect.isfunction)]
        if "reset" not in methods:
            raise ValueError(f"{type(self._made).__name__} has no method 'reset'.")
        public = [
            each for each in methods if each not in ("reset", "get_reward") and not each.startswith("_")
        ]
        self.schemas = [get_json_schema(getattr(self._made, each)) for each in public]

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        said, prompt = self.begun(row, row.get(START, seed)), row["prompt"]
        if not (prompt if isinstance(prompt, str) else written(prompt)).endswith(said):
            raise ValueError(
                f"its reset returns {shortened(repr(said), 80)}, with which the row's prompt does not end. Append it"
                " to the prompt, as TRL does, or make rows with `prefect-rlhf rows`."
            )
        described = {each["function"]["name"]: each["function"]["parameters"] for each in self.schemas}
        tools = {name: Tool(getattr(self._made, name), {}, schema) for name, schema in described.items()}
        self._turns = ToolEpisode(tools, self._format, str)

    def begun(self, row: Mapping[str, Any], seed: int) -> str:
        """What the policy reads behind a row's own prompt."""
        self._random = RandomState(seed)
        given = {key: value for key, value in row.items() if START not in row or key not in OF_ROWS}
        with self._random.used():
            return self._made.reset(**given) or ""

    async def step(self, text: str) -> tuple[Any, float, bool]:
        """(the tools' answers to a turn's calls, 0, False); ("", the reward, True) for a turn without a call"""
        observation, _, done = await self._turns.step(text)
        if not done:
            return observation, 0.0, False
        reward = self._made.get_reward() if hasattr(self._made, "get_reward") else 0.0
        return "", await reward if inspect.isawaitable(reward) else reward, True


def starts(name: str, kwargs: Mapping[str, Any], first: int) -> Iterator[dict[str, Any]]:
    """A row for each seed from `first` on, whose prompt is what `reset` returns without a row."""
    for seed in itertools.count(first):
        made = Environment(name, **kwargs)
        yield row_of(seed, [{"role": "user", "content": made.begun({}, seed)}], tools=made.schemas)
