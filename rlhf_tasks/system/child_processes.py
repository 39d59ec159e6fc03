"""Processes that end with whoever started them, whatever they are doing: parent-death signals, and keepers.

Two keepers, one below the other, stand between us and a process that runs a user's code. They never run that code
themselves, so they are always able to act: when we are gone, or what they keep has ended, they kill everything that
was started below them. Where one of the two is killed, the other does so. Linux. The standard library only: a keeper
stays small.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pkgutil import resolve_name
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
STDIN = 0
REAP_EVERY_MS = 1000
KILL_S = 5.0
"""What killing everything below a keeper may take."""


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent ends, also while it is stopped or holds its interpreter.

    parent  the process that this one was started by: if it has ended by now, so does this one
    by      the signal; another than SIGKILL waits while this process is stopped
    The kernel goes by the thread that started this process: that must live as long as this one is to.
    """
    _prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


def keep(function: str) -> None:
    """Fork a process that calls `module:function`, and keep it until it ends or standard input is closed.

    All that it has started is dead when this returns to nobody: the exit status is the kept process', 128 + the
    signal's number where one has killed it.
    """
    _keep(signal.SIGTERM, lambda: _keep(signal.SIGKILL, lambda: resolve_name(function)()))


def _keep(by: signal.Signals, run: Callable[[], None]) -> None:
    """Fork a process that runs, and keep it.

    by  the signal that it gets when its keeper is killed
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent below becomes our child, and is found
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(keeper, by)
        run()
        os._exit(0)
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(silent, sys.stdout.fileno())  # whoever reads the kept one's output sees its end
    ended = select.poll()
    ended.register(STDIN, 0)  # hang-up alone: the requests are not ours to read
    ended.register(os.pidfd_open(child), select.POLLIN)
    signal.signal(signal.SIGTERM, lambda *_: _end(child))
    while not ended.poll(REAP_EVERY_MS):
        _reap(child)
    _end(child)


def _end(child: int) -> NoReturn:
    status = _kill_below(child)
    os._exit(status if status >= 0 else 128 - status)


def _kill_below(child: int) -> int:
    """Kill every process below this one; the exit status of one of them, which may have ended by itself."""
    import psutil  # only now: keepers should be small as long as they wait

    status = -signal.SIGKILL
    end_s = time.monotonic() + KILL_S
    while time.monotonic() < end_s:
        found = _reap(0)
        status = found.get(child, status)
        below = psutil.Process().children(recursive=True)
        if not below:
            break
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.005)
    return status


def _reap(spared: int) -> dict[int, int]:
    """Take leave of our children that have ended, but one; their exit statuses."""
    statuses: dict[int, int] = {}
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return statuses
        if found is None or found.si_pid == spared:
            return statuses
        statuses[found.si_pid] = os.waitstatus_to_exitcode(os.waitpid(found.si_pid, 0)[1])


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} is refused")
