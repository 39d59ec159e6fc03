"""The user's own code: its errors, its frames in a traceback, its secret arguments.

Imports only the standard library, because it is loaded in the process that runs that code.
"""

import asyncio
import importlib
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_tasks.system.reading import printable

_CALLERS = {
    str(Path(__file__).parents[1] / name)
    for name in (
        "rewards/forms.py",
        "rewards/helper.py",
        "environments/episodes.py",
        "environments/helper.py",
        "system/child_processes.py",
    )
}
_IMPORTERS = ("<frozen importlib", str(Path(importlib.__file__).parent))
_ASYNCIO = str(Path(asyncio.__file__).parent)


class UserCodeError(RuntimeError):
    """An error in the user's own code. A retry would fail again, so it ends the run; no rank is at fault.

    Its words may be a model's: message and traceback are made printable.
    traceback  frames of the user's code only; "" where there are none
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(printable(message))
        self.traceback = printable(traceback)


def users_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames of the user's code: without our frames that call it, the event loop's and the importer's."""
    listed = [f for f in frames if not f.filename.startswith(_IMPORTERS)]
    first = max((i + 1 for i, f in enumerate(listed) if f.filename in _CALLERS), default=0)
    while first < len(listed) and listed[first].filename.startswith(_ASYNCIO):
        first += 1
    return listed[first:]


def at_line(frames: Sequence[traceback.FrameSummary], file: str = "") -> str:
    """` at FILE:LINE` of the last frame in `file`, or else in the first frame's file; "" without frames."""
    found = [f for f in frames if f.filename == file] or [
        f for f in frames if f.filename == frames[0].filename
    ]
    return f" at {found[-1].filename}:{found[-1].lineno}" if found else ""


def traced(frames: Sequence[traceback.FrameSummary]) -> str:
    """The frames as the text of a traceback; "" where there are none."""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)]) if frames else ""


def secret_named(value: Any) -> tuple[str, str] | None:
    """(`env` or `block`, name) where an argument is `{env: VARIABLE}` or `{block: NAME}`; else None."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    ((kind, name),) = value.items()
    return (kind, name) if kind in ("env", "block") and isinstance(name, str) else None
