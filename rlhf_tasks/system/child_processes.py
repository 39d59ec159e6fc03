"""Child processes: how they start, and that they end with the process that started them, in any state.

Between us and a process that runs a user's code there are two keepers, one the child of the other. They never run the
user's code, so they can always act: when we are gone, or the kept process has ended, they kill every process below
them. If one keeper is killed, the other does this. If they are stopped (SIGSTOP), the kernel wakes them for it. Linux
only. Standard library only, so that a keeper needs little memory.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
STDIN = 0
REAP_EVERY_MS = 1000
KILL_S = 5.0
"""Most seconds that a keeper spends on killing the processes below it."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOGINS = "PREFECT_"  # the login of the run's Prefect server is among the variables with this prefix
_CALL = (
    "import json, sys; from pkgutil import resolve_name; "
    "sys.path[:] = json.loads(sys.argv[1]); resolve_name(sys.argv[2])(*sys.argv[3:])"
)


def python_call(function: str, *arguments: str) -> list[str]:
    """The command of a process that imports from where this one does, and calls `module:function` with texts."""
    return [sys.executable, "-c", _CALL, json.dumps(sys.path), function, *arguments]


def kept_call(function: str, *arguments: str) -> list[str]:
    """The same, for a process of a user's code: with keepers between us and it."""
    return python_call(f"{__name__}:{keep.__name__}", function, *arguments)


def kept_call_of(python: str, function: str, *arguments: str) -> list[str]:
    """`kept_call` in the interpreter of another environment: of what is installed here it sees this package only.

    python  the interpreter's path
    """
    (package,) = sys.modules[__name__.partition(".")[0]].__path__
    program = os.path.join(package, "rlhf_tasks", "system", "other_environment.py")
    return [python, "-P", program, f"{__name__}:{keep.__name__}", function, *arguments]


def users_environment() -> dict[str, str]:
    """This process's environment without what a user's code need not know: the logins of Prefect's server."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LOGINS)}


def direct_to_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep requests to this machine away from the proxies in `environment`.

    The Prefect server of a run listens on loopback, where no proxy can reach it. All child processes inherit them. A
    program that reads both spellings prefers the lower case.
    """
    stated = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    hosts = [host.strip() for host in stated.split(",") if host.strip()]
    joined = ",".join([*hosts, *(host for host in LOOPBACK if host not in hosts)])
    return dict.fromkeys(("no_proxy", "NO_PROXY"), "*" if "*" in hosts else joined)


def die_with_parent(parent: int) -> None:
    """Make the kernel end this process when its parent ends, even while it is stopped or its interpreter is blocked.

    parent  id of the process that has started this one; if it has ended already, this process exits
    The kernel watches the thread that has started this process, so that thread must live as long as this process.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def wake_after_parent(parent: int, then: Callable[[], object] = lambda: None) -> None:
    """Make the kernel wake this process when its parent ends, if it is stopped; then call `then` in the main thread.

    parent  id of the process that has started this one; it may have ended already
    For a process that ends by itself once it runs, or has something to do before. The thread that has started it may
    end before: the kernel then wakes it once more than is needed.
    """

    def look(*_: object) -> None:
        if os.getppid() != parent:
            then()

    signal.signal(signal.SIGCONT, look)
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    look()


def end_with_starter() -> None:
    """Make the kernel end this process of multiprocessing's with the one that started it, or with the fork server.

    A fork holds the pipe by which its fork server sees that their starter has ended. It lets go of it here: else the
    server would live as long as its forks do.
    """
    from multiprocessing import forkserver  # here, since a keeper needs little memory

    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    die_with_parent(os.getppid())


def track_resources(alive: str) -> None:
    """Entry point of multiprocessing's resource tracker (flows/cluster/shutdown.py).

    alive  descriptor of the pipe that is open as long as a process uses it
    """
    from multiprocessing import resource_tracker  # here, since a keeper needs little memory

    wake_after_parent(os.getppid())
    resource_tracker.main(int(alive))


def keep(function: str, *arguments: str) -> None:
    """Fork a process that calls `module:function`, and keep it until it ends or standard input is closed.

    Then every process that it has started is killed, and this process exits; the function does not return. The exit
    status is that of the kept process, or 128 + the number of the signal that killed it.
    """

    def call(keeper: int) -> None:
        die_with_parent(keeper)
        resolve_name(function)(*arguments)

    _keep(os.getppid(), lambda keeper: _keep(keeper, call))


def _keep(parent: int, run: Callable[[int], None]) -> None:
    """Fork a process that calls `run` with the id of this one, its keeper.

    parent  id of the process that has started this one
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans below become our children, so that we find them
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        run(keeper)
        os._exit(0)
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(silent, sys.stdout.fileno())  # else a reader of the kept process's output would not see its end
    ended = select.poll()
    ended.register(STDIN, 0)  # hang-up only: the kept process reads the requests
    ended.register(os.pidfd_open(child), select.POLLIN)
    signal.signal(signal.SIGTERM, lambda *_: _end(child))
    wake_after_parent(parent, lambda: _end(child))
    while not ended.poll(REAP_EVERY_MS):
        _reap(child)
    _end(child)


def _end(child: int) -> NoReturn:
    for number in (
        signal.SIGTERM,
        signal.SIGCONT,
    ):  # both may come when standard input is closed: this runs once
        signal.signal(number, lambda *_: None)
    status = _kill_below(child)
    os._exit(status if status >= 0 else 128 - status)


def _kill_below(child: int) -> int:
    """Kill every process below this one. Returns the exit status of `child`, which may have ended by itself."""
    import psutil  # imported late, so that a waiting keeper needs little memory

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
    """Reap our children that have ended, but stop at `spared`. Returns process id -> exit status."""
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
