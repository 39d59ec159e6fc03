"""A process of the user's own code beside a rank, as the rank sees it: started, asked, watched, ended.

The user's code may import anything, print, hang, fork or crash. None of that may affect the rank, whose threads
belong to the engine. The process is started by `subprocess`: Dask's workers are daemonic and may have no
multiprocessing children. Two keeper processes (system/child_processes.py) stand between it and the rank. They end it
and all that it has started when the rank ends or when one of them is killed.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from prefect_rlhf.rlhf_tasks.system.child_pipes import END_S, LOOK_EVERY_S, ChildOutput, Lines, end_keeper
from prefect_rlhf.rlhf_tasks.system.child_processes import kept_call, users_environment
from prefect_rlhf.rlhf_tasks.user_code.child import STACK_SIGNAL
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError, at_line, late_message, traced, users_frames

MOST_LOST = 4
"""As many answers or samples of a batch may each cost a process, where such are skipped."""
ENDING_S = 20.0
"""After its time is over, until late code is reported: its stack is asked for and its processes are ended."""
SEARCH_S = 5.0  # that the search for the answer that the code fails on may take
STACK_S = 1.0  # that the process may take to dump its stack
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Lost(RewardError):
    """The process has ended, or must be ended, in a call of the user's code.

    called  what it called, as it has said
    place   as in RewardError; None where that call was about several, or others waited beside it
    """

    called: str = ""


class Killed(Lost):
    """It was killed from outside, not by what the code did."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a process runs, and what it may take.

    kind         `module:class` of what answers in it, see child.py
    what         it runs, for sentences
    who          what it says that it calls -> that, for sentences
    begin        what it begins with
    timeout_s    seconds of an answer, which `timeout_key` of the configuration sets
    most_bytes   of memory, with all that it starts, which reward_memory_bytes sets
    """

    kind: str
    what: str
    who: Callable[[str], str]
    begin: Mapping[str, Any]
    timeout_s: float
    timeout_key: str
    most_bytes: int


class UserProcess:
    """A process of the user's code, which starts with the first request, and again after it was lost."""

    def __init__(self, terms: Terms) -> None:
        self._terms, self._closed = terms, False
        self._running: _Running | None = None
        self._unread: list[dict[str, Any]] = []  # replies
        self._was_told = False  # whether it was told something since the last request
        # Of the request:
        self._called, self._place, self._since_s = "", None, 0.0

    @property
    def pid(self) -> int | None:
        """Its id; None where it does not run."""
        return self._running and self._running.pid

    @property
    def who(self) -> str:
        """What it calls, for sentences."""
        return self._terms.who(self._called) if self._called else f"the process of {self._terms.what}"

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send a request that is not answered, and wait for nothing. A process that is lost over it is started anew
        by the next `ask`."""
        running = self._started()
        self._was_told = True
        try:
            running.begin(self._terms, time.monotonic() + self._terms.timeout_s)
            running.lines.offer(json.dumps(request))
            running.refuse_large(self._terms.most_bytes)
        except (_TooLarge, TimeoutError):
            running.end()

    def _started(self) -> "_Running":
        running = self._running = self._running or _Running(self._terms)
        if self._closed:
            running.end()
        return running

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises RewardError where the code fails, cannot be loaded, or is late as a whole, and Lost where one call is
        late or too large, or ends the process. Then the process is to be ended.
        """
        return self._answer(request, time.monotonic())

    def _answer(self, request: Mapping[str, Any], asked_s: float) -> dict[str, Any]:
        terms = self._terms
        until_s = asked_s + terms.timeout_s
        self._called, self._place, self._since_s = "", None, asked_s
        was_told, self._was_told = self._was_told, False
        running = self._started()
        look = partial(running.refuse_large, terms.most_bytes)
        fault: RewardError | None = None
        try:
            self._ready(until_s)
            running.lines.send(self._timed(request, until_s), until_s, look)
            while (reply := running.lines.read(until_s, look)) is not None:
                if not self._is_call(reply):
                    if "fault" not in reply:
                        return reply
                    fault = _fault_of(reply)
                    if not reply["searching"]:
                        break
                    until_s = time.monotonic() + SEARCH_S
        except TimeoutError:
            if fault is None:
                raise self.late(asked_s) from None
        except _TooLarge as error:
            if fault is None:
                raise self._large(running, error) from None
        if fault is None and was_told and not self._called and not self._closed:
            self.end()  # it has ended over what it was told before
            return self._answer(request, asked_s)
        raise fault or self._ended(running)

    def submit(self, request: Mapping[str, Any], until_s: float | None = None) -> None:
        """Send a request whose reply comes among `replies`, whenever it does. until_s: time.monotonic() by which its
        answer is due; None: it has none. Raises RewardError where no process begins."""
        begun_s = time.monotonic()
        if self._running is None:
            self._called, self._place, self._since_s = "", None, begun_s
        try:
            running = self._ready(begun_s + self._terms.timeout_s)
        except TimeoutError:
            raise self.late(begun_s) from None
        running.lines.offer(json.dumps(request) if until_s is None else self._timed(request, until_s))

    def replies(self) -> list[dict[str, Any]]:
        """The replies to what was submitted that have come since. Raises as `ask` does, but for what is late: the
        replies before are still there at the next call."""
        running = self._running
        if running is None and self._closed:
            raise RewardError(f"the process of {self._terms.what} is closed.")
        if running is None:
            return []
        lines, has_ended = running.lines.arrived()
        self._unread += [line for line in lines if not self._is_call(line)]
        replies = [line for line in self._unread if "fault" not in line]
        if replies:
            self._unread = [line for line in self._unread if "fault" in line]
            return replies
        if self._unread or has_ended:
            raise _fault_of(self._unread[0]) if self._unread else self._ended(running)
        try:
            running.refuse_large(self._terms.most_bytes)
        except _TooLarge as error:
            raise self._large(running, error) from None
        return []

    def watch(self, waiting: select.poll) -> None:
        """Have a wait end where a reply comes."""
        if self._running is not None:
            self._running.lines.watch(waiting)

    def _ready(self, until_s: float) -> "_Running":
        """The process, which has said its id. Raises TimeoutError."""
        if self._running is None:
            self._unread = []
        running = self._started()
        running.begin(self._terms, until_s)
        if running.pid is None:
            running.pid = (running.lines.read(until_s) or {}).get("pid")
        return running

    def _timed(self, request: Mapping[str, Any], until_s: float) -> str:
        # time.monotonic() is the same in both processes
        return json.dumps({**request, "until_s": until_s, "timeout_s": self._terms.timeout_s})

    def _is_call(self, reply: Mapping[str, Any]) -> bool:
        if "at" in reply:
            (self._called, self._place), self._since_s = reply["at"], time.monotonic()
        return "at" in reply

    def _large(self, running: "_Running", error: "_TooLarge") -> RewardError:
        where, frames = running.stack()
        return self._lost(
            f"{self.who} takes {error.used_bytes / 1e9:.1f} GB of memory{where}; reward_memory_bytes allows "
            f"{self._terms.most_bytes / 1e9:.1f} GB. Correct it or raise reward_memory_bytes.",
            frames,
        )

    def late(self, asked_s: float) -> RewardError:
        """Why what was asked at `asked_s` (time.monotonic()) has no answer when its time is over: Lost where one call
        has taken most of that time."""
        running = self._running
        assert running is not None, "a process was asked"
        where, frames = running.stack()
        message = late_message(self.who, self._terms.timeout_s, where, self._terms.timeout_key)
        now_s = time.monotonic()
        if now_s - self._since_s > (now_s - asked_s) / 2:
            return self._lost(message, frames)
        return RewardError(message, frames, self._place)  # the batch as a whole is late

    def _ended(self, running: "_Running") -> RewardError:
        """Why it has ended without a reply."""
        how = running.how_it_ended()
        if self._closed:
            return RewardError(f"the process of {self._terms.what} is closed.")
        if how is None:
            return Killed(
                f"the process of {self._terms.what} was killed from outside, as the system does when memory runs out."
            )
        where, frames = running.written_stack()
        return self._lost(
            f"{self.who} ended {'its process ' if self._called else ''}with {how}{where}.", frames
        )

    def _lost(self, message: str, frames: str) -> RewardError:
        if not self._called:  # the code as a whole
            return RewardError(message, frames)
        error = Lost(message, frames, self._place)
        error.called = self._called
        return error

    def end(self) -> None:
        """End the process and reap it; the next request starts another. Called from one thread at a time."""
        running, self._running, self._was_told = self._running, None, False
        if running is not None:
            running.close()

    def close(self) -> None:
        """End the process from any thread; no other starts. A request in progress fails."""
        self._closed = True
        running = self._running  # read once: the thread that asks may set it to None meanwhile
        if running is not None:
            running.end()


