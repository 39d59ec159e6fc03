"""An event loop in virtual time: its clock jumps to the next timer whenever nothing else is left to do."""

import asyncio
import selectors
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any


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
        """As the base class's. Cancelling the future leaves the work going on, as a thread does."""
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
