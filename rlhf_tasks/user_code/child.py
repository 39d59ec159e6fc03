"""The loop of a process that runs a user's code: read requests, call that code, reply. Both kinds share it.

Requests and replies are lines of JSON. The first request has what the process begins with, `blocks` among it: the
values of the Prefect blocks that the code's arguments name. Its reply is `{"pid": ...}`. The replies to a further
request are

- nothing, to one that `Judge` is given early;
- `{"at": [called, place]}` before each call: what is called, and the answer or sample that it is about, where that is
  one only;
- then the answer of `Judge` (judge.py), or answers of `Environments` (episodes.py), which takes further requests
  meanwhile;
- or `{"fault": ..., "traceback": ..., "place": ..., "searching": ...}`, after which the process ends. Where
  `searching` is true, it first searches for the answer that the code fails on, and says all again, with the place.
"""

import asyncio
import faulthandler
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

from prefect_rlhf.rlhf_tasks.system.child_pipes import Requests
from prefect_rlhf.rlhf_tasks.user_code.errors import (
    MOST_MESSAGE,
    RewardError,
    raised,
    shortened,
    users_frames,
)

STACK_SIGNAL = signal.SIGRTMAX  # makes this process dump its stack, whatever it is doing
MARGIN_S = 0.5  # async code times out this much before the process does, so that the late call can be named
MOST_TRACEBACK = 8000  # characters
UNTIL_S = ContextVar("UNTIL_S", default=math.inf)
"""time.monotonic(), in seconds, until which tools may run for the present request."""


def serve(stacks: str, kind: str) -> None:
    """Answer requests until the user's code fails.

    stacks  the descriptor of the file that STACK_SIGNAL and a crash dump the stack to
    kind    `module:class` of what answers
    """
    requests = Requests()
    faulthandler.enable(int(stacks), all_threads=False)
    faulthandler.register(STACK_SIGNAL, int(stacks), all_threads=False)
    lines = iter(requests)
    begin = next(lines)
    caller = Caller(requests, begin["blocks"])
    requests.reply({"pid": os.getpid()})
    try:
        answering = resolve_name(kind)(begin, caller)
        if isinstance(answering, Apart):
            # No `asyncio.run`: at its end it waits for tasks that the user's code may not let end.
            asyncio.new_event_loop().run_until_complete(_serve_apart(answering, requests))
            return
        # What it has begun to await continues while the next request is waited for.
        while (request := answering.loop.run(asyncio.to_thread(next, lines, None))) is not None:
            if (reply := answering.answer(request)) is not None:
                requests.reply(reply)
    except RewardError as error:
        caller.say_fault(error)


