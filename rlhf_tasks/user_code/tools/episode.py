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
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prefect_rlhf.rlhf_tasks.user_code.child import UNTIL_S, Caller
from prefect_rlhf.rlhf_tasks.user_code.errors import MOST_MESSAGE, RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import Call, Malformed, Read, calls_of
from prefect_rlhf.rlhf_tasks.user_code.tools.loaded import Tool, loaded

MOST_CHARACTERS = 4096  # of a tool's answer; the rest is cut
MOST_CALLS = 32  # of a turn; the others are not run, and one answer says so
OUTCOMES = ("calls", "malformed", "failed")
"""What is counted of a response: all its calls, those that were none, those whose tool raised."""
CALL_COLUMNS = ("tool_calls", "malformed_calls", "failed_calls")
"""The same, as rewards get them beside the columns of the rows."""
_NO_TIME = "error: no time is left"
_LONG_S = 1e9  # a timer takes no infinite time
_ID = re.compile("[A-Za-z0-9]{9}")  # Mistral's template takes no other


def tool_episodes(
    entries: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], name: str, caller: Caller
) -> "Callable[[], ToolEpisode]":
    """What makes an episode for a response, with tools as `offered`, in a format of calls. Raises RewardError."""
    makers = [loaded(stated, schemas, caller) for stated, schemas in entries]

    def made() -> ToolEpisode:
        tools = {name: tool for make in makers for name, tool in make().items()}
        return ToolEpisode(tools, name, caller.secrets.scrubbed)

    return made


class ToolEpisode:
    """The tools of a response, as an environment.

    tools     name -> tool
    format    of calls, see formats.py
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

    async def close(self) -> None:
        """End the servers that are this response's alone."""
        servers = {tool.server for tool in self._tools.values() if tool.server is not None}
        await asyncio.gather(*(server.close() for server in servers))

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
            except _OutOfTime:
                outcome, content = "failed", _NO_TIME
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
            with _bounded(
                (UNTIL_S.get() - time.monotonic()) / 2
            ):  # the other half is for calls that it delays
                returned = tool.function(**call.arguments, **tool.kwargs)
            return await returned if inspect.isawaitable(returned) else returned
        finally:
            if os.getpid() != process:  # it has forked, and its child returns here too
                os._exit(0)


class _OutOfTime(BaseException):
    """Raised in a plain function. Tools catch Exception; they do not catch this."""


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Raises _OutOfTime in what this thread runs after some seconds, as soon as it runs Python's code or waits.

    What stays longer in code that is compiled is ended with its process, as anything that is late (process.py).
    """

    def late(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, _LONG_S))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _text(returned: Any) -> str:
    """What a tool has returned, as text: JSON where it is none."""
    return returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=str)


def _cut(text: str) -> str:
    """A text of at most about MOST_CHARACTERS that UTF-8 can encode."""
    more = len(text) - MOST_CHARACTERS
    cut = text if more <= 0 else f"{text[:MOST_CHARACTERS]} ... ({more} more characters are cut)"
    return cut.encode(errors="backslashreplace").decode()
