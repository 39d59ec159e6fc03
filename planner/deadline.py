"""The time limit of a search or of one of its steps."""

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import NamedTuple


def never() -> bool:
    """The default `called_off` of a Deadline: the search is never called off."""
    return False


class Deadline(NamedTuple):
    """A search ends at a given time, or earlier when it is called off.

    at_s        the time, in seconds of time.monotonic()
    called_off  returns True once the best plan found so far is to be used
    """

    at_s: float
    called_off: Callable[[], bool] = never

    def is_past(self) -> bool:
        """Whether the search must end now."""
        return self.called_off() or monotonic() > self.at_s


NO_DEADLINE = Deadline(inf)
"""A deadline that never passes."""
