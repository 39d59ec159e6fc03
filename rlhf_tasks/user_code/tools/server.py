"""A server of tools (MCP): started, called, watched, started anew.

The package `mcp` is loaded where a run names a server. A server by command is a child of the process of the user's
code, whose keepers end it with that process (process.py).
"""

import asyncio
import fcntl
import json
import os
import re
import shlex
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, TextIO, cast

from prefect_rlhf.rlhf_tasks.user_code.errors import MOST_MESSAGE, RewardError, shortened

MOST_ENDED = 4
"""As often in a row a server may end, be late or not start until that is an error of the user's code."""
MOST_PAGES = 100  # of a list of tools
_CLOSED = -32000  # the code by which `mcp` says that a connection is closed
_NAME = re.compile(r"[\w.-]{1,64}")


class ToolError(Exception):
    """What a tool answers instead of a result, or why it could not: the model reads it."""


class _Life:
    """A connection, in a task of its own: `mcp` closes one only in the task that has opened it.

    task     ends with the connection
    started  the client, once it answers
    """

    def __init__(self, opened: Any) -> None:
        self.started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(opened))

    async def _run(self, opened: Any) -> None:
        async with opened as client:
            self.started.set_result(client)
            await self._leave.wait()

    async def answer_to(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """What a client answers. Raises what `ask` raises, and ToolError where the connection ends."""
        await asyncio.wait({self.task, self.started}, return_when=asyncio.FIRST_COMPLETED)
        if not self.task.done():
            answer = asyncio.ensure_future(ask(self.started.result()))
            try:
                await asyncio.wait({self.task, answer}, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
            finally:
                answer.cancel()
        fault = self.task.exception()
        raise ToolError(_innermost(fault) if fault else "its connection was closed")

    async def close(self) -> None:
        """End the connection, and the server where it is ours. Takes some seconds at most."""
        self._leave.set()
        if not self.started.done():
            self.task.cancel()
        await asyncio.wait({self.task})
        if not self.task.cancelled():
            self.task.exception()  # it has been said, or does not matter any more


@dataclass
class Ends:
    """How often in a row the servers of an entry of `tools` have ended, were late, or did not start."""

    n: int = 0


class ToolServer:
    """A server that offers tools, by its command or its url. It starts with the first call.

    settings  variables of the command's environment, which else has HOME, PATH and the like; headers of the url
    scrubbed  a text -> the same without secrets
    ends      counted together with those of the entry's other servers, where it has such
    A server that ends, or answers late, is started anew with the next call. Raises RewardError without the package.
    """

    def __init__(
        self,
        command: str | None,
        url: str | None,
        settings: Mapping[str, str],
        scrubbed: Callable[[str], str],
        ends: Ends | None = None,
    ) -> None:
        self._ends = ends or Ends()
        self._command, self._url, self._settings, self._scrubbed = command, url, settings, scrubbed
        self._who = f"mcp {url or command}"
        if find_spec("mcp") is None:
            raise RewardError(
                f"{self._who}: servers of tools need the package mcp. Run: pip install 'prefect-rlhf[mcp]'"
            )
        self._life: _Life | None = None
        self._leaving = set[asyncio.Task[None]]()  # connections that are being closed

    async def schemas(self, timeout_s: float) -> list[dict[str, Any]]:
        """The schemas of its tools, as transformers writes those of functions. Then the server is ended.

        Raises RewardError where it does not start or answer in time, or offers what is no tool.
        """
        try:
            async with asyncio.timeout(timeout_s):
                listed = await self._answer_to(_listed)
        except TimeoutError:
            raise RewardError(
                f"{self._who}: it has not named its tools in {timeout_s:.0f} s. Correct it or raise reward_timeout_s."
            ) from None
        except ToolError as error:
            raise RewardError(f"{self._who}: {error}.") from None
        finally:
            await self.close()
        wrong = [tool.name for tool in listed if not _NAME.fullmatch(tool.name)]
        if wrong or not listed:
            what = f"a tool named {wrong[0][:64]!r}; use letters, digits, _ . and -" if wrong else "no tools"
            raise RewardError(f"{self._who}: it offers {what}.")
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or tool.title or tool.name,
                    "parameters": tool.input_schema,
                },
            }
            for tool in listed
        ]

    async def call(self, name: str, /, **arguments: Any) -> str:
        """What one of its tools answers, as text. Raises ToolError with what the model reads, and RewardError where
        the server has ended too often."""
        answer = await self._answer_to(lambda client: client.call_tool(name, arguments))
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in answer.content]
        if not parts and answer.structured_content is not None:
            parts = [json.dumps(answer.structured_content, ensure_ascii=False)]
        text = "\n".join(parts)
        if answer.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """End it, for good."""
        life, self._life = self._life, None
        if life is not None:
            await life.close()
        if self._leaving:
            await asyncio.wait(self._leaving)
        if "_printed" in vars(self):
            self._printed.close()

    @cached_property
    def _printed(self) -> TextIO:
        """What the command prints to its standard error."""
        file = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115  closed by `close`
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # it is cut while the command writes
        return cast(TextIO, file)

    async def _answer_to(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        life = self._life = self._life or _Life(self._opened())
        try:
            answer = await life.answer_to(ask)
        except asyncio.CancelledError:
            self._lose(life, "it is late")
            raise
        except Exception as error:  # noqa: BLE001  of any transport; an end of the server is told from a refusal
            if getattr(error, "code", _CLOSED) != _CLOSED:  # the server has refused the call
                raise ToolError(_innermost(error)) from None
            said = self._with_output(_innermost(error))
            self._lose(life, said)
            raise ToolError(f"the server has ended: {said}") from None
        self._ends.n = 0
        self._printed.truncate(0)
        return answer

    def _lose(self, life: _Life, said: str) -> None:
        """Leave a connection that has ended or is late, once. Raises RewardError where that is too often.

        said  why
        """
        if self._life is not life:
            return
        self._life, self._ends.n = None, self._ends.n + 1
        closing = asyncio.create_task(
            life.close()
        )  # not awaited: that takes seconds which a turn does not have
        self._leaving.add(closing)
        closing.add_done_callback(self._leaving.discard)
        if self._ends.n >= MOST_ENDED:
            raise RewardError(
                f"{self._who}: it has ended, or was late, {MOST_ENDED} times in a row; the last time: {said}."
            )

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Any]:
        """A client of the server, started where it is a command."""
        import httpx2  # here, since they take a second to import
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if self._url is None:
            program, *arguments = shlex.split(self._command or "")
            server = StdioServerParameters(command=program, args=arguments, env=dict(self._settings))
            async with Client(stdio_client(server, self._printed)) as client:
                yield client
            return
        async with (
            httpx2.AsyncClient(headers=self._settings, timeout=None) as http,
            Client(streamable_http_client(self._url, http_client=http)) as client,
        ):
            yield client

    def _with_output(self, said: str) -> str:
        """A sentence, with the last line that the command has printed to its standard error."""
        self._printed.seek(0)
        last = self._printed.read().strip().rpartition("\n")[2].strip()
        return self._scrubbed(shortened(f"{said} ({last})" if last else said, MOST_MESSAGE))


async def _listed(client: Any) -> list[Any]:
    """All tools of a server, which may name them in several pages."""
    page = await client.list_tools()
    tools = [*page.tools]
    for _ in range(MOST_PAGES):
        if page.next_cursor is None:
            break
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _innermost(error: BaseException) -> str:
    """What the first error in a group of errors says."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error).rstrip(".") or type(error).__name__
