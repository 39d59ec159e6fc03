"""A run's tools: functions of the user's, offered by their JSON schemas and called as the model asks.

They run in the processes of environments (episodes.py), as an environment of ours: a turn with calls is answered with
one answer for each, and the first turn without a call ends the episode. A call that is malformed, or whose tool
raises, is answered with an error that the model reads.
"""

import asyncio
import inspect
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.tokenizer import template_of
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from prefect_rlhf.rlhf_tasks.user_code.child import UNTIL_S, Caller, importing
from prefect_rlhf.rlhf_tasks.user_code.errors import MOST_MESSAGE, RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.forms import module_at
from prefect_rlhf.rlhf_tasks.user_code.process import Terms, UserProcess
from prefect_rlhf.rlhf_tasks.user_code.tool_formats import FORMATS, Call, Malformed, Read, calls_of, format_of

MOST_CHARACTERS = 4096  # of a tool's answer; the rest is cut
LOADING_S = 120.0  # at least, for the schemas: transformers is loaded for them
MOST_CALLS = 32  # of a turn; the others are not run, and one answer says so
OUTCOMES = ("calls", "malformed", "failed")
"""What is counted of a response: all its calls, those that were none, those whose tool raised."""
CALL_COLUMNS = ("tool_calls", "malformed_calls", "failed_calls")
"""The same, as rewards get them beside the columns of the rows."""
_NO_TIME = "error: no time is left"
_ID = re.compile("[A-Za-z0-9]{9}")  # Mistral's template takes no other


@dataclass(frozen=True)
class Tool:
    """A tool: a function, the arguments that the model does not give, and the JSON schema of the others."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    parameters: Mapping[str, Any]


def tool_format(config: Scores) -> str:
    """The name of the format in which the model of a run with tools writes calls. Raises ConfigError where it is not
    known."""
    if config.tool_format is not None:
        return config.tool_format
    template = template_of(config.models.tokenizer)
    name = format_of(template)
    if name is None:
        raise ConfigError(
            f"tools: the chat template of {config.models.tokenizer} writes calls in no format that is known "
            f"({', '.join(FORMATS)}). Name one in tool_format, or choose a model that was trained with tools."
            if template
            else f"tools: {config.models.tokenizer} has no chat template, which would offer them. Add "
            "chat_template.jinja to its folder."
        )
    return name


def schemas_of(config: Scores) -> list[dict[str, Any]]:
    """The JSON schemas of a run's tools, as a chat template takes them; [] without tools.

    They are made in a process of its own. Raises ConfigError for what is no tool: without a docstring or types, say.
    """
    if not config.tools:
        return []
    files = [Path(tool.function.rpartition(":")[0]) for tool in config.tools]
    changed = tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)
    tools = json.dumps([[tool.function, sorted(tool.kwargs)] for tool in config.tools])
    return json.loads(
        _schemas(tools, changed, max(LOADING_S, config.reward_timeout_s), config.reward_memory_bytes)
    )


def offered(config: Scores) -> list[dict[str, Any]]:
    """A run's tools as the processes that run them take them: with schemas, which take seconds to make."""
    pairs = zip(config.tools, schemas_of(config), strict=True)
    return [{**tool.model_dump(), "schema": schema} for tool, schema in pairs]


@lru_cache(maxsize=16)
def _schemas(tools: str, changed: tuple[int, ...], timeout_s: float, most_bytes: int) -> str:
    terms = Terms(
        kind=f"{__name__}:Schemas",
        what="the tools",
        who=lambda method: method,
        begin={"tools": json.loads(tools), "blocks": {}},
        timeout_s=timeout_s,
        timeout_key="reward_timeout_s",
        most_bytes=most_bytes,
    )
    process = UserProcess(terms)
    try:
        return json.dumps(process.ask({})["schemas"])
    except RewardError as error:
        raise ConfigError(str(error)) from None
    finally:
        process.close()
        process.end()


