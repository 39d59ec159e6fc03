"""A disk that is soon full."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_BYTES = 64 * 1024


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Inside, there is room for DISK_BYTES in a folder; where nobody may mount (False), for as much in each file."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            yield True
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, before[1]))
    try:
        yield False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
