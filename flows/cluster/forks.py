"""The fork server: a process that loads torch and our modules once. Its forks have them and begin at once.

Ranks on CPUs, the controller beside them, and exports are its forks. It ends with this process. Loads nothing itself.
A script that calls a flow needs a main guard: each worker process imports the main module anew, and would call the
flow once more.
"""

import ast
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Any

from prefect_rlhf.flows.cluster.shutdown import deaf_to_ctrl_c
from prefect_rlhf.flows.cluster.this_machine import allow_open_files, gpus_here, threads_environment
from prefect_rlhf.rlhf_tasks.config.cluster import ClusterConfig
from prefect_rlhf.rlhf_tasks.system.child_processes import end_with_starter
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, parsed

logger = logging.getLogger(__name__)
LOADED = "prefect_rlhf.rlhf_tasks.controller.fork_server"
UNTOLD = {"DO_NOT_TRACK": "1"}  # a worker imports Prefect if its parent's main module does
TRACKER_S = 5.0  # that the resource tracker may take to end
GUARDS = ("__name__", "parent_process", "current_process")
"""Names by which a script asks whether it is run or imported by a worker process."""


def begin_to_load_for(cluster: ClusterConfig) -> None:
    """Start the fork server, if there is none and the cluster's ranks will be its forks; returns at once."""
    if cluster.address is None and not gpus_here():
        begin_to_load(cluster.n_devices)


def begin_to_load(n_ranks: int) -> bool:
    """Start the fork server, if there is none; returns at once.

    n_ranks  that will share this machine's cores
    Returns False if it cannot start, because its socket's path in the temporary folder would be too long.
    Raises ConfigError where this process may not open as many files as the ranks need.
    """
    allow_open_files(n_ranks)
    # The server would look for modules in the working folder first, and this process may not. It drops both again.
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    with environment({**inherited(n_ranks), **path}), deaf_to_ctrl_c():
        name_modules()
        try:
            forkserver.ensure_running()
        except OSError as error:
            logger.warning("ranks load torch one by one: a fork server cannot be started (%s)", error)
            return False
    return True


def kill_server() -> None:
    """Kill a fork server that does not fork. Its forks end; another server starts when it is needed."""
    pid = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Ends the fork server and multiprocessing's resource tracker afterwards, if they were not there before."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    tracker: Any = resource_tracker._resource_tracker  # pyright: ignore[reportAttributeAccessIssue]
    had_server, had_tracker = server._forkserver_pid is not None, tracker._fd is not None
    try:
        yield
    finally:
        if not had_server and server._forkserver_pid is not None:
            kill_server()
            server._stop()
        if not had_tracker and tracker._fd is not None:
            pid = tracker._pid
            overdue = threading.Timer(TRACKER_S, os.kill, (pid, signal.SIGKILL))
            overdue.start()
            tracker._stop()
            overdue.cancel()


def inherited(n_ranks: int) -> dict[str, str]:
    """The environment variables of `n_ranks` ranks on this machine and of their controller."""
    return {**UNTOLD, **threads_environment(n_ranks, os.environ)}


def name_modules() -> None:
    """Name the modules that the next fork server loads when it starts."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([LOADED])


def in_fork(function: str, *arguments: Any) -> Any:
    """Call `module:function` in a fork, and return what it returns, or raise what it raises: all must be picklable.

    The fork ends with the fork server. Where there can be none, this process calls it.
    """
    if not begin_to_load(1):
        return _call(function, *arguments)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_starter) as pool:
        return pool.submit(_call, function, *arguments).result()


def _call(function: str, *arguments: Any) -> Any:
    return resolve_name(function)(*arguments)


@contextmanager
def environment(variables: Mapping[str, str], others: Iterable[str] = ()) -> Iterator[None]:
    """Sets variables that processes inherit from this one, and restores them afterwards.

    others  names of variables to restore, too, if somebody else sets them meanwhile

    A nanny's own `env` is applied too late: a spawned process first imports its parent's main module, and if that
    imports Prefect, Prefect has already read its settings.
    """
    before = {name: os.environ.get(name) for name in (*variables, *others)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def refuse_unguarded_script() -> None:
    """Raises ConfigError if a line of a script outside a main guard has called this.

    multiprocessing imports a main module only from a file, and no `__main__.py`: a prompt, a notebook or `python -m
    PACKAGE` needs no guard.
    """
    main = sys.modules["__main__"]
    spec, script, frame = getattr(main, "__spec__", None), getattr(main, "__file__", None), _main_frame()
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("<module>", script):
        frame = frame.f_back
    if script is None or frame is None or (spec is not None and spec.name.split(".")[-1] == "__main__"):
        return
    try:
        tree = parsed(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):  # it is not there as it was run: nobody can import it, either
        return
    if not _is_guarded(tree, frame.f_lineno):
        raise ConfigError(
            f"{script}:{frame.f_lineno}: a flow is called outside a main guard, and each worker process would call "
            "it again, since it imports this script. Put the call below `if __name__ == '__main__':`."
        )


def _main_frame() -> FrameType | None:
    """What the main thread runs."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _is_guarded(tree: ast.Module, line: int) -> bool:
    """Whether a line of a script is part of something that asks for the module's name or for the process, or follows
    an `if` that ends the script for all others."""
    here = (node for node in ast.walk(tree) if node_has(node, line))
    asks = any(_asks(node.test) for node in here if isinstance(node, ast.If | ast.IfExp)) or any(
        _asks(node) for node in ast.walk(tree) if isinstance(node, ast.BoolOp) and node_has(node, line)
    )
    ends = (
        node for node in tree.body if isinstance(node, ast.If) and _asks(node.test) and node.lineno < line
    )
    return asks or any(
        isinstance(node.body[-1], ast.Raise | ast.Expr) and _leaves(node.body[-1]) for node in ends
    )


def node_has(node: ast.AST, line: int) -> bool:
    """Whether a line is part of a node."""
    first = getattr(node, "lineno", None)
    return first is not None and first <= line <= (getattr(node, "end_lineno", None) or first)


def _leaves(statement: ast.stmt) -> bool:
    """Whether a statement ends the script: `raise SystemExit`, `sys.exit()`, `exit()`."""
    return not {"SystemExit", "exit", "_exit"}.isdisjoint(_names(statement))


def _asks(test: ast.AST) -> bool:
    return not _names(test).isdisjoint(GUARDS)


def _names(part: ast.AST) -> set[str | None]:
    return {getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(part)}
