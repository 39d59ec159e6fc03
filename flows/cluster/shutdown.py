"""Ends a run on Ctrl-C or SIGTERM: within `END_S`, whatever the run is doing. No process is left.

Prefect's SIGTERM handler raises its exception wherever the main thread happens to be. There a callback of the event
loop, one of Prefect's own tasks or a serializer may swallow it, and the run continues. So a separate thread reads
signals from Python's wake-up descriptor, to which the interpreter writes them whichever handler is installed. It
cancels the run, and kills what has not ended in time.

A worker of Prefect's cancels a flow run by SIGTERM, and by SIGKILL 30 s later. A run that ends by itself at its next
commit has a part of that time to do so: see `patient`.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.util import spawnv_passfds
from typing import Any, TypeVar

import psutil

from prefect_rlhf.rlhf_tasks.system.child_processes import python_call, track_resources

T = TypeVar("T")

END_S = 12.0  # from the signal until what is left is killed
SOON_S = 2.0  # to wait for called-off work; what takes longer, such as compiling, ends with the process
LOOK_S = 0.5  # whether a signal takes effect now
TWICE_S = 1.0  # a repeat within this is the same signal, sent to the process and also to its group
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CALLED_OFF = 0  # no signal has this number
TERMINATED = 128 + signal.SIGTERM  # exit status, by the shells' convention


class Terminated(SystemExit):
    """Raised on SIGTERM, as KeyboardInterrupt is on Ctrl-C."""


@contextmanager
def ending_in_time(run: "asyncio.Task[Any] | None" = None, end_s: float = END_S) -> Iterator["Watch"]:
    """Inside, SIGINT and SIGTERM cancel `run`. This process and its children are killed `end_s` seconds later, or
    when the signal comes again.

    Leaving the context calls that off, unless the watch's `to_exit` is set. Does nothing outside the main thread, or
    inside another `ending_in_time`, which already watches.
    """
    watch = Watch(run, end_s)
    watching = threading.current_thread() is threading.main_thread() and watch.begin()
    try:
        yield watch
    finally:
        if watching:
            watch.call_off()


def signal_received() -> signal.Signals | None:
    """The signal that has asked this process to end; None where none has.

    Waits a moment for the thread that watches: the task that is cancelled may hear of the signal first.
    """
    if _watching and _watching[-1].asked.wait(LOOK_S):
        return _watching[-1].number
    return None


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated, so that a process that is told to end before its flow begins cleans up too.

    While a flow runs, Prefect's handler replaces this one, and passes the signal on to it at the end.
    """

    def terminate(*_: object) -> None:
        raise Terminated(TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def patient(seconds: Callable[[], float]) -> Iterator[None]:
    """Inside, SIGTERM takes effect only after some seconds, in which the run may end by itself.

    seconds  called repeatedly after the signal: the delay until it takes effect. At most 30 s less `END_S`, after
             which a worker of Prefect's kills the process

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    patience = _Patience(seconds, signal.getsignal(signal.SIGTERM))
    signal.signal(signal.SIGTERM, patience)
    _patience.append(patience)
    try:
        yield
    finally:
        _patience.pop()
        signal.signal(signal.SIGTERM, patience.before)


class _Patience:
    """A handler of SIGTERM that does nothing until `over`; then the one before it has its turn."""

    def __init__(self, seconds: Callable[[], float], before: Any) -> None:
        self.seconds, self.before = seconds, before
        self.over = False

    def __call__(self, number: int, _: object) -> None:
        if self.over:
            signal.signal(number, self.before)
            signal.raise_signal(number)


_patience: list[_Patience] = []
_watching: "list[Watch]" = []  # the active one, if any


class Watch:
    """Waits for a signal that asks this process to end, and makes sure that it ends.

    run         the task that a signal cancels
    asked, number  whether a signal has come, and which
    last_words  written to standard error before the process is killed
    to_exit     after a signal, the deadline holds until the process exits, because it does nothing but this run
    """

    def __init__(self, run: "asyncio.Task[Any] | None", end_s: float) -> None:
        self.run = run
        self.last_words = ""
        self.to_exit = False
        self._end_s = end_s
        self.asked, self.number = threading.Event(), signal.SIGINT
        self._thread = threading.Thread(target=self._watch, name="ending", daemon=True)

    def begin(self) -> bool:
        """Start to watch. Returns False where another watch is active."""
        self._received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        outer = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        if outer != -1:
            signal.set_wakeup_fd(outer)
            self._close()
            return False
        self._thread.start()
        _watching.append(self)
        return True

    def call_off(self) -> None:
        """Stop watching: the run has ended."""
        if self.asked.is_set() and self.to_exit:
            return
        _watching.remove(self)
        signal.set_wakeup_fd(-1)
        self._sent.send(bytes([CALLED_OFF]))
        self._thread.join()
        self._close()

    def _close(self) -> None:
        self._sent.close()
        self._received.close()

    def _watch(self) -> None:
        number = CALLED_OFF
        while number not in SIGNALS:
            number = self._next(None)
            if number == CALLED_OFF:
                return
        self.number = signal.Signals(number)
        self.asked.set()
        if number == signal.SIGTERM and _patience and not self._waited():
            return
        asked_s = time.monotonic()
        self.cancel()
        while (left_s := asked_s + self._end_s - time.monotonic()) > 0:
            again = self._next(left_s)
            if again == CALLED_OFF:
                return
            if again in SIGNALS and time.monotonic() > asked_s + TWICE_S:
                break
        kill_children()
        os.write(2, self.last_words.encode())
        os._exit(128 + number)

    def _waited(self) -> bool:
        """Give the run its time after a SIGTERM. Returns False if it has ended by itself."""
        asked_s = time.monotonic()
        while _patience and time.monotonic() < asked_s + _patience[-1].seconds():
            again = self._next(LOOK_S)
            if again == CALLED_OFF:
                return False
            if again in SIGNALS and time.monotonic() > asked_s + TWICE_S:
                break
        for patience in _patience:
            patience.over = True
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    def _next(self, seconds: float | None) -> int:
        """The next number on the descriptor; -1 when none has come in time."""
        self._received.settimeout(seconds)
        with suppress(TimeoutError):
            return self._received.recv(1)[0]
        return -1

    def cancel(self) -> None:
        """Cancel the run, from any thread."""
        run = self.run
        if run is None:
            return  # nothing runs yet, or any more: the signal's own handler is enough

        def cancel() -> None:
            if not run.cancelling():  # asyncio's handler may have cancelled it already
                run.cancel()

        with suppress(RuntimeError):  # the loop is closed
            run.get_loop().call_soon_threadsafe(cancel)


def run_in_thread(work: Callable[[Callable[[], bool]], T], ending: Callable[[], None] | None = None) -> T:
    """Run compiled code (numba) in a thread of its own, and return its result.

    Signal handlers raise in the main thread wherever it is. In a compiled function that is about to return, that ends
    the process with a segmentation fault.

    work    gets a function that says whether to end early and return what has been found by then
    ending  called at the first Ctrl-C, after which this function waits for the result; a second Ctrl-C does not
            wait. None: the first does not wait either, like SIGTERM
    """
    called_off, done = threading.Event(), Future[T]()

    def do() -> None:
        try:
            done.set_result(work(called_off.is_set))
        except BaseException as error:  # noqa: BLE001  `done.result()` raises it
            done.set_exception(error)

    try:
        threading.Thread(
            target=do, name="compiled-code", daemon=True
        ).start()  # here, for Ctrl-C may come before it returns
        return done.result()
    except KeyboardInterrupt:
        if ending is None:
            raise
        called_off.set()
        ending()
        return done.result()
    finally:
        called_off.set()
        wait([done], SOON_S)


def leave_if_cancelled() -> None:
    """For code that blocks the event loop while it waits: raises CancelledError when the current task was cancelled.

    Does nothing outside a task.
    """
    with suppress(RuntimeError):  # no event loop here
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Blocks SIGINT for threads started inside, and for all processes that these start.

    In a terminal Ctrl-C reaches every process of the foreground group. Ours are ended by the flow instead.
    """
    _begin_tracker()  # multiprocessing would unblock SIGINT in the thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_tracker() -> None:
    """Start multiprocessing's resource tracker, if there is none: as it does, but the kernel wakes a stopped one."""
    tracker: Any = resource_tracker._resource_tracker  # pyright: ignore[reportAttributeAccessIssue]
    with tracker._lock:
        if tracker._fd is None:
            theirs, ours = os.pipe()
            command = python_call(f"{track_resources.__module__}:{track_resources.__name__}", str(theirs))
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:  # it unblocks them when it ignores them
                tracker._pid = spawnv_passfds(os.fsencode(sys.executable), command, [theirs])
                tracker._fd = ours
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.close(theirs)
    resource_tracker.ensure_running()


def kill_children() -> None:
    """Kill all descendants of this process."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
