"""A guessing game: a number is to be found, and each wrong guess is answered by a hint."""

import random
import re
from collections.abc import Mapping
from typing import Any


class GuessingGame:
    """A number from 1 to `numbers` is to be found in at most `guesses` guesses, one a turn.

    A turn's first whole number is the guess. The hint is "higher" or "lower", as the number is; "number" where the
    turn has none. With 2^g - 1 numbers, who halves what is left always wins in g guesses, and who does not read the
    hints wins in g of these cases at most: 3 of 7 with three guesses.
    The reward is 1 for the number, 0 for anything else. The number is that of the row's column `number`, or drawn.
    """

    def __init__(self, numbers: int = 7, guesses: int = 3) -> None:
        for name, value in (("numbers", numbers), ("guesses", guesses)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
        self._numbers, self._left, self._number = numbers, guesses, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begin a game. Raises ValueError for a row whose number is none of the game's."""
        number = row.get("number")
        if number is None:
            number = random.Random(seed).randint(1, self._numbers)
        if type(number) is not int or not 1 <= number <= self._numbers:
            raise ValueError(f"the row's number {number!r} must be from 1 to {self._numbers}.")
        self._number = number

    def step(self, text: str) -> tuple[str, float, bool]:
        """(the hint, the reward, whether the game is over)"""
        found = re.search("[0-9]+", text[:1000])
        guess = None if found is None else int(found[0])
        self._left -= 1
        if guess == self._number:
            return "right", 1.0, True
        hint = "number" if guess is None else "higher" if guess < self._number else "lower"
        return f" {hint} ", 0.0, self._left == 0
