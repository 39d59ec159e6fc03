"""Code that the user brought: what it did wrong, which frames are theirs, which of its arguments are secrets.

The standard library only: it is loaded beside that code.
"""

import asyncio
import importlib
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_CALLERS = {
    str(Path(__file__).parents[1] / name)
    for name in ("rewards/forms.py", "rewards/helper.py", "system/child_processes.py")
}
_IMPORTERS = ("<frozen importlib", str(Path(importlib.__file__).parent))
_ASYNCIO = str(Path(asyncio.__file__).parent)


class UserCodeError(RuntimeError):
    """What code that the user brought did wrong. It would go wrong again: a run ends by it, and no rank is at fault.

    traceback  of their code alone, empty where there is none
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


def users_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Without ours that call theirs, nor the event loop's and the importer's in between."""
    listed = [f for f in frames if not f.filename.startswith(_IMPORTERS)]
    first = max((i + 1 for i, f in enumerate(listed) if f.filename in _CALLERS), default=0)
    while first < len(listed) and listed[first].filename.startswith(_ASYNCIO):
        first += 1
    return listed[first:]


def at_line(frames: Sequence[traceback.FrameSummary], file: str = "") -> str:
    """` at FILE:LINE` of the last frame in a file, or else in the first frame's; empty where there is none."""
    found = [f for f in frames if f.filename == file] or [
        f for f in frames if f.filename == frames[0].filename
    ]
    return f" at {found[-1].filename}:{found[-1].lineno}" if found else ""


def traced(frames: Sequence[traceback.FrameSummary]) -> str:
    """Frames, as a traceback shows them; empty where there are none."""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)]) if frames else ""


def secret_named(value: Any) -> tuple[str, str] | None:
    """(`env` or `block`, name) where an argument is `{env: VARIABLE}` or `{block: NAME}`; else None."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return None
    ((kind, name),) = value.items()
    return (kind, name) if kind in ("env", "block") and isinstance(name, str) else None
