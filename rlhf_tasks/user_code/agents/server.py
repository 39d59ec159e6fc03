"""The process beside a head that runs agents, the user's own programs, and answers them as OpenAI's API does.

It listens on loopback only. An agent has a key that is valid while its process runs. It reads the row as JSON on
standard input, asks, and says its reward in the last line of standard output, or by POST to /v1/reward. The rank is
told of each request at once, and says when its answer is drawn; where it is to be streamed, also what was drawn of it
by then.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from prefect_rlhf.rlhf_tasks.system.child_processes import direct_to_loopback, users_environment
from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import (
    BEAT_S,
    MODEL,
    Asked,
    Choice,
    Drawing,
    Limits,
    Refused,
    answer,
    read_request,
    reward_of,
)
from prefect_rlhf.rlhf_tasks.user_code.agents.forks import Forked, Forks
from prefect_rlhf.rlhf_tasks.user_code.agents.streams import Piece, Stream
from prefect_rlhf.rlhf_tasks.user_code.child import Caller, allow_many_files
from prefect_rlhf.rlhf_tasks.user_code.errors import MOST_MESSAGE, shortened
from prefect_rlhf.rlhf_tasks.user_code.process import used_memory

LOOPBACK = "127.0.0.1"
KEY = "OPENAI_API_KEY"
MOST_BODY_BYTES = 2 << 20  # so many have half a million tokens
MOST_LINE_BYTES = 1 << 16  # of an agent's output this much is remembered, from its end
LOOK_EVERY_S = 0.5
LEAVE_S = 2.0  # that the output of an agent that has ended may take
STATUS_S = 60.0  # that its status may take, on a machine that is busy


class Agents:
    """The agents of one generate call, and their server.

    begin  `command`: words; `rollout`: settings of what plays in its place (rollouts.py), or None; `limits`;
           `drawing`; `tool_format`: of the model's calls of tools, or None
    """

    def __init__(self, begin: Mapping[str, Any], caller: Caller) -> None:
        self._command: list[str] = begin["command"]
        self._forks = Forks(begin["rollout"]) if begin.get("rollout") else None
        self._limits, self._drawing = Limits(*begin["limits"]), Drawing(*begin["drawing"])
        self._tool_format: str | None = begin["tool_format"]
        self._queue: deque[_Episode] = deque()
        self._running: dict[str, _Episode] = {}  # by key
        self._tasks: set[asyncio.Task[None]] = set()
        self._new: list[Asked] = []
        self._waiting: dict[int, _Reply] = {}
        self._ended: list[dict[str, Any]] = []
        self._number = 0
        allow_many_files()  # a connection is a file, and an agent may open many
        self._socket = socket.create_server((LOOPBACK, 0), backlog=1024)
        self._url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}/v1"
        self._changed = asyncio.Event()
        self._serving = False

    async def answered(self, request: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> None:
        """Take `episodes`, which are to be played, `answers` to requests, and `pieces` of answers before these. What
        happens is said when it does, and at least every BEAT_S: `asked`, requests, and `ended`, episodes."""
        for number, *piece in request["pieces"]:
            if (reply := self._waiting.get(number)) is not None:
                reply.pieces.put_nowait(Piece(*piece))
        for number, said in request["answers"]:
            if (reply := self._waiting.get(number)) is not None and not reply.whole.done():
                reply.whole.set_result(said)
        self._queue.extend(_Episode(*each) for each in request["episodes"])
        self._start()
        if not self._serving:
            self._serving = True
            await asyncio.gather(self._serve(), self._tell(say))

    async def _tell(self, say: Callable[[Mapping[str, Any]], None]) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), BEAT_S)
            self._changed.clear()
            requests, ended, self._new, self._ended = self._new, self._ended, [], []
            await asyncio.to_thread(
                say, {"asked": requests, "ended": ended}
            )  # the rank may be slow to read it

    async def _serve(self) -> None:
        methods = ["POST"]
        routes = [
            Route("/v1/chat/completions", self._chat, methods=methods),
            Route("/v1/completions", self._complete, methods=methods),
            Route("/v1/reward", self._reward, methods=methods),
            Route("/v1/columns", self._columns, methods=methods),
            Route("/v1/models", self._models),
        ]
        app = Starlette(routes=routes, exception_handlers={Refused: _refusal})
        config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", ws="none")
        await uvicorn.Server(config).serve(sockets=[self._socket])

    def _start(self) -> None:
        while self._queue and len(self._running) < self._limits.at_once:
            episode = self._queue.popleft()
            self._running[episode.key] = episode
            task = asyncio.get_running_loop().create_task(self._play(episode))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, episode: "_Episode") -> None:
        try:
            reward, fault = await self._outcome(episode)
        except Exception as error:  # noqa: BLE001  whatever it is, the rank must learn that the episode is over
            reward, fault = None, f"could not be run: {type(error).__name__}: {error}"
        del self._running[episode.key]
        for number in episode.waiting:
            self._waiting[number].whole.cancel()
        self._new = [each for each in self._new if each.sample != episode.sample]
        self._ended.append(
            {
                "sample": episode.sample,
                "reward": reward,
                "fault": fault,
                "requests": episode.requests,
                "refused": episode.refused,
                "columns": episode.columns,
            }
        )
        self._start()
        self._changed.set()

    async def _outcome(self, episode: "_Episode") -> tuple[float | None, str]:
        """(the reward of an episode, or None; why it has failed, or "")"""
        variables = {**direct_to_loopback(os.environ), **self._variables(episode)}
        try:
            agent = await (
                self._forks.begun(variables, self._limits.timeout_s)
                if self._forks is not None
                else asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={**users_environment(), **variables},
                    start_new_session=True,
                )
            )
        except (OSError, ValueError) as error:
            return None, f"could not be started: {error}"
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stderr is not None
        ends = [
            asyncio.ensure_future(_end_of(agent.stdout, None)),
            asyncio.ensure_future(_end_of(agent.stderr, sys.stderr)),
        ]
        writes = asyncio.ensure_future(_write(agent.stdin, episode.row))
        try:
            fault = await self._watched(agent, episode)
        finally:
            _kill(agent.pid, episode.key)
            async with asyncio.timeout(STATUS_S):
                while agent.returncode is None:  # `wait` would also wait for all that hold its output open
                    await asyncio.sleep(0.005)
            writes.cancel()
            await asyncio.wait(ends, timeout=LEAVE_S)
            said, complained = (end.result() if end.done() else "" for end in ends)
            for end in ends:
                end.cancel()
            if isinstance(agent, Forked):
                agent.close()
        if fault:
            return None, fault
        if agent.returncode:
            status, last = agent.returncode, complained.strip().rpartition("\n")[2]
            how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
            return None, f"{how}{f': {shortened(last, MOST_MESSAGE)}' if last else ''}"
        try:
            stated = _stated_reward(said)
        except Refused as error:
            return None, f"gave no reward: {error}"
        return (episode.reward if stated is None else stated), ""

    def _variables(self, episode: "_Episode") -> dict[str, str]:
        """The variables that an agent finds, by the names that OpenAI's clients read."""
        return {
            "OPENAI_BASE_URL": self._url,
            KEY: episode.key,
            "OPENAI_MODEL": MODEL,
            "AGENT_SEED": str(episode.seed),
        }

    async def _watched(self, agent: asyncio.subprocess.Process | Forked, episode: "_Episode") -> str:
        """Wait until an agent has ended, or must be: then why."""
        until_s = time.monotonic() + self._limits.timeout_s
        with _at_exit(asyncio.get_running_loop(), agent.pid, episode.over.set):
            while (left_s := until_s - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(episode.over.wait(), min(left_s, LOOK_EVERY_S))
                    return episode.fault
                most_bytes = self._limits.most_bytes
                used_bytes = used_memory(_processes(agent.pid, episode.key), most_bytes)
                if used_bytes > most_bytes:
                    return (
                        f"takes {used_bytes / 1e9:.1f} GB of memory; reward_memory_bytes allows "
                        f"{most_bytes / 1e9:.1f} GB"
                    )
        return f"did not end in {self._limits.timeout_s:g} s, which agent.timeout_s sets"

    def _of(self, request: Request) -> "_Episode":
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        episode = self._running.get(key)
        if episode is None:
            raise Refused(401, "no episode that runs has this key", "invalid_api_key")
        return episode

    async def _chat(self, request: Request) -> Response:
        return await self._counted(request, is_chat=True)

    async def _complete(self, request: Request) -> Response:
        return await self._counted(request, is_chat=False)

    async def _counted(self, request: Request, is_chat: bool) -> Response:
        episode = self._of(request)
        episode.bodies += 1  # each asks for an answer at least: what is too much is not read
        try:
            self._allow(episode, episode.bodies)
            return await self._answered(episode, await _body(request), is_chat)
        except Refused:
            episode.refused += 1
            raise

    def _allow(self, episode: "_Episode", count: int) -> None:
        """Raises Refused where an agent has asked for too many answers, or must end."""
        if count > self._limits.max_requests:
            episode.fail(
                f"asked for more than {self._limits.max_requests} answers, which agent.max_requests allows"
            )
        if episode.fault:
            raise Refused(429, f"the agent {episode.fault}", "rate_limit_exceeded")

    async def _answered(self, episode: "_Episode", document: Any, is_chat: bool) -> Response:
        """The answer to a request, once the policy has given it, or begun to where it is streamed. Raises Refused."""
        fields = read_request(document, is_chat, self._drawing, episode.raws)
        episode.requests += fields["n"]
        self._allow(episode, episode.requests)
        number, self._number = self._number, self._number + 1
        reply = self._reply(number, episode)
        self._new.append(Asked(number=number, sample=episode.sample, **fields))
        self._changed.set()

        @cache
        def said() -> tuple[list[Choice], dict[str, Any]]:
            """What the policy has said, and the answer that has it."""
            drawn = reply.whole.result()
            if "refused" in drawn:
                raise Refused(400, drawn["refused"], drawn["code"])
            choices = [Choice(*each) for each in drawn["choices"]]
            whole, raws = answer(
                document,
                is_chat,
                choices,
                drawn["prompt_tokens"],
                number,
                self._tool_format,
                drawn.get("prompt_ids", ()),
            )
            episode.raws |= raws
            return choices, whole

        if not fields["stream"]:
            await reply.whole
            return JSONResponse(said()[1])
        if (first := await reply.pieces.get()) is None:
            said()  # what is refused is no stream
        stream = Stream(document, is_chat, number, self._tool_format)
        return StreamingResponse(_events(stream, first, reply, said), media_type="text/event-stream")

    def _reply(self, number: int, episode: "_Episode") -> "_Reply":
        """What a request waits for until it is answered, or its episode over."""
        reply = self._waiting[number] = _Reply(asyncio.get_running_loop().create_future(), asyncio.Queue())
        episode.waiting.add(number)

        def is_over(_: Any) -> None:
            del self._waiting[number]
            episode.waiting.discard(number)
            reply.pieces.put_nowait(None)

        reply.whole.add_done_callback(is_over)
        return reply

    async def _reward(self, request: Request) -> Response:
        episode = self._of(request)
        episode.reward = reward_of(await _body(request))
        return JSONResponse({})

    async def _columns(self, request: Request) -> Response:
        episode = self._of(request)
        episode.columns = json.dumps(await _body(request))
        return JSONResponse({})

    async def _models(self, request: Request) -> Response:
        self._of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "the run"}
        return JSONResponse({"object": "list", "data": [model]})


