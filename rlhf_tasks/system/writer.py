"""The writing end of a Dask connection: messages are sent in order, from the event loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from distributed.comm import Comm, CommClosedError
from pydantic import BaseModel


class Writer:
    """Writes messages to one connection, in order, from the event loop.

    A function in the queue is called when all messages before it have been passed to the kernel: these arrive even if
    this process is killed at once. When the connection is closed, remaining messages are dropped; the reader notices
    the closed connection.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._items: asyncio.Queue[BaseModel | Callable[[], None] | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._write())

    def put(self, item: BaseModel | Callable[[], None]) -> None:
        """Queue a message to write, or a function to call, after everything queued before."""
        self._items.put_nowait(item)

    def close(self) -> None:
        """Close the connection. Remaining messages are dropped; remaining functions are still called."""
        self._comm.abort()
        self._items.put_nowait(None)

    async def _write(self) -> None:
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseModel):
                with suppress(CommClosedError):
                    await self._comm.write(item.model_dump_json().encode())
            else:
                item()
