"""Counts the bytes that one process moves to and from the disk, so that others see whether it makes progress."""

from threading import Lock


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
