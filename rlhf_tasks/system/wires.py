"""What every connection to a server needs: headers that can be sent, and an end in time. Standard library only."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

HEADER_VALUE = re.compile(r"[\x20-\x7e\xa0-\xff]*")
"""What the value of a header may have. http.client shows a value that has something else, a secret among them."""


@contextmanager
def ending(wire: socket.socket, until_s: float) -> Iterator[Callable[[], None]]:
    """Ends a connection at a time of `time.monotonic`, whatever it is doing: a slow peer must not prolong it byte by
    byte. Yields what ends it at once, from any thread."""

    def shut() -> None:
        with suppress(OSError):  # the peer was quicker
            ours.shutdown(socket.SHUT_RDWR)

    with wire.dup() as ours:  # TLS takes the original over
        timer = threading.Timer(min(max(until_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX), shut)
        timer.daemon = True
        timer.start()
        try:
            yield shut
        finally:
            timer.cancel()
            timer.join()
