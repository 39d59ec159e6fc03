"""The part of ours that runs in a Dask worker: the plugin that makes it a rank or the controller, and a rank's host.

The plugin sets `process`, the only module attribute that is set at run time: the `EngineHost` of a rank, the
`Controller` of the controller's worker, None elsewhere. It knows nothing of a run: a host learns its rank and its
controller from the controller's first request.

A rank's inbox, which decides, and the connections are on the event loop. One engine thread runs one job at a time:
clear, load, or a plan node. So the rank answers while it computes, and notices when its controller is gone.

Torch-free: the flows import this module; a worker loads what it needs in `setup`.
"""

import asyncio
import atexit
import logging
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pkgutil import resolve_name
from typing import Any, Protocol
from uuid import uuid4

from distributed import Worker
from distributed.comm import Comm, CommClosedError
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin
from pydantic import BaseModel

from prefect_rlhf.rlhf_tasks.protocol.inbox import Inbox
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    HOST,
    RANK_MESSAGE,
    SETUP,
    Clear,
    Deliver,
    Done,
    Failed,
    GenerationSpec,
    Interrupt,
    Load,
    Moved,
    Reset,
    Restore,
    Run,
    SavedPart,
    Told,
)
from prefect_rlhf.rlhf_tasks.protocol.progress import INTERRUPT_GRACE_S
from prefect_rlhf.rlhf_tasks.spec import NodeFailure, NodeKey, NodeRequest, NodeResult, PlanNode
from prefect_rlhf.rlhf_tasks.system.child_processes import end_with_starter
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, at, reach
from prefect_rlhf.rlhf_tasks.system.interruption import interruptible
from prefect_rlhf.rlhf_tasks.system.reading import printable
from prefect_rlhf.rlhf_tasks.user_code.errors import UserCodeError

logger = logging.getLogger(__name__)
TICK_S = 0.5
CONTROLLER_RESOURCE = "controller"
GPU, SLOT = RANK_RESOURCES = ("GPU", "slot")
REQUIRE_GPU = "prefect_rlhf.rlhf_tasks.system.rank_process:require_gpu"
CLASSES = {
    CONTROLLER_RESOURCE: "prefect_rlhf.rlhf_tasks.controller.controller:Controller",
    **dict.fromkeys(RANK_RESOURCES, "prefect_rlhf.rlhf_tasks.rank.host:EngineHost"),
}

process: Any = None


class ProcessPlugin(WorkerPlugin):
    """Makes a worker that offers a resource of CLASSES a rank or the controller. Registered once per cluster."""

    name = "prefect-rlhf"
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        global process
        kind = offered(worker.state.total_resources)
        if kind is not None:
            if kind == SLOT:
                os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rank on the CPU, whatever its host has
            logging.getLogger(Worker.__module__).addFilter(is_news)
            if (
                worker.nanny
            ):  # the kernel ends this worker with it; Dask's thread for that cannot run in a stopped one
                end_with_starter()
            if worker.nanny and threading.current_thread() is threading.main_thread():
                # Ctrl-C in a terminal reaches every process, and so does the SIGTERM of a worker of Prefect's. The
                # flow decides, and ends this one through the nanny.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, lambda *_: None)  # a handler is not inherited by other programs
                # Python's teardown of torch and Prefect takes a core more than a second, and the nanny kills a
                # process that is not gone after four. By now the worker is closed and its streams are flushed.
                atexit.register(os._exit, 0)
            process = resolve_name(CLASSES[kind])(worker)
            worker.handlers.update(process.handlers)

    async def teardown(self, worker: Worker) -> None:
        if process is not None:
            await process.close()


