"""What a child process prints, passed on: made printable, and cut after a while. Standard library only.

A user's code may print what a model has written, which may be orders to a terminal, and it may print without end.
"""

import codecs
import contextlib
import os
import threading
from pathlib import Path

from rlhf_tasks.system.durable import no_link
from rlhf_tasks.system.reading import printable

MOST_OUTPUT_BYTES = 1 << 20  # of a process; what it prints beyond is read and dropped
STDERR = 2
LAST_S = 2.0  # that the rest of its output may take when it has ended


class ChildOutput:
    """A pipe for a child's output, and the thread that passes on what comes.

    who  for the line that says, once, that the rest is dropped
    log  a file that gets it; None: our standard error
    """

    def __init__(self, who: str, log: Path | None = None) -> None:
        self._who = who
        self._from, self._to = os.pipe()
        self._log = (
            os.dup(STDERR) if log is None else no_link(str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        )
        self._thread = threading.Thread(target=self._pass_on, name="output", daemon=True)

    def __enter__(self) -> int:
        """The descriptor that the child is to write to. The child starts in this context."""
        return self._to

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        self._thread.start()

    def close(self) -> None:
        """The child has ended: what it has printed is passed on."""
        self._thread.join(LAST_S)

    def _pass_on(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        left = MOST_OUTPUT_BYTES
        with contextlib.closing(os.fdopen(self._from, "rb", buffering=0)) as printed:
            while data := printed.read(1 << 16):
                if left > 0:
                    self._write(decoder.decode(data[:left]))
                    left -= len(data)
                    if left <= 0:
                        bound = f"{MOST_OUTPUT_BYTES:,} bytes"
                        self._write(f"\n{self._who} has printed {bound}. What else it prints is dropped.\n")
        os.close(self._log)

    def _write(self, text: str) -> None:
        lines = text.replace("\r\n", "\n").replace("\r", "\n")
        data = memoryview(printable(lines).encode())
        with contextlib.suppress(OSError):  # nobody reads it, or the disk is full
            while data:
                data = data[os.write(self._log, data) :]