class _Reply(NamedTuple):
    """What the policy says to a request.

    whole   its answer
    pieces  of it, where it is streamed, as they come; None when there is `whole`, or will be none
    """

    whole: asyncio.Future[Any]
    pieces: asyncio.Queue[Piece | None]


class _Episode:
    """An episode of an agent.

    key       for its requests
    requests  answers that it has asked for
    refused   requests that were refused
    bodies    requests that have come
    waiting   numbers of its requests that wait for the policy
    reward    that it has sent
    columns   that it has sent, as JSON
    raws      as in `read_request`
    fault     why it must end; "" while it need not
    over      whether it must end, or has
    """

    def __init__(self, sample: int, row: str, seed: int) -> None:
        self.sample, self.row, self.seed = sample, row, seed
        self.key = secrets.token_urlsafe(24)
        self.requests, self.refused, self.bodies, self.fault = 0, 0, 0, ""
        self.waiting: set[int] = set()
        self.reward: float | None = None
        self.columns = "{}"
        self.raws: dict[str, str] = {}
        self.over = asyncio.Event()

    def fail(self, fault: str) -> None:
        """Have the agent ended. The first reason counts."""
        self.fault = self.fault or fault
        self.over.set()


async def _events(
    stream: Stream,
    piece: Piece | None,
    reply: _Reply,
    said: Callable[[], tuple[list[Choice], dict[str, Any]]],
) -> AsyncIterator[str]:
    """The events of an answer. piece: the first one"""
    while piece is not None:
        for event in stream.of(piece):
            yield event
        piece = await reply.pieces.get()
    if not reply.whole.cancelled():  # else its episode is over
        for event in stream.end(*said()):
            yield event


