"""Numbers on the command line, as they are written."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

from rlhf_tasks.config import ConfigError

LARGEST_SEED = 2**63 - 1  # as in the configuration


def as_written(_: type, tokens: Sequence[Token]) -> int | float:
    """A number in its own type: cyclopts rounds where it is to be a whole one. Raises ValueError for other text."""
    text = tokens[0].value
    try:
        return int(text, 0)
    except ValueError:
        return float(text)


Whole = Annotated[int, Parameter(converter=as_written)]
"""A whole number, for `check_whole` to see to it."""


def check_whole(option: str, given: float | None, least: int, what: str, most: float = float("inf")) -> None:
    """Raises ConfigError for a number that is not whole, or out of its bounds. what: a sentence's end, what it is."""
    if given is not None and not (isinstance(given, int) and least <= given <= most):
        raise ConfigError(f"{option} {given}: {what}.")


def check_seed(given: float | None) -> None:
    """Raises ConfigError for what is no seed."""
    check_whole("--seed", given, 0, f"a seed is a whole number from 0 to {LARGEST_SEED}", LARGEST_SEED)
