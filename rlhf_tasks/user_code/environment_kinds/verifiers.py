"""verifiers' environments: `verifiers:TASKSET`, or `verifiers:file.py:Class` of a taskset of the user's.

verifiers runs the episode, with its tools and rewards, and asks an endpoint for each turn. That endpoint is here: its
question is what the policy reads next, and its answer is the policy's turn. So a rollout that is written as one
function becomes `reset` and `step`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import asyncio
import itertools
import json
import os
import secrets
import sys
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

from aiohttp import web
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.utils.loaders import (
    env_config_type,
    load_environment,
    resolve_env_config,
    taskset_class,
)

from prefect_rlhf.rlhf_tasks.user_code.environment_kinds import verifiers_harness
from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts import (
    START,
    refuse_other_prompt,
    row_of,
)
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import Malformed, Read, calls_of, format_named

HARNESS = "prefect_rlhf_policy"
MODEL = "policy"  # the model's name in answers; in questions it says which episode asks
CLIENTS = 4
"""Clients of verifiers that all questions come through, 1,000 at a time each. One for each episode would read
certificates for 40 ms, and keep its connections until the process ends."""
Body = Mapping[str, Any]


class Environment:
    """An episode of a taskset. A row's start is the place of its task.

    kwargs       of verifiers' `EnvConfig`: the taskset's fields under `taskset`, those of an agent under its name.
                 An agent with a `client` of its own is not the policy
    tool_format  in which the model writes calls of tools (docs/how-to/tools.md)
    """

    def __init__(self, name: str, tool_format: str = "hermes", **kwargs: Any) -> None:
        self._format = format_named(tool_format)
        self._served = _served(name, json.dumps(kwargs))

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        if START not in row:
            raise ValueError(f"the row has no column {START!r}. Make rows with `prefect-rlhf rows`.")
        refuse_other_prompt(row, (await self.begun(row[START]))["messages"])

    async def begun(self, place: int) -> Body:
        """The first question of the task at a place: `messages`, and `tools`. Raises IndexError past the last."""
        self._rollout = await self._served.rollout(place)
        weakref.finalize(self, _cancel_later, self._rollout.playing, asyncio.get_running_loop())
        self._question = await self._rollout.question()
        if self._question is None:
            self._rollout.reward()  # raises where the episode has failed
            raise ValueError("the episode ends before the policy is asked anything.")
        return self._question

    async def step(self, text: str) -> tuple[Any, float, bool]:
        """(what the episode says to a turn, 0, False), or ("", the sum of its rewards, True)"""
        assert self._question is not None, "the episode waits for the policy"
        schemas = [tool["function"] for tool in self._question.get("tools") or ()]
        parameters = {each["name"]: each["parameters"] for each in schemas}
        calls = calls_of(text, self._format, parameters) if schemas else []
        self._rollout.answer(_completion(text, calls))
        before, self._question = self._question, await self._rollout.question()
        if self._question is None:
            return "", self._rollout.reward(), True
        return _said(before["messages"], self._question["messages"]), 0.0, False


def _completion(text: str, calls: Sequence[Read]) -> dict[str, Any]:
    """A turn as a server of completions answers it. The arguments of a malformed call say what is wrong with it."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["content"] = text.partition("<tool_call>")[0].strip() or None
        message["tool_calls"] = [
            {
                "id": each.id or f"call{place:05d}",
                "type": "function",
                "function": {
                    "name": each.name or "unknown",
                    "arguments": f"error: {each.reason}"
                    if isinstance(each, Malformed)
                    else json.dumps(each.arguments),
                },
            }
            for place, each in enumerate(calls)
        ]
    ends = "tool_calls" if calls else "stop"
    return {
        "id": "turn",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": ends}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def _said(before: Sequence[Body], now: Sequence[Body]) -> Any:
    """What a question has behind the one before it and its answer: text, or answers to calls. Raises ValueError."""
    new = now[len(before) + 1 :]
    roles = {each["role"] for each in new}
    if list(now[: len(before)]) != list(before) or roles not in ({"user"}, {"tool"}):
        raise ValueError(
            "the episode asks the policy something that does not continue its conversation, as several agents, or a "
            "history that is written anew, do. Give the other agents a `client` of their own."
        )
    if roles == {"user"}:
        return "\n\n".join(each["content"] for each in new)
    return [
        {
            "name": each.get("name", ""),
            "id": each["tool_call_id"],
            "content": str(each["content"]),
            "outcome": "",
        }
        for each in new
    ]


class _Rollout:
    """An episode that verifiers plays: its questions, one at a time, and their answers."""

    def __init__(self) -> None:
        self._questions = asyncio.Queue[tuple[Body, asyncio.Future[Body]]]()
        self._waiting: asyncio.Future[Body] | None = None
        self.playing: asyncio.Task[Any]

    async def ask(self, body: Body) -> Body:
        """The policy's answer to a question."""
        answer = asyncio.get_running_loop().create_future()
        await self._questions.put((body, answer))
        return await answer

    async def question(self) -> Body | None:
        """The next question; None once the episode is over."""
        question = asyncio.ensure_future(self._questions.get())
        await asyncio.wait({question, self.playing}, return_when=asyncio.FIRST_COMPLETED)
        if not question.done():
            question.cancel()
            return None
        body, self._waiting = question.result()
        return body

    def answer(self, completion: Body) -> None:
        """Answer the last question."""
        assert self._waiting is not None, "something was asked"
        self._waiting.set_result(completion)

    def reward(self) -> float:
        """The sum of the rewards of an episode that is over. Raises RuntimeError where it has failed."""
        episode = self.playing.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        return float(sum(trace.reward for trace in episode.traces))


class _Served:
    """An environment of verifiers in this process, with what all its episodes share, and the policy's endpoint."""

    def __init__(self, name: str, kwargs: dict[str, Any]) -> None:
        sys.modules[HARNESS] = verifiers_harness  # where verifiers looks a harness up by its name
        place, _, taskset = name.rpartition(":")
        if place.endswith(".py"):
            # verifiers imports a taskset, and starts its servers of tools, by the module's name.
            sys.path.insert(0, str(Path(place).absolute().parent))
            name = Path(place).stem
            os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
            if taskset_class(name).__name__ != taskset:
                raise ValueError(f"{place} exports no taskset {taskset!r} in its __all__.")
        settings = {**kwargs, "taskset": {**kwargs.get("taskset", {}), "id": name}}
        local = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
        fields = env_config_type(name, kwargs.get("id", "")).model_fields
        roles = [role for role, field in fields.items() if isinstance(field.default, AgentConfig)]
        settings |= {role: {**local, **kwargs.get(role, {})} for role in roles}
        config = resolve_env_config(settings)
        self._env, self._stack, self._opening = load_environment(config), AsyncExitStack(), asyncio.Lock()
        self._tasks, self._made = iter(self._env.taskset), list[Any]()
        self._rollouts = dict[str, _Rollout]()
        self._url, self._begun = "", 0

    async def rollout(self, place: int) -> _Rollout:
        """Begin an episode of the task at a place. Raises IndexError where there is none."""
        async with self._opening:
            if not self._url:
                await self._open()
        self._made += itertools.islice(self._tasks, max(0, place + 1 - len(self._made)))
        key, rollout = secrets.token_urlsafe(16), _Rollout()
        url = f"{self._url}/{self._begun % CLIENTS}/v1"
        self._begun += 1
        client = EvalClientConfig(base_url=url, api_key_var="PREFECT_RLHF_NO_KEY")
        playing = self._env.run_episode(self._made[place], ModelContext(model=key, client=client))
        self._rollouts[key], rollout.playing = rollout, asyncio.ensure_future(playing)
        rollout.playing.add_done_callback(lambda _: self._rollouts.pop(key))
        return rollout

    async def _open(self) -> None:
        """Serve until the process ends."""

        async def answered(request: web.Request) -> web.Response:
            question = await request.json()
            rollout = self._rollouts.get(question["model"])
            if rollout is None:
                return web.json_response({"error": "the episode is over"}, status=410)
            return web.json_response(await rollout.ask(question))

        application = web.Application(client_max_size=2**30)
        application.router.add_post("/{client}/v1/chat/completions", answered)
        # The handlers of truncated episodes end with their requests:
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await self._stack.enter_async_context(self._env.serving())
        self._url = f"http://127.0.0.1:{runner.addresses[0][1]}"


@lru_cache(maxsize=2)
def _served(name: str, kwargs: str) -> _Served:
    return _Served(name, json.loads(kwargs))


def _cancel_later(task: "asyncio.Task[Any]", loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)


async def starts(name: str, kwargs: Mapping[str, Any], first: int) -> AsyncIterator[dict[str, Any]]:
    """A row for each task from the place `first` on."""
    for place in itertools.count(first):
        try:
            question = await Environment(name, **kwargs).begun(place)
        except IndexError:
            return
        tools = {"tools": question["tools"]} if question.get("tools") else {}
        yield row_of(place, question["messages"], **tools)
