"""The end of a run by Ctrl-C or SIGTERM: within `END_S`, whatever the run is doing, and with no process left.

Prefect's SIGTERM handler raises its exception wherever the main thread happens to be. A callback of the event loop,
a task of Prefect's own or a serializer swallow it there, and the run goes on. So signals are read from Python's
wake-up descriptor, to which the interpreter writes them whichever handler is installed, by a thread that does nothing
else: it cancels the run, and kills what has not ended in time.
"""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

END_S = 12.0  # from the signal until what is left is killed
SOON_S = 2.0  # for work that is called off; what takes longer, such as compiling, ends with the process
TWICE_S = 1.0  # a signal that comes again within this is the same one: sent to the process, and to its group
SIGNALS = (signal.SIGINT, signal.SIGTERM)
CALLED_OFF = 0  # no signal has this number
TERMINATED = 128 + signal.SIGTERM  # exit status, as shells have it


class Terminated(SystemExit):
    """SIGTERM, as KeyboardInterrupt is Ctrl-C."""


@contextmanager
def ending_in_time(run: "asyncio.Task[Any] | None" = None, end_s: float = END_S) -> Iterator["Watch"]:
    """Inside, SIGINT and SIGTERM cancel `run`, and kill this process and its children `end_s` seconds later, or as
    soon as the signal comes again.

    Leaving calls that off, unless the watch was told to go on `to_exit`. Signals are left alone outside the main
    thread, and inside another `ending_in_time`, whose task is the run.
    """
    watch = Watch(run, end_s)
    watching = threading.current_thread() is threading.main_thread() and watch.begin()
    try:
        yield watch
    finally:
        if watching:
            watch.call_off()


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated: a process that is told to end before its flow has begun cleans up too.

    While a flow runs, Prefect's handler stands in this one's place, and hands the signal on to it when it is done.
    """

    def terminate(*_: object) -> None:
        raise Terminated(TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Watch:
    """Waits for a signal that asks this process to end, and sees to it that it ends.

    run         what a signal cancels
    last_words  for standard error, when it comes to killing
    to_exit     once a signal has come, the deadline holds to the end of the process: it does nothing but this run
    """

    def __init__(self, run: "asyncio.Task[Any] | None", end_s: float) -> None:
        self.run = run
        self.last_words = ""
        self.to_exit = False
        self._end_s = end_s
        self._asked = False
        self._thread = threading.Thread(target=self._watch, name="ending", daemon=True)

    def begin(self) -> bool:
        """Watch from now on; False where somebody does already."""
        self._received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        outer = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        if outer != -1:
            signal.set_wakeup_fd(outer)
            self._close()
            return False
        self._thread.start()
        return True

    def call_off(self) -> None:
        """The run has ended."""
        if self._asked and self.to_exit:
            return
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
        self._asked = True
        asked_s = time.monotonic()
        self._cancel()
        while (left_s := asked_s + self._end_s - time.monotonic()) > 0:
            again = self._next(left_s)
            if again == CALLED_OFF:
                return
            if again in SIGNALS and time.monotonic() > asked_s + TWICE_S:
                break
        kill_children()
        os.write(2, self.last_words.encode())
        os._exit(128 + number)

    def _next(self, seconds: float | None) -> int:
        """The next number on the descriptor; -1 when none has come in time."""
        self._received.settimeout(seconds)
        with suppress(TimeoutError):
            return self._received.recv(1)[0]
        return -1

    def _cancel(self) -> None:
        run = self.run
        if run is None:
            return  # nothing runs yet, or any more: the signal's own handler does what is to be done

        def cancel() -> None:
            if not run.cancelling():  # asyncio's handler, or its end after Prefect's, may have come first
                run.cancel()

        with suppress(RuntimeError):  # the loop is closed
            run.get_loop().call_soon_threadsafe(cancel)


def beside(work: Callable[[Callable[[], bool]], T], ending: Callable[[], None] | None = None) -> T:
    """Does work of compiled code (numba) in a thread of its own, and gives its result.

    Handlers of signals raise in the main thread wherever it is; in a compiled function that is about to return, that
    ends the process with a segmentation fault.

    work    is given a function that says whether to end early, with what there is by then
    ending  called at the first Ctrl-C, after which the result is waited for; a second one leaves without. None: the
            first leaves, as SIGTERM does
    """
    called_off, done = threading.Event(), Future[T]()

    def do() -> None:
        try:
            done.set_result(work(called_off.is_set))
        except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
            done.set_exception(error)

    threading.Thread(target=do, name="beside", daemon=True).start()
    try:
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
    """For code that blocks the event loop while it waits: raises CancelledError when the task that it is part of has
    been told to end. Does nothing outside of a task."""
    with suppress(RuntimeError):  # no event loop here
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Threads that are started inside, and all processes that these start, do not hear SIGINT.

    In a terminal it reaches every process of the foreground group; ours are ended by the flow.
    """
    resource_tracker.ensure_running()  # a thread that starts multiprocessing's tracker hears SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_children() -> None:
    """Kill every process below this one."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
