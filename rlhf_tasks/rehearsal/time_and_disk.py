"""Virtual time, and the disk: how long reads and writes take that share a host's rate, and which commits there are.

The event loop's clock jumps to the next timer whenever nothing else is left to do.
"""

import asyncio
import heapq
import itertools
import math
import selectors
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.checkpoint.manifest import READERS
from prefect_rlhf.rlhf_tasks.protocol.messages import WriteCommit
from prefect_rlhf.rlhf_tasks.spec import NodeResult
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount


class NothingLeft(RuntimeError):
    """Nothing is to happen any more, although the program waits for something."""


class VirtualTime(asyncio.SelectorEventLoop):
    """A loop whose seconds pass only by jumps. Code that takes its time from the loop needs no change to run on it.

    No thread is ever started. What code hands to an executor runs at once, on the loop; how long that takes in
    virtual time it says by `takes`. An executor does one thing at a time, as one with a single thread does.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jumps(self))
        self._taken: Coroutine[Any, Any, None] | None = None
        self._busy: defaultdict[Executor | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._working: set[asyncio.Task[None]] = set()

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self._now_s += seconds

    def takes(self, work: Coroutine[Any, Any, None]) -> None:
        """Called by a function in an executor: it ends when `work` has, with the error that `work` raises."""
        assert self._taken is None, "a function takes one piece of work"
        self._taken = work

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """As the base class's. Cancelling the future leaves the work running, as a thread does."""
        future: asyncio.Future[Any] = self.create_future()
        task = self.create_task(self._work(executor, func, args, future))
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return future

    async def _work(
        self,
        executor: Executor | None,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        future: asyncio.Future[Any],
    ) -> None:
        async with self._busy[executor]:
            try:
                value = func(*args)
                work, self._taken = self._taken, None
                if work is not None:
                    await work
            except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the future
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(value)


class _Jumps(selectors.SelectSelector):
    """Waits for no file: a wait of the loop makes time jump instead."""

    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise NothingLeft("nothing is left to happen")
        if timeout > 0:
            self._loop.jump(timeout)
        return []


COMMIT_S = 0.05  # of a commit besides its bytes: manifest, journals, rename, and their syncs
PER_FILE_S = 2e-4  # to look at one file of a commit, on a disk that hosts share


class Disk:
    """One host's way to the disk. Everything that reads or writes at the same time gets an equal share of its rate.

    bytes_per_s         of all that the host reads and writes
    thread_bytes_per_s  the most of one thread, which hashes what it writes
    """

    def __init__(self, loop: VirtualTime, bytes_per_s: float, thread_bytes_per_s: float) -> None:
        self._loop = loop
        self._bytes_per_s, self._thread_bytes_per_s = bytes_per_s, thread_bytes_per_s
        self._slowness = 1.0
        self._each = 0.0  # bytes that a thread would have moved that has been there all the time
        self._since_s = loop.time()
        self._moving: list[_Moving] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def rate(self) -> float:
        """Bytes per second that each thread moves now."""
        shared = self._bytes_per_s / max(1, len(self._moving))
        return min(self._thread_bytes_per_s, shared) / self._slowness

    def slow_down(self, factor: float) -> None:
        """From now on everything takes `factor` times as long as until now."""
        self._catch_up()
        self._slowness *= factor
        self._plan()

    async def move(self, size_bytes: float, owner: object = None) -> None:
        """Read or write so many bytes. Cancelling it ends it.

        owner  by whom `in_progress` tells it
        """
        if size_bytes <= 0:
            return
        self._catch_up()
        done: asyncio.Future[None] = self._loop.create_future()
        mine = _Moving(self._each + size_bytes, next(self._numbers), size_bytes, owner, done)
        heapq.heappush(self._moving, mine)
        self._plan()
        try:
            await done
        except asyncio.CancelledError:
            self._catch_up()
            if mine in self._moving:
                self._moving.remove(mine)
                heapq.heapify(self._moving)
            self._plan()
            raise

    def in_progress(self) -> list[tuple[object, float]]:
        """(owner, bytes moved so far) of what is being moved."""
        self._catch_up()
        return [(one.owner, one.size_bytes - (one.until - self._each)) for one in self._moving]

    def _catch_up(self) -> None:
        now = self._loop.time()
        self._each += self.rate * (now - self._since_s)
        self._since_s = now

    def _plan(self) -> None:
        """Set the timer to when the next thread has moved all its bytes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._moving:
            wait_s = max(0.0, (self._moving[0].until - self._each) / self.rate)
            self._timer = self._loop.call_later(wait_s, self._moved)

    def _moved(self) -> None:
        self._catch_up()
        # All that end together, whatever was rounded; and what is left moves in less time than the clock can tell.
        reached = self._each * (1 + 1e-12) + self.rate * math.ulp(self._loop.time())
        while self._moving and self._moving[0].until <= reached:
            done = heapq.heappop(self._moving).done
            if not done.done():
                done.set_result(None)
        self._plan()


class _Moving(NamedTuple):
    """Something that is moved: when it ends, in bytes of a thread that has been there all the time."""

    until: float
    number: int
    size_bytes: float
    owner: object
    done: "asyncio.Future[None]"


class CommitsOnDisk:
    """The commits of a run, as the real ones lie in its folder: step -> cursor."""

    def __init__(self) -> None:
        self.cursors: dict[int, int] = {}

    def add(self, order: WriteCommit, results: Mapping[int, Mapping[str, Mapping[int, NodeResult]]]) -> None:
        """A commit's folder has got its name; the arguments are those of `Snapshots.commit`."""
        self.cursors[order.step] = order.cursor

    def decided(self) -> list[dict[str, Any]]:
        """The journal's lines of decisions: none, where nothing is measured."""
        return []

    def prune(self, keep_last: int) -> list[int]:
        """Remove all but the newest commits; gives the removed steps."""
        old = sorted(self.cursors)[:-keep_last]
        for step in old:
            del self.cursors[step]
        return old


