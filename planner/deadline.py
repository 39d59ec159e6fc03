"""When a search ends, or a step of it."""

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple


def never() -> bool:
    """Nobody calls the search off."""
    return False


class Deadline(NamedTuple):
    """A time, unless the search is called off before.

    at_s        of time.monotonic()
    called_off  whether whoever wanted a plan will have the one that is found by now
    """

    at_s: float
    called_off: Callable[[], bool] = never

    def is_past(self) -> bool:
        """Whether to end now."""
        return self.called_off() or monotonic() > self.at_s
