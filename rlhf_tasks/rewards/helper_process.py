"""A process of the user's own code beside a rank, as the rank sees it: started, watched, ended.

The user's code may import anything, print, hang, fork or crash. None of that may affect the rank, whose threads
belong to the engine. The process is started by `subprocess`: Dask's workers are daemonic and may have no
multiprocessing children. Two keeper processes (system/child_processes.py) stand between it and the rank. They end it
and all that it has started when the rank ends or when one of them is killed.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import psutil

from rlhf_tasks.rewards.helper import STACK_SIGNAL
from rlhf_tasks.rewards.user_code import at_line, traced, users_frames
from rlhf_tasks.system.child_lines import LOOK_EVERY_S, Lines
from rlhf_tasks.system.child_output import ChildOutput
from rlhf_tasks.system.child_processes import kept_call, users_environment

STACK_S = 1.0  # that the process may take to dump its stack
END_S = 10.0  # that a keeper may take to kill all its descendants
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class TooLarge(Exception):
    """The process and those that it has started use more memory than is allowed."""

    def __init__(self, used_bytes: int) -> None:
        super().__init__()
        self.used_bytes = used_bytes


class HelperProcess:
    """A running process of the user's code and its keeper.

    serve    `module:function` that it runs, with the descriptor of the file to dump stacks to
    what     it runs, for a line where it prints too much
    started  whether it has been sent what it begins with
    """

    def __init__(self, serve: str, what: str) -> None:
        self.started = False
        self._stacks = os.memfd_create("stacks")
        self._output = ChildOutput(f"the process of {what}")
        with self._output as output:
            self._keeper = subprocess.Popen(
                kept_call(serve, str(self._stacks)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=[self._stacks],
                env=users_environment(),
                start_new_session=True,
            )
        self.lines = Lines(self._keeper)
        self._pid: int | None = None
        self._looked_s = 0.0

    def start(self, stated: Mapping[str, Any], until_s: float) -> None:
        """Send it what it begins with. Raises TimeoutError at `until_s` (time.monotonic())."""
        self.lines.send(json.dumps(stated), until_s)
        reply = self.lines.read(until_s)
        self._pid = None if reply is None else reply["pid"]
        self.started = True

    def stack(self) -> tuple[str, str]:
        """Where the helper is now: (` at FILE:LINE`, the frames of the user's code)."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, STACK_SIGNAL)
            until_s = time.monotonic() + STACK_S
            while not self._written().strip() and time.monotonic() < until_s:
                time.sleep(0.02)
            time.sleep(0.02)
        return self.written_stack()

    def written_stack(self) -> tuple[str, str]:
        """The same for the stack that the helper dumped last."""
        found = [
            _FRAME.fullmatch(line)
            for line in self._written().rpartition("(most recent call first):")[2].split("\n")
        ]
        frames = [traceback.FrameSummary(m[1], int(m[2]), m[3]) for m in reversed(found) if m is not None]
        theirs = users_frames(frames)
        return at_line(theirs), traced(theirs)

    def status(self) -> int:
        """The exit status of the helper, as its keeper returns it when it ends: 128 + N after signal N."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(END_S)
        return self._keeper.poll() or 0

    def end(self) -> None:
        """Ask the keeper to kill everything. Called from any thread."""
        self._keeper.terminate()

    def close(self) -> None:
        """Kill everything and reap the keeper."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what is still buffered is no longer needed
            self._keeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(END_S)
        self._keeper.kill()
        self._keeper.wait()
        self._keeper.stdout.close()
        self._output.close()
        os.close(self._stacks)

    def _written(self) -> str:
        return os.pread(self._stacks, 1 << 20, 0).decode(errors="replace")

    def refuse_large(self, most_bytes: int) -> None:
        """Raises TooLarge when the helper and its children use more than `most_bytes` bytes.

        Looks at most every LOOK_EVERY_S seconds: first roughly (RSS), then without counting shared pages twice (PSS).
        """
        if time.monotonic() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = time.monotonic()
        with contextlib.suppress(psutil.Error):  # a process that is ending
            processes = psutil.Process(self._keeper.pid).children(recursive=True)
            if sum(process.memory_info().rss for process in processes) > most_bytes:
                used_bytes = sum(process.memory_full_info().pss for process in processes)
                if used_bytes > most_bytes:
                    raise TooLarge(used_bytes)

    def how_it_ended(self) -> str | None:
        """How it ended by itself, for sentences; None where it was killed from outside."""
        status = self.status()
        if status in (128 + signal.SIGKILL, 128 + signal.SIGTERM) or status < 0:
            return None
        if status > 128 and status - 128 in {s.value for s in signal.Signals}:
            return signal.Signals(status - 128).name
        return f"exit status {status}"


Owned = TypeVar("Owned", bound=HelperProcess)


class HelperOwner(Generic[Owned]):
    """Owns at most one helper process, which a subclass starts with its first request, and again after it was lost.

    helper  the running process; None: none runs
    closed  whether no further one may start
    """

    def __init__(self) -> None:
        self.helper: Owned | None = None
        self.closed = False

    def close(self) -> None:
        """End the helper from any thread; no other starts. A request in progress fails."""
        self.closed = True
        helper = self.helper  # read once: the thread that asks it may set it to None meanwhile
        if helper is not None:
            helper.end()

    def end(self) -> None:
        """End the helper and reap it. Called from one thread at a time."""
        helper, self.helper = self.helper, None
        if helper is not None:
            helper.close()