def _fault_of(reply: Mapping[str, Any]) -> RewardError:
    return RewardError(reply["fault"], reply["traceback"], reply["place"])


def used_memory(processes: Sequence[psutil.Process], most_bytes: int) -> int:
    """Bytes that processes use: roughly (RSS), and where these are more than `most_bytes`, without counting shared
    pages twice (PSS)."""
    rough = _sum(processes, lambda process: process.memory_info().rss)
    return rough if rough <= most_bytes else _sum(processes, lambda process: process.memory_full_info().pss)


def _sum(processes: Sequence[psutil.Process], of: Callable[[psutil.Process], int]) -> int:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it is ending
            total += of(process)
    return total


class _TooLarge(Exception):
    """The process and those that it has started use more memory than is allowed."""

    def __init__(self, used_bytes: int) -> None:
        super().__init__()
        self.used_bytes = used_bytes


class _Running:
    """A running process and its keeper. pid: of the process, once it has said it"""

    def __init__(self, terms: Terms) -> None:
        self.pid: int | None = None
        self._stacks = os.memfd_create("stacks")
        self._output = ChildOutput(f"the process of {terms.what}")
        with self._output as output:
            self._keeper = subprocess.Popen(
                kept_call("prefect_rlhf.rlhf_tasks.user_code.child:serve", str(self._stacks), terms.kind),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=[self._stacks],
                env=users_environment(),
                start_new_session=True,
            )
        self.lines = Lines(self._keeper)
        self._has_begun = False
        self._looked_s = 0.0

    def begin(self, terms: Terms, until_s: float) -> None:
        """Send what it begins with, once, until time.monotonic() is `until_s`. Raises TimeoutError."""
        if not self._has_begun:
            self._has_begun = True
            self.lines.send(json.dumps(terms.begin), until_s)

    def stack(self) -> tuple[str, str]:
        """Where the process is now: (` at FILE:LINE`, the frames of the user's code)."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, STACK_SIGNAL)
            until_s = time.monotonic() + STACK_S
            while not self._written().strip() and time.monotonic() < until_s:
                time.sleep(0.02)
            time.sleep(0.02)
        return self.written_stack()

    def written_stack(self) -> tuple[str, str]:
        """The same for the stack that the process dumped last."""
        last = self._written().rpartition("(most recent call first):")[2]
        matches = [m for line in last.split("\n") if (m := _FRAME.fullmatch(line)) is not None]
        frames = users_frames(traceback.FrameSummary(m[1], int(m[2]), m[3]) for m in reversed(matches))
        return at_line(frames), traced(frames)

    def _written(self) -> str:
        return os.pread(self._stacks, 1 << 20, 0).decode(errors="replace")

    def refuse_large(self, most_bytes: int) -> None:
        """Raises _TooLarge when the process and its children use more than `most_bytes` bytes.

        Looks at most every LOOK_EVERY_S seconds.
        """
        if time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        with contextlib.suppress(psutil.Error):  # a keeper that is ending
            used_bytes = used_memory(psutil.Process(self._keeper.pid).children(recursive=True), most_bytes)
            if used_bytes > most_bytes:
                raise _TooLarge(used_bytes)

    def how_it_ended(self) -> str | None:
        """How it ended by itself, for sentences; None where it was killed from outside."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(END_S)
        status = self._keeper.poll() or 0  # as its keeper returns it: 128 + N after signal N
        if status in (128 + signal.SIGKILL, 128 + signal.SIGTERM) or status < 0:
            return None
        if status > 128 and status - 128 in {s.value for s in signal.Signals}:
            return signal.Signals(status - 128).name
        return f"exit status {status}"

    def end(self) -> None:
        """Ask the keeper to kill everything. Called from any thread."""
        self._keeper.terminate()

    def close(self) -> None:
        """Kill everything and reap the keeper."""
        end_keeper(self._keeper)
        self._output.close()
        os.close(self._stacks)
