"""Signals as Prefect handles them. Loads nothing heavy, so that a process of a test starts soon."""

import asyncio
import os
import signal
from contextlib import contextmanager


class Raised(BaseException):
    pass


@contextmanager
def handled_as_by_prefect():
    """A SIGTERM raises wherever the main thread is."""

    def as_prefect_does(*_):
        raise Raised

    before = signal.signal(signal.SIGTERM, as_prefect_does)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def lose_a_signal():
    """Send SIGTERM to this process; its exception goes to the event loop's handler and no further."""
    swallowed = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: swallowed.append(context["exception"]))
    loop.call_soon(os.kill, os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(60)
    finally:
        assert isinstance(swallowed[0], Raised)
