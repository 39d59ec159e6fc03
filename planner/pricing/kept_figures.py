"""Files with figures that earlier runs left in the output folder.

A user did not ask for them, so a broken file must not stop a command: it is put aside, with a warning that names it.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

T = TypeVar("T")
ASIDE = ".refused"  # suffix of a file that was put aside


def read_kept(path: Path, read: Callable[[Path], T], nothing: T) -> tuple[T, tuple[str, ...]]:
    """(what `read` returns for a file, no warnings); if it raises ValueError, (`nothing`, the warning)."""
    try:
        return read(path), ()
    except ValueError as error:
        aside = path.with_name(f"{path.name}{ASIDE}")
        # If the folder is not writable, the file stays and is skipped each time.
        with suppress(OSError):
            path.replace(aside)
        where = f"It is put aside as {aside.name}, and" if aside.exists() else "It is passed over:"
        return nothing, (f"{error} {where} plans go on without it.",)


def write_kept(path: Path, content: bytes) -> None:
    """Write a file atomically, even if other runs write it at the same time. Raises OSError."""
    partial = path.with_name(f"{path.stem}.{uuid4().hex}.tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
