"""What commands share: numbers and output files that are checked before any work, and warnings.

Commands take whole numbers as text, because cyclopts would round 1.5 to 2.
"""

import os
from collections.abc import Iterable
from math import isfinite
from pathlib import Path

from rich.markup import escape

from prefect_rlhf.flows.view.terminal import Console
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError

LARGEST_SEED = 2**63 - 1  # as in the configuration

warnings = Console(stderr=True, highlight=False)


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


def check_writable(*paths: Path | None) -> None:
    """Raises ConfigError for a file that cannot be written, and for two that are the same file.

    This is checked before minutes of work.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        if path is not None and path.resolve() in files:
            raise ConfigError(
                f"{path} and {files[path.resolve()]} are the same file, and one output would overwrite the other. "
                "Name two files."
            )
        if path is not None:
            files[path.resolve()] = path
        if path is not None and (
            path.is_dir()
            or not path.parent.is_dir()
            or not os.access(path if path.exists() else path.parent, os.W_OK)
        ):
            raise ConfigError(f"{path} cannot be written. Name a writable file in an existing folder.")


def refuse_folder(file: Path, example: str) -> None:
    """Raises ConfigError where a file's path is a folder's. example: a name for the file in it"""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder. Name a file in it, such as {file / example}.")


def write_output(path: Path, text: str) -> None:
    """Write a file that `check_writable` has passed. Raises ConfigError naming it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from None


def show_warnings(found: Iterable[str]) -> None:
    """Print warnings to standard error, one a line."""
    for warning in found:
        warnings.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
