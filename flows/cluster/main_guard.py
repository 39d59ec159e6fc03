"""A script that calls a flow needs a main guard: each worker process imports the main module anew, and would call the
flow once more."""

import ast
import sys
import threading
from pathlib import Path
from types import FrameType

from rlhf_tasks.system.reading import ConfigError

GUARDS = ("__name__", "parent_process", "current_process")
"""Names by which a script asks whether it is run or imported by a worker process."""


def refuse_unguarded_script() -> None:
    """Raises ConfigError where a script's own line, outside a main guard, has led here.

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
        tree = ast.parse(Path(script).read_bytes())
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
    """Whether a line of a script is below an `if` that asks for the module's name, or for the process."""
    return any(
        isinstance(node, ast.If) and node.lineno <= line <= (node.end_lineno or line) and _asks(node.test)
        for node in ast.walk(tree)
    )


def _asks(test: ast.expr) -> bool:
    names = {getattr(node, "id", None) or getattr(node, "attr", None) for node in ast.walk(test)}
    return not names.isdisjoint(GUARDS)