def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    # OpenAI's client tries 429 again, against this header: an episode that is over is not worth it
    return JSONResponse(error.body, error.status, {"x-should-retry": "false"})


async def _body(request: Request) -> Any:
    """A request's JSON. Raises Refused."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BODY_BYTES:
            raise Refused(413, f"a request has at most {MOST_BODY_BYTES:,} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "the request is no JSON") from None


async def _write(stdin: asyncio.StreamWriter, row: str) -> None:
    with contextlib.suppress(ConnectionError):  # it need not read its row
        stdin.write(row.encode() + b"\n")
        await stdin.drain()
    stdin.close()


async def _end_of(output: asyncio.StreamReader, copy: Any) -> str:
    """The end of an output, once that is closed; all of it goes to `copy`."""
    end = b""
    try:
        while piece := await output.read(MOST_LINE_BYTES):
            end = (end + piece)[-MOST_LINE_BYTES:]
            if copy is not None:
                copy.write(piece.decode(errors="backslashreplace"))
                copy.flush()
    except asyncio.CancelledError:  # something that it has started holds its output open
        pass
    return end.decode(errors="backslashreplace")


def _stated_reward(said: str) -> float | None:
    """The reward in the last line of an output; None where that is no JSON object with one. Raises Refused."""
    try:
        document = json.loads(said.strip().rpartition("\n")[2])
    except (ValueError, RecursionError):
        return None
    return reward_of(document) if isinstance(document, dict) and "reward" in document else None


@contextlib.contextmanager
def _at_exit(loop: asyncio.AbstractEventLoop, pid: int, call: Callable[[], None]) -> Iterator[None]:
    """Call a function when a child has ended."""
    try:
        child = os.pidfd_open(pid)
    except ProcessLookupError:  # already
        call()
        yield
        return
    loop.add_reader(child, call)
    try:
        yield
    finally:
        loop.remove_reader(child)
        os.close(child)


def _processes(pid: int, key: str) -> list[psutil.Process]:
    """An agent and all that it has started. What has lost its parent is our keeper's child then; its environment
    says whose it is, unless it has another there."""
    processes = list[psutil.Process]()
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
    for process in psutil.Process(os.getppid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if process not in processes and process.environ().get(KEY) == key:
                processes.append(process)
    return processes


def _kill(pid: int, key: str) -> None:
    """Kill an agent and all that it has started; what has no trace of it ends with this process."""
    below = _processes(pid, key)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for process in below:
        with contextlib.suppress(psutil.Error):
            process.kill()
