"""The writing end of a Dask connection: messages leave in order, from the event loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from distributed.comm import Comm, CommClosedError
from pydantic import BaseModel


class Writer:
    """Writes messages to one connection, in order, from the event loop.

    A function among them is called when everything before it has been handed to the kernel: it arrives,
    even if this process is killed the next moment. When the connection is closed, what is left is dropped:
    whoever reads from it learns that.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._items: asyncio.Queue[BaseModel | Callable[[], None] | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._write())

    def put(self, item: BaseModel | Callable[[], None]) -> None:
        """Write a message, or call a function, after what was put before."""
        self._items.put_nowait(item)

    def close(self) -> None:
        """Close the connection. What is left is dropped, functions apart."""
        self._comm.abort()
        self._items.put_nowait(None)

    async def _write(self) -> None:
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseModel):
                with suppress(CommClosedError):
                    await self._comm.write(item.model_dump_json().encode())
            else:
                item()
