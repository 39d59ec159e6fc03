"""Environments behind an OpenEnv server: `openenv:http://HOST:PORT`, by the package's own client.

Each episode has a session of its own, which ends with it; the server must allow as many at once as a rank draws
responses (`max_concurrent_envs`).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import asyncio
import itertools
import json
import urllib.request
import weakref
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from typing import Any

from openenv.core import GenericEnvClient

from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts import (
    START,
    refuse_other_prompt,
    row_of,
)
from prefect_rlhf.rlhf_tasks.user_code.errors import shortened

CONNECT_S = 30.0
OF_PROTOCOL = ("done", "reward", "metadata")
"""Fields of every observation that are no part of what it says."""
REFUSED = "VALIDATION_ERROR"  # what a server says of an action that its schema does not take


class Environment:
    """An episode on a server. A row's start is the seed that the server's `reset` gets.

    action       the action's field that is the policy's text; default: the only one that an action must have. A turn
                 that is a JSON object is the whole action instead
    observation  the observation's field that the policy reads; default: its only field that is a text, or else all of
                 them as JSON
    An action that the server refuses is answered with what it says of it, for a reward of 0.
    """

    def __init__(self, name: str, action: str | None = None, observation: str | None = None) -> None:
        self._url, self._observation = name.rstrip("/"), observation
        self._field, self._type = _field_of(self._url, action)

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        refuse_other_prompt(row, await self.begun(row.get(START, seed)))

    async def begun(self, seed: int) -> list[dict[str, str]]:
        """What the policy reads first."""
        self._client = GenericEnvClient(
            self._url,
            connect_timeout_s=CONNECT_S,
            message_timeout_s=None,  # a turn's deadline is reward_timeout_s
        )
        weakref.finalize(self, _close_later, self._client, asyncio.get_running_loop())  # a truncated episode
        said = (await self._client.reset(seed=seed)).observation
        return [{"role": "user", "content": self._text(said)}]

    async def step(self, text: str) -> tuple[str, float, bool]:
        """(what the server observes, its reward, whether the episode is over)"""
        try:
            result = await self._client.step(self._action(text))
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            return f"error: {shortened(str(error), 400)}", 0.0, False
        if result.done:
            await self._client.close()
        return self._text(result.observation), float(result.reward or 0.0), result.done

    def _action(self, text: str) -> dict[str, Any]:
        value = text.strip()
        if value.startswith("{"):
            try:
                return json.loads(value)
            except ValueError:
                pass  # it is a text that begins with a bracket
        if self._type in ("integer", "number", "boolean"):
            try:
                return {self._field: json.loads(value)}
            except ValueError:
                pass  # the server says what it wants instead
        return {self._field: value if self._type != "string" else text}

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation is not None:
            return str(observation[self._observation])
        fields = {key: value for key, value in observation.items() if key not in OF_PROTOCOL}
        texts = [value for value in fields.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(fields, ensure_ascii=False)


@lru_cache(maxsize=16)
def _field_of(url: str, action: str | None) -> tuple[str, str]:
    """(the field of an action that is the policy's text, its JSON type), by the server's schema."""
    with urllib.request.urlopen(f"{url}/schema", timeout=CONNECT_S) as reply:
        schema = json.load(reply)["action"]
    required = schema.get("required", [])
    if action is None and len(required) != 1:
        raise ValueError(
            f"an action at {url} must have the fields {required}. Name in kwargs which one is the policy's text: "
            "{action: FIELD}."
        )
    field = action or required[0]
    if field not in schema["properties"]:
        raise ValueError(
            f"an action at {url} has no field {field!r}; it has {', '.join(schema['properties'])}."
        )
    return field, schema["properties"][field].get("type", "string")


def _close_later(client: GenericEnvClient, loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: loop.create_task(client.close()))


async def starts(name: str, kwargs: Mapping[str, Any], first: int) -> AsyncIterator[dict[str, Any]]:
    """A row for each seed from `first` on."""
    for seed in itertools.count(first):
        yield row_of(seed, await Environment(name, **kwargs).begun(seed))
