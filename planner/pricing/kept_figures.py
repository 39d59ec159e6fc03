"""Figures that earlier runs left in the output folder. Nobody asked for them in a command, so they never end one: a
file that cannot be used is put aside, with a warning that names it."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

T = TypeVar("T")
ASIDE = ".refused"  # ends the name of a file that was put aside


def read_kept(path: Path, read: Callable[[Path], T], nothing: T) -> tuple[T, tuple[str, ...]]:
    """(what `read` finds in a file, no warnings), or (`nothing`, the warning) where it raises ValueError."""
    try:
        return read(path), ()
    except ValueError as error:
        aside = path.with_name(f"{path.name}{ASIDE}")
        with suppress(
            OSError
        ):  # in a folder that cannot be written to it stays, and is passed over each time
            path.replace(aside)
        where = f"It is put aside as {aside.name}, and" if aside.exists() else "It is passed over:"
        return nothing, (f"{error} {where} plans go on without it.",)


def write_kept(path: Path, content: bytes) -> None:
    """Write a file, which appears whole, also where other runs write it at the same time. Raises OSError."""
    partial = path.with_name(f"{path.stem}.{uuid4().hex}.tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
