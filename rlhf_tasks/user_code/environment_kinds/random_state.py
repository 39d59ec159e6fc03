"""Environments that draw from Python's and NumPy's own random numbers, of which a process has one state."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class RandomState:
    """The states of the random numbers of one episode, which those beside it do not change."""

    def __init__(self, seed: int) -> None:
        self._states: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        """The process draws from this state. Nothing may be awaited meanwhile."""
        outer = random.getstate(), np.random.get_state()
        _set(self._states)
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            _set(outer)


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