@runtime_checkable
class Apart(Protocol):
    """What answers each request as soon as it can, whichever comes first."""

    async def answered(self, request: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> None:
        """Say the reply to a request, if it has one. Raises RewardError, which ends the process."""
        ...


async def _serve_apart(answering: Apart, requests: Requests) -> None:
    """Answer requests as they come, until one fails. Raises what it fails with."""
    loop, unread, running = asyncio.get_running_loop(), b"", set[asyncio.Task[None]]()
    ended: asyncio.Future[None] = loop.create_future()

    async def reply(request: Mapping[str, Any]) -> None:
        try:
            await answering.answered(request, requests.reply)
        except BaseException as error:  # noqa: BLE001  also a cancellation that the user's code has raised
            if not ended.done():
                ended.set_exception(error)

    def read() -> None:
        nonlocal unread
        if not (piece := os.read(requests.fileno(), 1 << 16)):
            loop.remove_reader(requests.fileno())
            if not ended.done():
                ended.set_result(None)
        *lines, unread = (unread + piece).split(b"\n")
        for line in lines:
            running.add(task := loop.create_task(reply(json.loads(line))))
            task.add_done_callback(running.discard)

    loop.add_reader(requests.fileno(), read)
    await ended


class Caller:
    """Calls the user's code, and says what it calls and how that fails. No secret is in what it says.

    blocks  name of a Prefect Secret block -> its value
    """

    def __init__(self, requests: Requests, blocks: Mapping[str, str]) -> None:
        self._requests, self._pid = requests, os.getpid()
        self.secrets = Secrets(blocks)

    def call(
        self, called: str, place: int | None, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """What a function of the user's returns. Raises whatever it raises."""
        self._requests.reply({"at": [called, place]})
        try:
            return function(*args, **kwargs)
        finally:
            if os.getpid() != self._pid:  # the function has forked, and its child returns here too
                os._exit(0)

    def say_awaiting(self, called: str) -> None:
        """Several calls are awaited together: which of them runs is not known."""
        self._requests.reply({"at": [called, None]})

    def sentence(self, error: RewardError) -> str:
        """What an error says."""
        return shortened(self.secrets.scrubbed(str(error)), 2 * MOST_MESSAGE)

    def say_fault(self, error: RewardError, searching: bool = False) -> None:
        """The user's code has failed. searching: it is said again, with the place"""
        trace = self.secrets.scrubbed(error.traceback)[-MOST_TRACEBACK:]
        self._requests.reply(
            {"fault": self.sentence(error), "traceback": trace, "place": error.place, "searching": searching}
        )


@contextmanager
def importing(who: str) -> Iterator[None]:
    """Names what the user's module raises while it is imported, which may be anything, in a RewardError."""
    try:
        yield
    except RewardError:
        raise
    except BaseException as error:  # noqa: BLE001
        raise raised(f"{who}: importing it", error, "") from None


async def late_ones(
    tasks: Collection["asyncio.Task[Any]"], until_s: float
) -> dict["asyncio.Task[Any]", list[traceback.FrameSummary]]:
    """Await tasks until `until_s` (time.monotonic(), in seconds) or until one raises; the others are cancelled.

    Returns, of each that was cancelled, the frames of the user's code where it waited.
    """
    timeout_s = max(until_s - time.monotonic(), 0.0)
    _, late = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late, timeout=MARGIN_S / 2)
    return {task: _frames(task) for task in late}


def _frames(task: "asyncio.Task[Any]") -> list[traceback.FrameSummary]:
    try:
        task.result()
    except BaseException as error:  # noqa: BLE001  the cancellation, raised where the task waited
        return users_frames(traceback.extract_tb(error.__traceback__))
    return []


class Secrets:
    """Secret arguments of the user's code, which the configuration names: `{env: VARIABLE}` or `{block: NAME}`.

    Only the process that runs the code has their values. What it says or prints has `***` in their place.
    """

    def __init__(self, blocks: Mapping[str, str]) -> None:
        self._blocks, self._shown = blocks, set[str]()

    def resolved(self, who: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with values for the secrets that they name. who: for sentences

        From then on this process prints no value. Raises RewardError for a secret that is not set here.
        """
        values = dict(kwargs)
        for argument, stated in kwargs.items():
            if (named := secret_named(stated)) is None:
                continue
            kind, name = named
            value = os.environ.get(name) if kind == "env" else self._blocks.get(name)
            if value is None:
                what = "environment variable" if kind == "env" else "Prefect Secret block"
                raise RewardError(
                    f"{who}: its kwargs name the {what} {name!r} for {argument}, which is not set here."
                )
            values[argument] = value
            self._hide(value)
        return values

    def scrubbed(self, text: str) -> str:
        """A text with `***` in place of the secrets' values."""
        for secret in sorted(self._shown, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _hide(self, value: str) -> None:
        if not self._shown:
            sys.stdout, sys.stderr = (_Scrubbed(s, self.scrubbed) for s in (sys.stdout, sys.stderr))
        stripped = value.strip()  # it may be shown without a line break at its end, or as `repr` or JSON does
        written = (repr(stripped), json.dumps(stripped), json.dumps(stripped, ensure_ascii=False))
        self._shown |= {value, stripped, *(text[1:-1] for text in written)} - {""}


def secret_named(value: Any) -> tuple[str, str] | None:
    """(`env` or `block`, name) where an argument is `{env: VARIABLE}` or `{block: NAME}`; else None."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    ((kind, name),) = value.items()
    return (kind, name) if kind in ("env", "block") and isinstance(name, str) else None


class _Scrubbed:
    """A text stream that replaces secrets by `***`."""

    def __init__(self, stream: Any, scrubbed: Callable[[str], str]) -> None:
        self._stream, self._scrubbed = stream, scrubbed

    def write(self, text: str) -> int:
        return self._stream.write(self._scrubbed(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def allow_many_files() -> None:
    """Let this process open as many files, connections and pipes as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