class SimulatedSnapshots:
    """What finds and writes commits (`rlhf_tasks.protocol.commit.Snapshots`), at the cost of the real one.

    When an attempt begins, all bytes of the newest commit are hashed, READERS files at once (`checkpoint/`). A commit
    itself reads nothing, and neither does the removal of older ones.

    moved         bytes written and removed

    commits       what is on the disk, whatever attempt wrote it
    disk          of the controller's host
    commit_bytes  of one commit; n_files: its files
    on_written    called with the seconds that a commit took
    """

    def __init__(
        self,
        loop: VirtualTime,
        commits: CommitsOnDisk,
        disk: Disk,
        commit_bytes: float,
        n_files: int,
        keep_last: int,
        on_written: Callable[[float], None],
    ) -> None:
        self._loop, self._commits, self._disk = loop, commits, disk
        self._commit_bytes, self._n_files, self._keep_last = commit_bytes, n_files, keep_last
        self.moved = ByteCount()
        self._alive, self._on_written = True, on_written
        self._reading: list[asyncio.Task[None]] = []
        self.writing_since_s: float | None = None

    def died(self) -> None:
        """The controller's process is gone: it reads no more, and what it was writing is never renamed."""
        self._alive = False
        for read in self._reading:
            read.cancel()

    def latest(self) -> tuple[int, int] | None:
        step = max(self._commits.cursors, default=None)
        if step is None:
            return None
        self._loop.takes(self._verify())
        return step, self._commits.cursors[step]

    def decided(self) -> list[dict[str, Any]]:
        return self._commits.decided()

    def commit(
        self, order: WriteCommit, results: Mapping[int, Mapping[str, Mapping[int, NodeResult]]]
    ) -> None:
        self._loop.takes(self._commit(order, results))

    def prune(self) -> None:
        for _ in self._commits.prune(self._keep_last):
            self.moved.add(round(self._commit_bytes))

    async def _verify(self) -> None:
        part_bytes = self._commit_bytes / READERS
        self._reading = [self._loop.create_task(self._disk.move(part_bytes)) for _ in range(READERS)]
        await asyncio.gather(*self._reading)

    async def _commit(
        self, order: WriteCommit, results: Mapping[int, Mapping[str, Mapping[int, NodeResult]]]
    ) -> None:
        began_s = self.writing_since_s = self._loop.time()
        await asyncio.sleep(COMMIT_S + PER_FILE_S * self._n_files)
        if self._alive:
            self._commits.add(order, results)
            self._on_written(self._loop.time() - began_s)
        self.writing_since_s = None
