"""Episodes of a rollout_func as forks of one process, which has loaded the libraries that they need.

TRL takes seconds to import, a fork starts at once. The user's own module is loaded in each fork: no two episodes
share what it makes when it is imported, such as a connection to an environment.
"""

import ast
import asyncio
import gc
import json
import os
import select
import socket
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect_rlhf.rlhf_tasks.system.child_processes import python_call, users_environment
from prefect_rlhf.rlhf_tasks.system.reading import parsed
from prefect_rlhf.rlhf_tasks.user_code.agents.rollouts import play, tokenizer_at

LIBRARIES = ("accelerate", "datasets", "numpy", "peft", "torch", "transformers", "trl")
"""What is loaded before, where a user's module names it: they begin no thread and open nothing when imported."""
MOST_BYTES = 1 << 16  # of a message
STREAMS = (0, 1, 2)


class Forks:
    """Begins episodes, from the process of agents. settings: of `rollouts.play`"""

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._door, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_open, self._lock = False, asyncio.Lock()
        self._beginning: deque[asyncio.Future[int]] = deque()
        self._statuses: dict[int, int] = {}  # by process
        self._is_lost = False

    async def begun(self, variables: Mapping[str, str], timeout_s: float) -> "Forked":
        """An episode that has begun. variables: of its environment. Raises OSError."""
        pairs = [socket.socketpair() for _ in STREAMS]
        pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        message, theirs = json.dumps(dict(variables)).encode(), [their for _, their in pairs]
        try:
            async with self._lock:
                await self._open()
                self._beginning.append(pid)
                await asyncio.to_thread(
                    socket.send_fds, self._door, [message], [each.fileno() for each in theirs]
                )
            async with asyncio.timeout(timeout_s):
                number = await pid
        finally:
            for their in theirs:
                their.close()
        return Forked(self, number, [await asyncio.open_connection(sock=our) for our, _ in pairs])

    async def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        command = python_call(f"{__name__}:{serve.__name__}", self._settings)
        await asyncio.create_subprocess_exec(*command, stdin=self._theirs.fileno(), env=users_environment())
        self._theirs.close()
        self._door.setblocking(True)
        asyncio.get_running_loop().add_reader(self._door, self._hear)

    def _hear(self) -> None:
        if not (message := self._door.recv(MOST_BYTES)):
            self._is_lost = True
            asyncio.get_running_loop().remove_reader(self._door)
            for pid in self._beginning:
                if not pid.done():
                    pid.set_exception(OSError("the process that loads its libraries has ended"))
            return
        said = json.loads(message)
        if "status" in said:
            self._statuses[said["pid"]] = said["status"]
            return
        self._statuses.pop(said["pid"], None)
        if not (pid := self._beginning.popleft()).done():
            pid.set_result(said["pid"])

    def status(self, pid: int) -> int | None:
        """Of an episode, as `Process.returncode`; None while it runs."""
        return self._statuses.get(pid, -9 if self._is_lost else None)


class Forked:
    """An episode that runs: what `asyncio.subprocess.Process` says of a program."""

    def __init__(
        self, forks: Forks, pid: int, streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> None:
        self._forks, self._streams, self.pid = forks, streams, pid
        (_, self.stdin), (self.stdout, _), (self.stderr, _) = streams

    @property
    def returncode(self) -> int | None:
        """Its status; None while it runs."""
        return self._forks.status(self.pid)

    def close(self) -> None:
        """Close its streams."""
        for _, writer in self._streams:
            writer.close()


def serve(settings: str) -> None:
    """Fork an episode for each message on standard input, a socket, until that is closed, and say its process and its
    status. With a message come the descriptors of its streams."""
    door = socket.socket(fileno=os.dup(0))
    _load_libraries(json.loads(settings))
    gc.freeze()  # what no collection touches, forks share
    running, poll = dict[int, int](), select.poll()  # by descriptors of processes
    poll.register(door, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != door.fileno():
                poll.unregister(ready)
                pid, status = os.waitpid(running.pop(ready), 0)
                os.close(ready)
                _say(door, pid=pid, status=os.waitstatus_to_exitcode(status))
                continue
            try:
                message, streams, _, _ = socket.recv_fds(door, MOST_BYTES, len(STREAMS))
            except ConnectionError:  # it was closed with something unread
                return
            if not message:
                return
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                door.close()
                _play(settings, streams, json.loads(message))
            for each in streams:
                os.close(each)
            _say(door, pid=pid)
            child = os.pidfd_open(pid)
            running[child] = pid
            poll.register(child, select.POLLIN)


def _say(door: socket.socket, **said: Any) -> None:
    with suppress(ConnectionError):  # the next message is then that it is closed
        door.send(json.dumps(said).encode())


def _play(settings: str, streams: list[int], variables: Mapping[str, str]) -> None:
    """Play an episode in this fork, and end it."""
    status = 1
    try:
        os.setsid()
        for ours, stream in zip(streams, STREAMS, strict=True):
            os.dup2(ours, stream)
            os.close(ours)
        os.environ.update(variables)
        play(settings)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  whatever it is, this fork must not go back into the loop
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _load_libraries(settings: Mapping[str, Any]) -> None:
    """Load what the module of a rollout_func imports of LIBRARIES, and the tokenizer where it reads it. What fails
    here fails again in the episodes, which say so."""
    path = Path(settings["function"].rpartition(":")[0])
    with suppress(Exception):
        source = path.read_bytes()
        if b"processing_class" in source:
            tokenizer_at(settings["tokenizer"])
        for node in _imports(source):
            exec(compile(ast.Module([node], []), str(path), "exec"), {})


def _imports(source: bytes) -> Iterator[ast.stmt]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        if all(name.partition(".")[0] in LIBRARIES for name in names):
            yield node
