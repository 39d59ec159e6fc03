"""A script that calls a flow needs a main guard: each worker process imports the main module anew, and would call the
flow once more."""

import ast
import sys
import threading
from pathlib import Path
from types import FrameType

from rlhf_tasks.system.reading import ConfigError
from rlhf_tasks.system.source import parsed

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
