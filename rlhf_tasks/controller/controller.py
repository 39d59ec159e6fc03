"""The controller: the part of ours that runs in the controller's Dask worker. It serves one run at a time.

The lease is the flow's connection. It is refused while another flow holds one, and ends when the flow's process ends,
in whatever way.
"""

import asyncio
import logging
from contextlib import suppress
from functools import partial
from pkgutil import resolve_name
from typing import Any

from distributed import Worker
from distributed.comm import Comm, CommClosedError
from distributed.core import Status

from rlhf_tasks.checkpoint.manifest import CheckpointError
from rlhf_tasks.controller.attempt import Attempt, Surroundings
from rlhf_tasks.controller.rank_link import RankLink, RankMissing, Rendezvous
from rlhf_tasks.protocol.commit import Snapshots
from rlhf_tasks.protocol.messages import (
    FLOW_MESSAGE,
    Enter,
    GaveUp,
    Pause,
    Resume,
    RunSpec,
    StopAfter,
)
from rlhf_tasks.system.writer import Writer

logger = logging.getLogger(__name__)
LEAVING_S = 5.0  # that releasing the ranks of a run may take


class Controller:
    """One per cluster. `handlers` are the operations that its Dask worker answers."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.handlers = {"rlhf_lease": self.lease}
        self._loop = asyncio.get_running_loop()
        self._attempt: Attempt | None = None
        self._free = asyncio.Event()

    async def lease(self, comm: Comm, spec: bytes) -> Any:
        """Serve one attempt while the flow holds the connection. Refused while another flow's attempt runs."""
        wanted = RunSpec.model_validate_json(spec)
        if self._attempt is not None:
            with suppress(
                TimeoutError
            ):  # its flow may just have left: the next stage of a pipeline connects at once
                await asyncio.wait_for(self._free.wait(), LEAVING_S)
        holder = self._attempt
        if holder is not None:
            refusal = GaveUp(
                reason=f"the cluster is held by run {holder.spec.run!r}, attempt {holder.spec.attempt}; "
                f"run {wanted.run!r} must wait until it has ended, or use another cluster."
            )
            await comm.write(refusal.model_dump_json().encode())
            return Status.dont_reply
        writer = Writer(comm)
        around = Surroundings(partial(RankLink, self.worker), Rendezvous(self.worker.ip), _snapshots)
        attempt = self._attempt = Attempt(around, wanted, writer.put)
        self._free.clear()
        starting = asyncio.create_task(_start(attempt, writer))
        try:
            while True:
                message = FLOW_MESSAGE.validate_json(await comm.read())  # pyright: ignore[reportArgumentType]  declared as None
                match message:
                    case Enter():
                        attempt.enter(message.iteration, message.generation)
                    case StopAfter():
                        attempt.stop_after(message.iteration)
                    case Pause():
                        attempt.pause()
                    case Resume():
                        attempt.resume()
        except CommClosedError:
            logger.info("the flow of run %s has left", wanted.run)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await attempt.close()
            writer.close()
            self._attempt = None
            self._free.set()
        return Status.dont_reply

    async def close(self) -> None:
        """Called when the worker ends."""
        if self._attempt is not None:
            await self._attempt.close()


def _snapshots(spec: RunSpec) -> Snapshots:
    return resolve_name(spec.snapshots)(spec)


async def _start(attempt: Attempt, writer: Writer) -> None:
    """Start an attempt. If that fails, tell the flow why."""
    try:
        await attempt.start()
    except (RankMissing, CheckpointError) as error:
        writer.put(GaveUp(reason=str(error)))
    except Exception as error:
        logger.exception("run %s cannot start", attempt.spec.run)
        writer.put(GaveUp(reason=f"the run cannot start: {type(error).__name__}: {error}"))
