"""The trackers of a run, as its flow sees them: processes that are told of commits, and may fail or be late.

Nothing waits for them. A tracker is told how many iterations are committed, and reads the rows itself: what it has
not come to stays in `metrics.jsonl`, and no queue grows. One that fails or hangs is named in one line, ended, and
begun again after a while; it then takes up what it lacks.
"""

import asyncio
import json
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flows.trackers.process import TRACKERS
from rlhf_tasks.config.base import RunConfig, TrackerName
from rlhf_tasks.config.public import public_document
from rlhf_tasks.system.child_output import ChildOutput
from rlhf_tasks.system.child_processes import kept_call, users_environment

ANSWER_S = 120.0  # that a tracker may take for its rows; its server may be slow
AGAIN_S = 60.0  # after a failure; twice as long after each further one
END_S = 30.0  # that all trackers together may take when the run has ended well
RETIRE_S = 3.0  # the same where it ends early


class Trackers:
    """The trackers of a run. Used on its event loop.

    say  writes a line for the user
    """

    def __init__(self, config: RunConfig, folder: Path, say: Callable[[str], None]) -> None:
        document = public_document(config)
        self._all = [_Tracker(name, folder, document, say) for name in config.report_to]

    async def tell(self, committed: int) -> None:
        """So many iterations are committed. Waits for no tracker."""
        for tracker in self._all:
            try:
                await tracker.tell(committed)
            except OSError as error:  # no process, no file
                tracker.failed(str(error))

    async def close(self, finished: bool) -> None:
        """End them; finished: the run has ended well, so they have END_S to take their last rows."""
        limit_s = END_S if finished else RETIRE_S
        await asyncio.gather(*(tracker.close(finished, limit_s) for tracker in self._all))
        self._all = []


class _Tracker:
    """One tracker and its process, which begins with the first commit."""

    def __init__(self, name: TrackerName, folder: Path, config: object, say: Callable[[str], None]) -> None:
        self._name, self._folder, self._config, self._say = name, folder, config, say
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._committed = self._done = 0
        self._waits_since_s = 0.0  # since when there are rows that it has not answered for; 0: none
        self._next_try_s = 0.0
        self._pause_s = AGAIN_S
        self._fault = ""

    async def tell(self, committed: int) -> None:
        self._committed = committed
        if self._process is None and time.monotonic() >= self._next_try_s:
            await self._begin()
        elif self._waits_since_s and time.monotonic() - self._waits_since_s > ANSWER_S:
            self.failed(f"no answer in {ANSWER_S:g} s")
        self._send({"rows": committed})

    async def close(self, finished: bool, limit_s: float) -> None:
        if finished and self._process is None and self._committed > self._done:
            with suppress(OSError):
                await self._begin()
        self._send({"rows": self._committed, "finished": finished})
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=limit_s)
        if finished and self._done < self._committed:
            why = f" ({self._fault})" if self._fault else f" (no answer in {limit_s:g} s)"
            self._say(
                f"{self._name} lacks iterations {self._done + 1} to {self._committed}{why}; they are in "
                "metrics.jsonl"
            )
        process = self._process
        self._end()
        if self._reading is None:
            return
        _, left = await asyncio.wait([self._reading], timeout=END_S)
        if left and process is not None:  # its keeper does not end what it has started
            process.kill()
            await asyncio.wait([self._reading], timeout=END_S)

    async def _begin(self) -> None:
        place = self._folder / TRACKERS
        place.mkdir(exist_ok=True)
        with ChildOutput(f"the process of {self._name}", place / f"{self._name}.log") as output:
            self._process = await asyncio.create_subprocess_exec(
                *kept_call("flows.trackers.process:serve"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=output,
                env=users_environment(),
                start_new_session=True,  # Ctrl-C is the run's to handle
            )
        self._reading = asyncio.create_task(self._read(self._process))
        self._send({"tracker": self._name, "folder": str(self._folder), "config": self._config})

    def _send(self, message: dict[str, object]) -> None:
        """Send a message, or leave it out where the tracker has not read the ones before: a later one says more."""
        if self._process is None:
            return
        pipe = self._process.stdin
        assert pipe is not None
        if pipe.is_closing() or (pipe.transport.get_write_buffer_size() and "finished" not in message):
            return
        pipe.write(json.dumps(message).encode() + b"\n")
        self._waits_since_s = self._waits_since_s or time.monotonic()

    async def _read(self, process: Process) -> None:
        """Follow a process's answers until it ends."""
        assert process.stdout is not None
        fault = ""
        with suppress(ConnectionError):
            async for line in process.stdout:
                answer = json.loads(line)
                fault = answer.get("fault", "")
                self._done = answer.get("done", self._done)
                self._waits_since_s = time.monotonic()
                if self._done >= self._committed:
                    self._fault, self._pause_s, self._waits_since_s = "", AGAIN_S, 0.0
        status = await process.wait()
        if process is self._process and (fault or status):
            self.failed(fault or f"its process has ended with status {status}")
        elif process is self._process:
            self._process = None

    def failed(self, fault: str) -> None:
        """End the process, and say so once for as long as it does not work."""
        first, self._fault = not self._fault, fault
        self._next_try_s = time.monotonic() + self._pause_s
        if first:
            self._say(
                f"{self._name} has failed, the run goes on: {fault}. It is tried again later; what it has printed "
                f"is in {self._folder / TRACKERS / self._name}.log"
            )
        self._pause_s *= 2
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        self._waits_since_s = 0.0
        if process is not None:
            with suppress(ProcessLookupError):
                process.terminate()  # its keeper, which ends all that it has started
