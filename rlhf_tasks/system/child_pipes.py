"""Pipes to and from a child process: lines of JSON that are exchanged, and what it prints. Standard library only.

A child may stall, stop reading or end at any time. A user's code may print what a model has written, which may be
orders to a terminal, and it may print without end: what is passed on is made printable, and cut after a while.
"""

import codecs
import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prefect_rlhf.rlhf_tasks.system.durable import no_link
from prefect_rlhf.rlhf_tasks.system.reading import printable

LOOK_EVERY_S = 0.25
MOST_AT_ONCE = 1 << 16  # bytes that are written to a pipe, which has room for as many
END_S = 10.0  # that a keeper may take to kill all its descendants


class Lines:
    """Our ends of a child's standard input and output.

    While a method waits, it calls `look` about every LOOK_EVERY_S seconds; an exception from `look` ends the waiting.
    """

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self.child = child
        self._to, self._from = child.stdin.fileno(), child.stdout.fileno()
        os.set_blocking(self._to, False)  # a child that does not read must not block us
        self._unread = b""
        self._unsent = bytearray()

    def offer(self, line: str) -> None:
        """Send a line as far as the child reads it now. The rest goes with the next one, or with `arrived`."""
        self._unsent += line.encode() + b"\n"
        self._write_on()

    def _write_on(self) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            while self._unsent:
                self._write()

    def send(self, line: str, until_s: float, look: Callable[[], None] = lambda: None) -> None:
        """Send a line, until `time.monotonic()` is `until_s` seconds, then raise TimeoutError.

        A child that has ended is not reported here, but by `read`.
        """
        self._unsent += line.encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while self._unsent:
                _wait(self._to, select.POLLOUT, until_s, look)
                self._write()

    def _write(self) -> None:
        del self._unsent[: os.write(self._to, self._unsent[:MOST_AT_ONCE])]

    def read(self, until_s: float, look: Callable[[], None] = lambda: None) -> dict[str, Any] | None:
        """The next line; None when the child has closed its output.

        Raises TimeoutError when `time.monotonic()` is `until_s` seconds.
        """
        pieces = [self._unread]
        while b"\n" not in pieces[-1]:
            _wait(self._from, select.POLLIN, until_s, look)
            pieces.append(os.read(self._from, 1 << 16))
            if not pieces[-1]:
                return None
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        return json.loads(line)

    def arrived(self) -> tuple[list[dict[str, Any]], bool]:
        """The lines that have come since, and whether the child has closed its output. Waits for nothing."""
        self._write_on()
        pieces, closed = [self._unread], False
        while not closed and self._is_ready():
            pieces.append(os.read(self._from, 1 << 16))
            closed = not pieces[-1]
        *lines, self._unread = b"".join(pieces).split(b"\n")
        return list(map(json.loads, lines)), closed

    def _is_ready(self) -> bool:
        reading = select.poll()
        reading.register(self._from, select.POLLIN)
        return bool(reading.poll(0))

    def watch(self, waiting: select.poll) -> None:
        """Have a wait end where a line comes, or where the child takes what is to be sent."""
        waiting.register(self._from, select.POLLIN)
        if self._unsent:
            waiting.register(self._to, select.POLLOUT)


def _wait(pipe: int, event: int, until_s: float, look: Callable[[], None]) -> None:
    """Wait until a pipe is ready or its other end is closed. Raises TimeoutError, and what `look` raises."""
    waiting = select.poll()  # select.select does not accept file descriptors from 1024 on
    waiting.register(pipe, event)
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        look()
        if waiting.poll(min(left_s, LOOK_EVERY_S) * 1000):
            return


class Requests:
    """A child's ends: what it is asked, and its replies.

    Its own code may read standard input and print: neither mixes with these.
    """

    def __init__(self) -> None:
        self._requests, self._replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, self._requests)

    def fileno(self) -> int:
        """Where requests come. Nothing is read ahead while who asks waits for a reply."""
        return self._requests.fileno()

    def reply(self, reply: Mapping[str, Any]) -> None:
        """Send a line. What JSON does not have is sent as its text."""
        self._replies.write(json.dumps(reply, default=str).encode() + b"\n")
        self._replies.flush()


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


def end_keeper(keeper: subprocess.Popen[Any]) -> None:
    """Close a keeper's input, upon which it kills all below it; wait for that, and reap it."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # what is still buffered is no longer needed
        keeper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(END_S)
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()
