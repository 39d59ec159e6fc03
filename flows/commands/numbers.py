"""Numbers on the command line. Commands take whole ones as text, because cyclopts would round 1.5 to 2."""

from math import isfinite

from rlhf_tasks.algorithms.configurations import ConfigError

LARGEST_SEED = 2**63 - 1  # as in the configuration


def whole(option: str, text: str, least: int, what: str, most: float = float("inf")) -> int:
    """The whole number in a text. Raises ConfigError for one that is not whole, or not from `least` to `most`.

    what  the end of the error's sentence: which numbers are allowed
    """
    try:
        given = int(text)
    except ValueError:
        given = None
    if given is None or not least <= given <= most:
        raise ConfigError(f"{option} {text}: {what}.")
    return given


def check_range(option: str, value: float, above: float, most: float, what: str) -> None:
    """Raises ConfigError for a number that is not finite, not above `above`, or more than `most`.

    what  the end of the error's sentence: which numbers are allowed
    """
    if not (isfinite(value) and above < value <= most):
        raise ConfigError(f"{option} {value:g}: {what}.")


def whole_seed(text: str) -> int:
    """The seed in a text. Raises ConfigError for a text that is not a seed."""
    what = f"a seed is a whole number from 0 to {LARGEST_SEED}"
    return whole("--seed", text, 0, what, most=LARGEST_SEED)
