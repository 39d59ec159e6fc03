"""The controller: the part of ours that runs in the controller's Dask worker. It serves one run at a time.

The lease is the flow's connection. It is refused while another flow holds one, and ends when the flow's process ends,
in whatever way. Each rank has a link: it finds the rank's process, holds the connection, and has it restarted. The
ranks meet at the controller's store.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

from distributed import Worker
from distributed.comm import Comm, CommClosedError
from distributed.core import Status, connect
from pydantic import BaseModel
from torch.distributed import TCPStore

from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError
from prefect_rlhf.rlhf_tasks.controller.attempt import Attempt, Surroundings
from prefect_rlhf.rlhf_tasks.protocol.commit import Snapshots
from prefect_rlhf.rlhf_tasks.protocol.decisions import DecisionError
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    FLOW_MESSAGE,
    NEWS,
    Enter,
    GaveUp,
    Pause,
    Resume,
    RunSpec,
    StopAfter,
)
from prefect_rlhf.rlhf_tasks.rank.host import Writer
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 0.2  # how often to look for a restarted worker at the scheduler
CONNECT_S = 5.0  # within which a worker that is up accepts a connection
GREETING_S = 60.0  # within which it greets: it first imports torch and transformers, 8 s with four at once
KILL_S = 1.5  # that a nanny gives a worker to end by itself before it kills it
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
        if (holder := self._attempt) is not None:
            # Its flow may just have left: the next stage of a pipeline connects at once. An earlier attempt of the
            # same run has ended, and may still have a disk to wait for.
            earlier = holder.spec.run == wanted.run and holder.spec.attempt < wanted.attempt
            with suppress(TimeoutError):
                await asyncio.wait_for(self._free.wait(), wanted.limits.io_floor_s if earlier else LEAVING_S)
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
    except RankMissing as error:
        writer.put(GaveUp(reason=str(error), missing=attempt.unreached))
    except (CheckpointError, DecisionError, ConfigError) as error:
        writer.put(GaveUp(reason=str(error)))
    except Exception as error:
        logger.exception("run %s cannot start", attempt.spec.run)
        writer.put(GaveUp(reason=f"the run cannot start: {type(error).__name__}: {error}"))


class Rendezvous:
    """The controller's TCPStore, through which the ranks of each generation find each other.

    It listens on one interface, whereas a plain TCPStore listens on all. Each generation uses its own PrefixStore.

    host, port  the address that ranks connect to
    """

    def __init__(self, host: str) -> None:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.bind((host, 0))
        listener.listen()
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """Close the store. Ranks that still wait on it get an error."""
        self._store = None


class RankMissing(RuntimeError):
    """A rank's worker cannot be reached."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One process of a rank's worker.

    nanny  address of its nanny; "" where nothing would restart it
    boot   unique name of this process
    """

    address: str
    nanny: str
    boot: str
    pid: int


class RankLink:
    """One rank of an attempt.

    executor    "module:function" that makes the rank's executor
    client      our name to the rank; its lease lasts as long as our connection
    on_news     called with each message of NEWS from the rank
    on_lost     called with the reason when the rank's process is gone
    on_started  called when another process has taken its place
    """

    def __init__(
        self,
        worker: Worker,
        rank: int,
        name: str,
        client: str,
        executor: str,
        on_news: Callable[[Any], None],
        on_lost: Callable[[int, str], None],
        on_started: Callable[[int], None],
    ) -> None:
        self.rank = rank
        self.name = name
        self.process: RankProcess | None = None
        self._worker = worker
        self._client = client
        self._executor = executor
        self._on_news = on_news
        self._on_lost = on_lost
        self._on_started = on_started
        self._writer: Writer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def open(self, deadline_s: float) -> None:
        """Connect to the rank's process. Raises RankMissing when there is none within `deadline_s` seconds."""
        await self._find("", deadline_s)

    def send(self, message: BaseModel) -> None:
        """Send a message to the rank's process. Without a process it is dropped: the next one starts from a reset."""
        if self._writer is not None:
            self._writer.put(message)

    async def answers(self, within_s: float) -> bool:
        """Whether the rank's process answers within so many seconds, whatever its engine thread does.

        A stopped process does not answer.
        """
        assert self.process is not None
        try:
            await asyncio.wait_for(self._worker.rpc(self.process.address).rlhf_status(), within_s)
        except OSError:  # no answer in time among them
            return False
        return True

    def restart(self, lost: bool, deadline_s: float) -> None:
        """Make the rank's nanny start a new process, unless that is already in progress; then call `on_started`.

        lost        True: the process is known to be gone; False: it is stuck, and is killed first
        deadline_s  seconds within which the new process must be there
        """
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._restart(lost, deadline_s))

    async def close(self) -> None:
        """Release the rank: its lease ends."""
        tasks = [task for task in (self._watching, self._restarting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    # --- inside -----------------------------------------------------------------------------------------

    async def _restart(self, lost: bool, deadline_s: float) -> None:
        old = self.process
        if not lost and old is not None:
            await self._kill(old)
        try:
            await self._find(old.boot if old else "", deadline_s)
        except RankMissing as error:
            logger.error("%s", error)  # the ledger's own deadline ends the rebuild
            return
        self._on_started(self.rank)

    async def _kill(self, process: RankProcess) -> None:
        """Ask the nanny to kill the process; it then starts the next one by itself. Without a nanny, do nothing."""
        self._release()
        if not process.nanny:
            return
        try:
            asked = self._worker.rpc(process.nanny).kill(timeout=KILL_S, reason="rank is stuck")
            await asyncio.wait_for(asked, KILL_S + CONNECT_S)
        except OSError as error:
            logger.warning("nanny %s of rank %d: %s", process.nanny, self.rank, error)

    async def _find(self, not_boot: str, deadline_s: float) -> None:
        """Connect to the worker of the rank's name, once its process is another one than `not_boot`.

        That process has lost its lease with the connection, so it is of no use: if it is found again, it is killed.
        """
        deadline = time.monotonic() + deadline_s
        reason = "no such worker at the scheduler"
        while time.monotonic() < deadline:
            try:
                process, comm = await self._connect()
            except (OSError, LookupError) as error:
                reason = str(error) or type(error).__name__
            else:
                if process.boot != not_boot:
                    self.process, self._writer = process, Writer(comm)
                    self._watching = asyncio.create_task(self._watch(comm))
                    return
                comm.abort()
                await self._kill(process)
            await asyncio.sleep(LOOK_EVERY_S)
        raise RankMissing(
            f"rank {self.rank} (worker {self.name}) was not there within {deadline_s:g} s: {reason}"
        )

    async def _connect(self) -> tuple[RankProcess, Comm]:
        """Try once to connect.

        Raises RankMissing when further tries are useless, LookupError when the scheduler does not know the worker yet
        or it is not a rank yet, OSError when something does not answer.
        """
        asked = cast(Awaitable[dict[str, Any]], self._worker.scheduler.identity())
        known = await asyncio.wait_for(asked, CONNECT_S)
        workers = known["workers"].items()
        mine = [(at, worker) for at, worker in workers if self.name in (worker["name"], worker["nanny"])]
        if not mine:
            raise LookupError(f"the scheduler knows no worker {self.name}")
        address, worker = mine[0]
        comm = await connect(
            address, timeout=CONNECT_S, **self._worker.security.get_connection_args("worker")
        )
        try:
            await comm.write({"op": "rlhf_link", "client": self._client, "executor": self._executor})
            hello = await asyncio.wait_for(cast(Awaitable[Any], comm.read()), GREETING_S)
            if hello is None:
                raise LookupError(f"worker {self.name} is up but not a rank yet")
            if "boot" not in hello:
                raise RankMissing(f"worker {self.name} cannot serve: {hello['exception_text']}")
        except BaseException:
            comm.abort()
            raise
        return RankProcess(address, worker["nanny"] or "", hello["boot"], hello["pid"]), comm

    async def _watch(self, comm: Comm) -> None:
        """Read news until the link breaks, which means that the process is gone."""
        try:
            while True:
                news = NEWS.validate_json(await comm.read())  # pyright: ignore[reportArgumentType]  declared as None
                self._on_news(news)
        except CommClosedError:
            pass
        assert self.process is not None
        self._release()
        self._on_lost(self.rank, f"process {self.process.pid} of worker {self.name} is gone")

    def _release(self) -> None:
        """Drop the link to the current process. Its end is not reported any more."""
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