class Schemas:
    """What a process answers that only looks at tools."""

    def __init__(self, begin: Mapping[str, Any], caller: Caller) -> None:
        self._schemas = [_schema(location, kwargs) for location, kwargs in begin["tools"]]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The schemas of all tools."""
        return {"schemas": self._schemas}


def tool_episodes(
    tools: Sequence[Mapping[str, Any]], name: str, caller: Caller
) -> "Callable[[], ToolEpisode]":
    """What makes an episode for a response, with tools as `offered`, in a format of calls. Raises RewardError."""
    loaded = {}
    for each in tools:
        kwargs = caller.secrets.resolved(f"tool {each['function']}", each["kwargs"])
        described = each["schema"]["function"]
        loaded[described["name"]] = Tool(_function(each["function"]), kwargs, described["parameters"])
    return partial(ToolEpisode, loaded, name, caller.secrets.scrubbed)


def _function(location: str) -> Callable[..., Any]:
    place, _, name = location.rpartition(":")
    who = f"tool {location}"
    with importing(who):
        function = getattr(module_at(place, "tools"), name, None)
    if function is None or not callable(function) or inspect.isclass(function):
        raise RewardError(f"{who}: {place} has no function {name!r}.")
    return function


def _schema(location: str, kwargs: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a tool, without the arguments that the model does not give. Raises RewardError."""
    function, who = _function(location), f"tool {location}"
    from transformers.utils.chat_template_utils import get_json_schema  # takes a second to import

    try:
        schema = get_json_schema(function)
    except Exception as error:  # noqa: BLE001  transformers has a class for each fault, and inspect has others
        raise RewardError(
            f"{who}: {shortened(str(error).rstrip('.!'), MOST_MESSAGE)}. Give it a type for each argument, and a "
            "docstring that says what it does and, under Args:, what each argument is."
        ) from None
    described = schema["function"]
    parameters = described["parameters"]
    described["name"] = location.rpartition(":")[2]
    unknown = [key for key in kwargs if key not in parameters["properties"]]
    if unknown:
        raise RewardError(f"{who}: its kwargs give {unknown[0]!r}, which is none of its parameters.")
    signature = inspect.signature(function).parameters.values()
    of_user = {*kwargs, *(each.name for each in signature if each.kind is each.KEYWORD_ONLY)}
    for key in of_user:
        del parameters["properties"][key]
    parameters["required"] = [each for each in parameters.get("required", ()) if each not in of_user]
    return schema


class ToolEpisode:
    """The tools of a response, as an environment.

    tools     name -> tool
    format    of calls, see tool_formats.py
    scrubbed  a text -> the same without secrets
    """

    def __init__(self, tools: Mapping[str, Tool], format: str, scrubbed: Callable[[str], str]) -> None:
        self._tools, self._format, self._scrubbed = tools, format, scrubbed
        self._parameters = {name: tool.parameters for name, tool in tools.items()}

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Tools know neither the row nor what came before."""

    async def step(self, text: str) -> tuple[list[dict[str, str]] | str, float, bool]:
        """(the answers to a turn's calls, 0, False); ("", 0, True) for a turn without a call.

        An answer has `name` and `id` of its call, its `content`, and its `outcome`: "", or one of OUTCOMES.
        """
        read = calls_of(text, self._format, self._parameters)[: MOST_CALLS + 1]
        answers = [await self._answer(place, each) for place, each in enumerate(read)]
        return (answers, 0.0, False) if answers else ("", 0.0, True)

    async def _answer(self, place: int, read: Read) -> dict[str, str]:
        outcome = ""
        if isinstance(read, Malformed):
            outcome, content = "malformed", f"error: {read.reason}"
        elif place >= MOST_CALLS:
            outcome, content = "malformed", f"error: a turn has at most {MOST_CALLS} calls"
        elif time.monotonic() >= UNTIL_S.get():
            outcome, content = "failed", _NO_TIME
        else:
            limit = asyncio.timeout_at(UNTIL_S.get())
            try:
                async with limit:
                    content = _text(await self._called(read))
            except RewardError:  # of a tool of ours that cannot run here
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001  a tool may raise anything; the model reads it
                outcome, content = "failed", _NO_TIME if limit.expired() else self._said(error)
        return {
            "name": read.name if read.name in self._tools else next(iter(self._tools)),
            "id": read.id if _ID.fullmatch(read.id) else f"call{place:05d}",
            "content": _cut(self._scrubbed(content)),
            "outcome": outcome,
        }

    def _said(self, error: BaseException) -> str:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return f"error: {shortened(self._scrubbed(said), MOST_MESSAGE)}"  # a secret that is cut is not recognised

    async def _called(self, call: Call) -> Any:
        tool, process = self._tools[call.name], os.getpid()
        try:
            returned = tool.function(**call.arguments, **tool.kwargs)
            return await returned if inspect.isawaitable(returned) else returned
        finally:
            if os.getpid() != process:  # it has forked, and its child returns here too
                os._exit(0)


def _text(returned: Any) -> str:
    """What a tool has returned, as text: JSON where it is none."""
    return returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=str)


def _cut(text: str) -> str:
    """A text of at most about MOST_CHARACTERS that UTF-8 can encode."""
    more = len(text) - MOST_CHARACTERS
    cut = text if more <= 0 else f"{text[:MOST_CHARACTERS]} ... ({more} more characters are cut)"
    return cut.encode(errors="backslashreplace").decode()
