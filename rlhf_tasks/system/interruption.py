"""The end of a job that nobody waits for any more: loops of long computations ask at each step.

When a generation of process groups ends, a rank's job is interrupted. Its collectives then raise by themselves. What
computes between two collectives, such as a decode loop, would otherwise compute to its end, or cost the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

_ended: ContextVar[Event | None] = ContextVar("ended", default=None)


class JobEnded(RuntimeError):
    """Nobody waits for the job any more."""


@contextmanager
def interruptible(ended: Event) -> Iterator[None]:
    """Inside, `leave_if_ended` of this thread looks at an event, which another thread sets."""
    token = _ended.set(ended)
    try:
        yield
    finally:
        _ended.reset(token)


def leave_if_ended() -> None:
    """Raises JobEnded where nobody waits for this thread's job any more."""
    ended = _ended.get()
    if ended is not None and ended.is_set():
        raise JobEnded("the job was interrupted: its generation has ended")