def is_news(record: logging.LogRecord) -> bool:
    """A filter without the traceback of a heartbeat during which the scheduler has closed the connection.

    A cluster of ours closes it when a run ends. If it is lost before, the flow says so.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, CommClosedError) and "heartbeat" in str(record.msg))


def offered(resources: Mapping[str, float]) -> str | None:
    """The first resource of CLASSES that a worker offers; None when it offers none."""
    return next((name for name in CLASSES if resources.get(name, 0) > 0), None)


class Executor(Protocol):
    """Does the work of one rank. All methods except `abort` are called on the engine thread, one call at a time.

    moved  bytes of models and commits that this rank has read, written and checked
    """

    moved: ByteCount

    def load(self, spec: GenerationSpec) -> None:
        """Join the groups of a generation, build the engines, and restore or initialise."""
        ...

    def execute(self, request: NodeRequest, node: PlanNode) -> NodeResult:
        """Run one node. Whatever it raises becomes a fault of the run."""
        ...

    def abort(self) -> None:
        """Abort the groups, so that a blocked `load` or `execute` raises where the backend can. Called from another
        thread. A process that does not come back is ended (INTERRUPT_GRACE_S)."""
        ...

    def close(self) -> None:
        """End the generation, if there is one: free groups, engines, samples, copies, writers. `load` may follow."""
        ...


ExecutorFactory = Callable[[int, Callable[[SavedPart], None]], Executor]
"""(rank, on_saved) -> executor. Called on the event loop, once per process and rank number, so it must be quick."""


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


class EngineThread:
    """One daemon thread that runs jobs in order. A callback on the event loop gets what a job returns or raises.

    submitted, finished  numbers of jobs; while they differ, a job runs or waits
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.submitted = 0
        self.finished = 0
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `job` after those before it, then `done(value or exception)` on the event loop."""
        self.submitted += 1
        self._jobs.put((job, done))

    def _run(self) -> None:
        while True:
            job, done = self._jobs.get()
            try:
                value = job()
            except Exception as error:  # noqa: BLE001 - the boundary: every error is reported
                value = error
            self.finished += 1
            self._loop.call_soon_threadsafe(done, value)
            # An error keeps what the node had: memory, and CUDA graphs, without whose end NCCL closes no group.
            del job, done, value


class EngineHost:
    """One rank. `handlers` are the operations that its Dask worker answers.

    boot  unique name of this process; a restarted worker has another
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.boot = uuid4().hex
        self.handlers = {"rlhf_link": self.link, "rlhf_status": self.status}
        self._loop = asyncio.get_running_loop()
        self._engine = EngineThread(self._loop)
        self._inbox = Inbox(0)
        self._holder: Writer | None = None  # the link of the controller that holds the lease
        self._executor: Executor | None = None
        self._made_for: tuple[int, ExecutorFactory] | None = None  # rank and factory of the executor
        self._wanted: tuple[int, ExecutorFactory] | None = None  # of the last accepted reset
        self._spec: GenerationSpec | None = None
        self._nodes: dict[str, PlanNode] = {}
        self._told_bytes = 0  # of what the executor has moved, the controller knows
        self._job: tuple[str, float] = ("", 0.0)  # what the engine thread does, and since when (time.time())
        self._job_ended = threading.Event()  # set when nobody waits any more for what it does
        self._ticking = asyncio.create_task(self._tick())
        self._act: dict[type, Callable[[Any], None]] = {
            Clear: self._clear,
            Load: self._load,
            Run: self._run,
            Interrupt: self._interrupt,
            Told: self._tell,
            Done: self._tell,
            Failed: self._tell,
        }

    # --- what the worker answers ------------------------------------------------------------------------

    async def link(self, comm: Comm, client: str, executor: str) -> Any:
        """Serve a controller's link: its requests go to the inbox, the inbox's answers go back as news.

        client    name of the controller; a lease taken over this link ends when the link closes
        executor  "module:function", an `ExecutorFactory`; it is imported before the greeting, because that takes
                  seconds, for which peers would otherwise wait when they join the groups
        """
        make_executor = await asyncio.to_thread(resolve_name, executor)
        await comm.write({"boot": self.boot, "pid": os.getpid()})
        writer = Writer(comm)
        try:
            while True:
                message: Any = await comm.read()
                with self._reporting():
                    self._receive(RANK_MESSAGE.validate_json(message), client, make_executor, writer)
        except CommClosedError:
            pass
        writer.close()
        self._apply(self._inbox.client_lost(client))
        return Status.dont_reply

    async def status(self) -> dict[str, Any]:
        """What this rank does now. Answers at once, whatever the engine thread does."""
        inbox = self._inbox
        return {
            "boot": self.boot,
            "pid": os.getpid(),
            "rank": inbox.rank,
            "lease": str(inbox.lease) if inbox.lease else "",
            "generation": inbox.generation,
            "phase": inbox.phase.name,
            "job": self._job[0],
            "since_s": self._job[1],
        }

    async def close(self) -> None:
        """Called when the worker ends."""
        self._ticking.cancel()

    # --- requests, and what the inbox makes of them -------------------------------------------------------

    def _receive(
        self,
        request: Reset | Restore | Deliver,
        client: str,
        make_executor: ExecutorFactory,
        writer: Writer,
    ) -> None:
        if isinstance(request, Reset):
            names = (request.run, request.attempt, request.generation)
            instructions = self._inbox.reset(*names, client)
            for instruction in instructions:
                if isinstance(instruction, Told) and instruction.kind == "refused":
                    self._tell(instruction, writer)
                    return
            self._holder = writer
            self._inbox.rank = request.rank
            self._wanted = (request.rank, make_executor)
        elif isinstance(request, Restore):
            spec = request.spec
            names = (spec.run, spec.attempt, spec.generation)
            instructions = self._inbox.restore(*names, spec.restore_step)
            if any(isinstance(instruction, Load) for instruction in instructions):
                self._spec = spec
        else:
            instructions = self._inbox.deliver(request.requests)
        self._apply(instructions)

    def _apply(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            self._act[type(instruction)](instruction)

    def _clear(self, instruction: Clear) -> None:
        executor = self._executor

        def close() -> None:
            reach(Point.RESET)
            if executor is not None:
                executor.close()

        def ended(_: Any) -> list[Any]:
            self._renew_executor()
            return self._inbox.cleared(instruction.key)

        self._submit(instruction.key, close, ended)

    def _renew_executor(self) -> None:
        """Make the executor for the rank number and factory of the last reset, unless there is one already.

        They change when another run takes the rank over, possibly while a job of the previous run still ends.
        """
        if self._wanted is not None and self._wanted != self._made_for:
            rank, make_executor = self._made_for = self._wanted
            self._executor = make_executor(rank, self._on_saved)

    def _load(self, instruction: Load) -> None:
        spec, executor = self._spec, self._executor
        assert spec is not None
        assert executor is not None
        self._nodes = {node.name: node for node in spec.plan.nodes}

        def ended(_: Any) -> list[Any]:
            return self._inbox.loaded(instruction.key)

        def load() -> None:
            if offered(self.worker.state.total_resources) == GPU:
                resolve_name(REQUIRE_GPU)()
            executor.load(spec)
            reach(Point.LOADED)

        self._submit(instruction.key, load, ended)

    def _run(self, instruction: Run) -> None:
        request, executor = instruction.request, self._executor
        assert executor is not None
        node = self._nodes[request.key.node]

        def run() -> NodeResult:
            result = executor.execute(request, node)
            reach(Point.ANSWER)
            return result

        self._submit(request.key, run, self._inbox.finished)

    def _interrupt(self, instruction: Interrupt) -> None:
        """Abort the engine thread's current job."""
        target = self._engine.finished + 1
        self._job_ended.set()
        threading.Thread(target=self._abort, args=(target,), name="abort", daemon=True).start()

    # --- the engine thread and the news ------------------------------------------------------------------

    def _submit(self, key: NodeKey, job: Callable[[], Any], ended_well: Callable[[Any], list[Any]]) -> None:
        """Run a job of the inbox on the engine thread, and tell the inbox how it ended."""
        self._job = (f"{key.node}-it{key.iteration}", time.time())
        self._job_ended = ended = threading.Event()
        inbox = self._inbox

        def done(value: Any) -> None:
            self._job = ("", time.time())
            with self._reporting():
                if isinstance(value, Exception):
                    self._apply(inbox.failed(_failure(key, inbox.rank, value)))
                else:
                    self._apply(ended_well(value))

        def job_here() -> Any:
            with at(inbox.rank, key.iteration, key.generation, key.attempt), interruptible(ended):
                return job()

        def start() -> None:
            self._engine.submit(job_here, done)

        # A job starts only when the news before it (that it was entered, the last result) have been sent.
        if self._holder is not None and self._inbox.lease is not None:
            self._holder.put(start)
        else:
            start()

    def _on_saved(self, part: SavedPart) -> None:
        """Report a saved part to the controller. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._tell, part)

    def _abort(self, target: int) -> None:
        """Abort the groups. If the job does not end within INTERRUPT_GRACE_S, exit: the process is of no more use."""
        deadline = time.monotonic() + INTERRUPT_GRACE_S
        if self._executor is not None:  # NCCL may wait without end for a rank that is gone
            threading.Thread(target=self._executor.abort, name="abort groups", daemon=True).start()
        while self._engine.finished < target:
            if time.monotonic() > deadline:
                logger.error(
                    "%s does not end although its groups were aborted: this process exits", self._job[0]
                )
                os._exit(1)
            time.sleep(0.05)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with self._reporting():
                self._tell_progress()

    def _tell_progress(self) -> None:
        """Tell the controller how many bytes have been moved, if there are more than it knows of."""
        lease, executor = self._inbox.lease, self._executor
        if lease is None or executor is None or self._holder is None:
            return
        total_bytes = executor.moved.total_bytes
        if total_bytes != self._told_bytes:
            self._told_bytes = total_bytes
            self._tell(
                Moved(
                    run=lease.run,
                    attempt=lease.attempt,
                    generation=self._inbox.generation,
                    rank=self._inbox.rank,
                    total_bytes=total_bytes,
                )
            )

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report an error of the host itself to the controller, which otherwise only a deadline would reveal."""
        try:
            yield
        except Exception as error:
            logger.exception("rank %d: the host has failed", self._inbox.rank)
            lease = self._inbox.lease
            if lease is not None and self._holder is not None:
                key = NodeKey(lease.run, lease.attempt, self._inbox.generation, SETUP, HOST)
                self._tell(Failed(failure=_failure(key, self._inbox.rank, error)))

    def _tell(self, news: BaseModel, writer: Writer | None = None) -> None:
        writer = writer or self._holder
        assert writer is not None, "news before the first reset"
        writer.put(news)


def _failure(key: NodeKey, rank: int, error: Exception) -> NodeFailure:
    if isinstance(error, UserCodeError):
        return NodeFailure(key=key, rank=rank, error=str(error), traceback=error.traceback, lasting=True)
    text = printable("".join(traceback.format_exception(error)))
    said = printable(f"{type(error).__name__}: {error}")
    return NodeFailure(key=key, rank=rank, error=said, traceback=text)
