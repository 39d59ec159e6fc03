"""Errors of the user's own code: a sentence, and the frames of that code.

Imports only the standard library, because it is loaded in the process that runs that code.
"""

import asyncio
import importlib
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from prefect_rlhf.rlhf_tasks.system.reading import printable

MOST_MESSAGE = 400  # characters of what the user's code says
_CALLERS = {
    str(Path(__file__).parents[1] / name)
    for name in (
        "user_code/child.py",
        "user_code/forms.py",
        "user_code/judge.py",
        "user_code/episodes.py",
        "user_code/tools/episode.py",
        "user_code/tools/loaded.py",
        "user_code/tools/server.py",
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


class RewardError(UserCodeError):
    """A reward or an environment cannot be found, failed, was late or returned something that it must not.

    place  index of the answer (of an environment: id of the sample) that it failed on; None where that is unknown
    """

    def __init__(self, message: str, traceback: str = "", place: int | None = None) -> None:
        super().__init__(message, traceback)
        self.place = place


def raised(what: str, error: BaseException, file: str, place: int | None = None) -> RewardError:
    """The error for what the user's code raised.

    file  that code's source file: the message names the last line of it in the traceback
    """
    of_user = traceback.TracebackException.from_exception(error)
    of_user.stack = traceback.StackSummary.from_list(users_frames(of_user.stack))
    name = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = at_line(of_user.stack, file)
    if not where and isinstance(error, SyntaxError):
        where = f" at {error.filename}:{error.lineno}"
    sentence = f"{what} raised {shortened(name, MOST_MESSAGE)}{where}."
    return RewardError(sentence, "".join(of_user.format()), place)


def late_message(who: str, timeout_s: float, where: str, key: str) -> str:
    """The message about the user's code that has not ended within `timeout_s` seconds, which `key` sets."""
    return f"{who} gave no answer in {timeout_s:g} s{where}. Correct it or raise {key}."


def users_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames of the user's code: without our frames that call it, the event loop's and the importer's."""
    listed = [f for f in frames if not f.filename.startswith(_IMPORTERS)]
    first = max((i + 1 for i, f in enumerate(listed) if f.filename in _CALLERS), default=0)
    while first < len(listed) and listed[first].filename.startswith(_ASYNCIO):
        first += 1
    return listed[first:]


def at_line(frames: Sequence[traceback.FrameSummary], file: str = "") -> str:
    """` at FILE:LINE` of the last frame in `file`, or else in the first frame's file; "" without frames."""
    chosen = [f for f in frames if f.filename == file] or [
        f for f in frames if f.filename == frames[0].filename
    ]
    return f" at {chosen[-1].filename}:{chosen[-1].lineno}" if chosen else ""


def traced(frames: Sequence[traceback.FrameSummary]) -> str:
    """The frames as the text of a traceback; "" where there are none."""
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)]) if frames else ""


def shortened(text: str, most: int) -> str:
    """A text of at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."
