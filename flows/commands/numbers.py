"""Whole numbers on the command line. Commands take their text: cyclopts makes 2 of 1.5."""

from rlhf_tasks.algorithms.configurations import ConfigError

LARGEST_SEED = 2**63 - 1  # as in the configuration


def whole(option: str, text: str, least: int, what: str, most: float = float("inf")) -> int:
    """The number that a text has. Raises ConfigError for one that is not whole, or out of its bounds.

    what  ends the sentence: what the number is
    """
    try:
        given = int(text)
    except ValueError:
        given = None
    if given is None or not least <= given <= most:
        raise ConfigError(f"{option} {text}: {what}.")
    return given


def whole_seed(text: str) -> int:
    """The seed that a text has. Raises ConfigError for what is none."""
    what = f"a seed is a whole number from 0 to {LARGEST_SEED}"
    return whole("--seed", text, 0, what, most=LARGEST_SEED)
