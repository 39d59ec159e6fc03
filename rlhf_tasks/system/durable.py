"""Files that survive a crash: written, synced, and only then counted on. Torch-free.

None is written through a symbolic link: whoever may write into a run folder could lead a run to any other file.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file and make it durable. Raises OSError."""
    with open(path, "wb", opener=no_link) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, text: str) -> None:
    """Give a file a new content all at once: whoever reads it, and whenever this process ends, it is the old or the
    new one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.fresh")
    write_file(fresh, text.encode())
    fresh.rename(path)
    sync(path.parent)


def no_link(path: str, flags: int) -> int:
    """Opens a file that is no symbolic link; for `open`. Raises OSError for one that is."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def sync(path: Path) -> None:
    """Make a file's content durable, or a folder's entries (new, renamed and removed files)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, size_bytes: int, lines: Iterable[str]) -> int:
    """Make a journal its first `size_bytes` bytes and these lines, durably. Returns its new size.

    So what a failed attempt to append has left behind is overwritten.
    """
    with open(path, "ab", opener=no_link) as file:
        file.truncate(min(size_bytes, os.fstat(file.fileno()).st_size))
        file.seek(0, os.SEEK_END)
        for line in lines:
            file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, the process' limit
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


class NotWritable(OSError):
    """A file cannot be written now nor in a moment: there is no room, or no right to. The message has its path and
    what to do, and where it does not fit the bytes it needs and those that are free."""


def refuse_full(path: Path, needed_bytes: int) -> None:
    """Raises NotWritable when a file of this size does not fit beside what lies there. Before a long write, that is:
    others may take the room meanwhile."""
    free_bytes = _free_bytes(path)
    if free_bytes is not None and free_bytes < needed_bytes:
        raise NotWritable(_no_room(path, needed_bytes))


def explained(error: OSError, path: Path, needed_bytes: int) -> OSError:
    """What went wrong with a file, with its path."""
    if isinstance(error, NotWritable):
        return error
    if error.errno in _FULL:
        return NotWritable(_no_room(path, needed_bytes))
    if error.errno in _FORBIDDEN:
        return NotWritable(f"{path} cannot be written: {error.strerror}. Mend that and resume.")
    return OSError(f"{path}: {error.strerror or error}")


def existing(path: Path) -> Path:
    """A path, or the nearest folder above it that is there. Raises OSError."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _free_bytes(path: Path) -> int | None:
    """What is free on a path's disk; None where nobody can know. Raises nothing: it serves to tell of errors."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return None


def _no_room(path: Path, needed_bytes: int) -> str:
    free_bytes = _free_bytes(path)
    free = "an unknown number" if free_bytes is None else free_bytes
    return f"no space left: {path} needs {needed_bytes} bytes, {free} are free. Free some and resume."
