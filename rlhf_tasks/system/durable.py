"""Files that survive a crash: they are used only after they have been written and synced. Torch-free.

No file is written through a symbolic link. Otherwise anyone who can write into a run folder could make a run
overwrite any other file. A process counts the bytes that it moves, so that others see whether it makes progress.
"""

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

CHUNK_BYTES = 1 << 22  # of a large file, read, hashed and written at a time


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a whole file and sync it. mode: of a new one, less the process's umask. Raises OSError."""
    with open(path, "wb", opener=lambda name, flags: no_link(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace a file's content atomically: readers, and a crash at any time, see either the old or the new content.

    Raises OSError.
    """
    fresh = path.with_name(f".{path.name}.fresh")
    write_file(fresh, content.encode() if isinstance(content, str) else content, mode)
    fresh.rename(path)
    sync(path.parent)


def no_link(path: str, flags: int, mode: int = 0o666) -> int:
    """An opener for `open` that raises OSError for a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, mode)


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries (new, renamed and removed files), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, size_bytes: int, lines: Iterable[str]) -> int:
    """Truncate a file to its first `size_bytes` bytes, append lines, and sync it. Returns its new size in bytes.

    So the remains of an earlier append that failed are overwritten.
    """
    with open(path, "ab", opener=no_link) as file:
        file.truncate(min(size_bytes, os.fstat(file.fileno()).st_size))
        file.seek(0, os.SEEK_END)
        for line in lines:
            file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # full disk, user's quota, process's limit
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


class NotWritable(OSError):
    """A file cannot be written, and trying again does not help: the disk is full, or permission is missing.

    The message has the path and what to do; for a full disk also the needed and the free bytes.
    """


def refuse_full(path: Path, needed_bytes: int) -> None:
    """Raises NotWritable when the disk has fewer than `needed_bytes` bytes free.

    It is a check before a long write. Other processes may still fill the disk meanwhile.
    """
    free_bytes = _free_bytes(path)
    if free_bytes is not None and free_bytes < needed_bytes:
        raise NotWritable(_no_room(path, needed_bytes))


def explained(error: OSError, path: Path, needed_bytes: int) -> OSError:
    """The error to raise for a failed write: NotWritable for a full disk or missing permission; names the path.

    needed_bytes  bytes that were to be written
    """
    if isinstance(error, NotWritable):
        return error
    if error.errno in _FULL:
        return NotWritable(_no_room(path, needed_bytes))
    if error.errno in _FORBIDDEN:
        return NotWritable(f"{path} cannot be written: {error.strerror}. Fix that and resume.")
    return OSError(f"{path}: {error.strerror or error}")


def existing(path: Path) -> Path:
    """A path, or the nearest folder above it that exists. Raises OSError."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _free_bytes(path: Path) -> int | None:
    """Free bytes on a path's disk; None if unknown. Raises nothing, because error messages are made with it."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return None


def _no_room(path: Path, needed_bytes: int) -> str:
    free_bytes = _free_bytes(path)
    free = "an unknown number" if free_bytes is None else free_bytes
    return f"no space left: {path} needs {needed_bytes} bytes, {free} are free. Free some space and resume."


class ByteCount:
    """A count that several threads may raise. It never falls.

    total_bytes  so far
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        self._lock = Lock()

    def add(self, n_bytes: int) -> None:
        """So many bytes more have been read, written, checked or removed."""
        with self._lock:
            self.total_bytes += n_bytes
