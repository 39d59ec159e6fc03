"""Simulated ranks: a real inbox in each process, an engine thread in virtual time, a writing thread."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from prefect_rlhf.rlhf_tasks.protocol.inbox import Inbox
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    Clear,
    Deliver,
    Done,
    Failed,
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
from prefect_rlhf.rlhf_tasks.spec import (
    NodeFailure,
    NodeKey,
    NodeRequest,
    NodeResult,
    SaveNode,
    SaveSamplesNode,
)

if TYPE_CHECKING:
    from prefect_rlhf.rlhf_tasks.rehearsal.cluster import Meeting, SimulatedCluster

LOOK_EVERY_S = 1.0  # how often a link looks for a process that is being started


class SimulatedRankMissing(RuntimeError):
    """A rank has no process within the time for it."""


class Waiting(NamedTuple):
    """A part that is to be written: for which step and role, under which key, and since when it waits."""

    key: NodeKey
    role: str
    size_bytes: float
    since_s: float
    details: dict[str, Any]


class Process:
    """One process of a rank.

    hangs     its job never ends, whatever is done about it
    stopped   it does nothing and does not answer
    raises    its next call raises
    meeting   the collective that it is in
    """

    def __init__(self, cluster: "SimulatedCluster", rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.inbox = Inbox(rank)
        self.alive, self.stopped, self.hangs = True, False, False
        self.raises = False
        self.job: NodeKey | None = None
        self.meeting: Meeting | None = None
        self._link: SimulatedLink | None = None  # of the controller that holds the lease
        self._waiting: deque[Waiting] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._moved_bytes, self._told_bytes = 0.0, 0
        self._is_writing = False
        self._asked_s: float | None = None  # when the controller has asked for a reset or a restore
        self._act: dict[type, Callable[[Any], None]] = {
            Clear: self._clear,
            Load: self._load,
            Run: self._run,
            Interrupt: self._interrupt,
            Told: self._tell,
            Done: self._tell,
            Failed: self._tell,
        }

    # --- what it has in its memory: nothing that a rehearsal would need ---------------------------------------

    def forget(self) -> None:
        """A generation ends: samples, copies and groups are dropped."""

    def load(self, step: int | None) -> None:
        """A generation begins with the state of a commit; None: with the first one."""

    def compute(self, request: NodeRequest) -> str:
        """A node's work; gives a digest of what came of it."""
        return ""

    def details(self, key: NodeKey, node: SaveNode | SaveSamplesNode) -> dict[str, Any]:
        """What a commit says of this rank's part."""
        return {}

    def peer_left(self, key: NodeKey) -> None:
        """A collective that this process is in will never end: it waits until it is interrupted."""

    # --- messages ---------------------------------------------------------------------------------------

    def receive(self, message: Reset | Restore | Deliver, link: "SimulatedLink") -> None:
        """Handle a message of the controller; a stopped or dead process does not."""
        if not self.alive or self.stopped:
            return
        if isinstance(message, Deliver):
            self.carry_out(self.inbox.deliver(message.requests))
            return
        self._asked_s = self.cluster.now
        if isinstance(message, Reset):
            names = (message.run, message.attempt, message.generation)
            instructions = self.inbox.reset(*names, link.client)
            if not any(isinstance(i, Told) and i.kind == "refused" for i in instructions):
                self._link = link
        else:
            spec = message.spec
            instructions = self.inbox.restore(spec.run, spec.attempt, spec.generation, spec.restore_step)
        self.carry_out(instructions)

    def client_lost(self, client: str) -> None:
        """The controller's connection is closed."""
        if self.alive and not self.stopped:
            self._asked_s = None
            self.carry_out(self.inbox.client_lost(client))

    def carry_out(self, instructions: list[Any]) -> None:
        """Do what the inbox asks."""
        for instruction in instructions:
            self._act[type(instruction)](instruction)

    def _tell(self, news: BaseModel) -> None:
        if self._link is not None:
            self.cluster.post(self._link.hear, news)

    # --- jobs -------------------------------------------------------------------------------------------

    def _clear(self, instruction: Clear) -> None:
        self.job = instruction.key
        self.forget()
        self.lose_copies()

        async def work() -> None:
            await asyncio.sleep(self.cluster.machines.reset_s)
            self._answers("reset of a rank", self.cluster.timeouts.reset_s)
            self.end(instruction.key, lambda: self.inbox.cleared(instruction.key))

        self.cluster.start(work())

    def _load(self, instruction: Load) -> None:
        self.job = instruction.key
        self.cluster.join(self, lambda: self.cluster.start(self._read(instruction)))

    async def _read(self, instruction: Load) -> None:
        """Read models and commit; without a commit, save step 0."""
        cluster = self.cluster
        size_bytes = cluster.load_bytes(self.rank, instruction.step)
        await cluster.disk_of(self.rank).move(size_bytes, self)
        self._moved_bytes += size_bytes
        if self.job != instruction.key or not self.alive:
            return
        self.load(instruction.step)
        if instruction.step is None:
            for node in cluster.saves(self.rank):
                self._save(instruction.key._replace(node=node.name), node)
        pace = cluster.pace  # all ranks together must move `least_bytes` in `floor_s`
        self._answers("restore", pace.floor_s, _share(pace.least_bytes, size_bytes * cluster.plan.n_devices))
        self.end(instruction.key, lambda: self.inbox.loaded(instruction.key))

    def _answers(self, what: str, limit_s: float, share: float = 1.0) -> None:
        """What the controller has asked for is done. share: of the seconds that it took, those that are judged."""
        if self._asked_s is not None:
            self.cluster.watch.used(what, share * (self.cluster.now - self._asked_s), limit_s)

    def tell_progress(self, in_progress: float) -> None:
        """Tell the controller how many bytes have been moved, those of what is being moved among them."""
        lease, total_bytes = self.inbox.lease, round(self._moved_bytes + in_progress)
        if lease is not None and not self.stopped and total_bytes != self._told_bytes:
            self._told_bytes = total_bytes
            self._tell(
                Moved(
                    run=lease.run,
                    attempt=lease.attempt,
                    generation=self.inbox.generation,
                    rank=self.rank,
                    total_bytes=total_bytes,
                )
            )

    def _run(self, instruction: Run) -> None:
        self.job = instruction.request.key
        self.cluster.enter(self, instruction.request)
        if self.raises:
            self.cluster.post(self.cluster.raise_error, self)

    def node_ended(self, request: NodeRequest, started_s: float) -> None:
        """The node that this process is in has ended."""
        if self.job != request.key or not self.alive or self.stopped or self.hangs:
            return
        now, self.job = self.cluster.now, None
        digest = self.compute(request)
        node = self.cluster.node(request.key.node)
        if isinstance(node, SaveNode | SaveSamplesNode) and request.in_snapshot and self.rank in node.writers:
            self._save(request.key, node)
        result = NodeResult(key=request.key, rank=self.rank, started_s=started_s, ended_s=now, digest=digest)
        self.carry_out(self.inbox.finished(result))

    def end(self, key: NodeKey, stimulus: Callable[[], list[Any]]) -> None:
        """A job ends, unless it has ended or the process cannot continue."""
        if self.job == key and self.alive and not self.stopped and not self.hangs:
            self.job, self.meeting = None, None
            self.carry_out(stimulus())

    def fail(self, error: str) -> None:
        """The job ends by an error."""
        if (key := self.job) is not None:
            failure = NodeFailure(key=key, rank=self.rank, error=error)
            self.end(key, lambda: self.inbox.failed(failure))

    def _interrupt(self, instruction: Interrupt) -> None:
        """Abort the groups: a collective raises soon. Any other job that does not end by itself costs the process."""
        if self.meeting is not None and not self.hangs:
            self.cluster.call_later(self.cluster.machines.interrupt_s, self._raised, instruction.key)
        self.cluster.call_later(INTERRUPT_GRACE_S, self._exit_if_in, instruction.key)

    def _raised(self, key: NodeKey) -> None:
        if self.job == key:
            self.fail("the process groups were aborted")

    def _exit_if_in(self, key: NodeKey) -> None:
        if self.job == key and self.alive and not self.stopped:
            self.cluster.end_process(self, "its job did not end after the abort")

    # --- parts of snapshots -----------------------------------------------------------------------------

    def _save(self, key: NodeKey, node: SaveNode | SaveSamplesNode) -> None:
        """Keep a copy of the rank's part, and write it after those before it."""
        size_bytes = self.cluster.part_bytes(node, self.rank)
        part = Waiting(key, node.role, size_bytes, self.cluster.now, self.details(key, node))
        self.cluster.copied(self, part)
        self._waiting.append(part)
        if not self._is_writing:
            self._is_writing = True
            self._writing = self.cluster.start(self._write())

    async def _write(self) -> None:
        while self._waiting and self.alive:
            part = self._waiting[0]
            began_s, pace = self.cluster.now, self.cluster.pace
            await self.cluster.disk_of(self.rank).move(part.size_bytes, self)
            self._moved_bytes += part.size_bytes
            self._waiting.popleft()
            self.cluster.dropped(self, [part])
            judged_s = (self.cluster.now - began_s) * _share(pace.least_bytes, part.size_bytes)
            self.cluster.watch.used("progress of a part of a snapshot", judged_s, pace.floor_s)
            key = part.key
            self._tell(
                SavedPart(
                    run=key.run,
                    attempt=key.attempt,
                    generation=key.generation,
                    step=key.iteration + 1,
                    role=part.role,
                    rank=self.rank,
                    details=part.details,
                )
            )
        self._is_writing = False

    def lose_copies(self) -> None:
        """What it had still to write is gone: the process has ended, or nobody needs it any more."""
        if self._writing is not None:
            self._writing.cancel()
        self.cluster.dropped(self, self._waiting)
        self._waiting.clear()
        self._is_writing = False


def _share(least_bytes: float, size_bytes: float) -> float:
    """The share of a wait in which it moves the bytes that count as progress, if it moves evenly."""
    return min(1.0, least_bytes / size_bytes) if size_bytes else 1.0


class SimulatedLink:
    """The controller's way to one rank, as `rlhf_tasks.controller.controller.RankLink` is on a real cluster."""

    def __init__(
        self,
        cluster: "SimulatedCluster",
        rank: int,
        name: str,
        client: str,
        executor: str,
        on_news: Callable[[Any], None],
        on_lost: Callable[[int, str], None],
        on_started: Callable[[int], None],
    ) -> None:
        self.rank, self.client = rank, client
        self._cluster = cluster
        self._on_news, self._on_lost, self._on_started = on_news, on_lost, on_started
        self._process: Process | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def process(self) -> Process | None:
        """The process that the link is connected to."""
        return self._process

    def hear(self, news: Any) -> None:
        """News arrive; those of a process that is not the link's any more do not."""
        if not self._closed:
            self._on_news(news)

    async def open(self, deadline_s: float) -> None:
        """Connect to the rank's process. Raises SimulatedRankMissing."""
        await self._find(None, deadline_s)

    def send(self, message: BaseModel) -> None:
        """Send a message; without a process, or when the link is closed, it is dropped."""
        if self._process is not None and not self._closed:
            self._cluster.post(self._process.receive, message, self)

    async def answers(self, within_s: float) -> bool:
        """Whether the process answers in time."""
        process = self._process
        if process is None or not process.alive or process.stopped:
            await asyncio.sleep(within_s)
            return False
        return True

    def restart(self, lost: bool, deadline_s: float) -> None:
        """Have the rank given a new process, unless that is in progress or the link is closed."""
        if self._closed:
            return
        if self._restarting is None or self._restarting.done():
            self._restarting = self._cluster.start(self._restart(lost, deadline_s))

    async def close(self) -> None:
        """Release the rank."""
        self._closed = True
        if self._restarting is not None:
            self._restarting.cancel()
        if self._process is not None:
            self._process.client_lost(self.client)

    def broken(self, process: Process, reason: str) -> None:
        """A process has ended, and its connections with it."""
        if self._process is process and not self._closed:
            self._process = None
            self._on_lost(self.rank, reason)

    async def _restart(self, lost: bool, deadline_s: float) -> None:
        old, began_s = self._process, self._cluster.now
        if not lost and old is not None:
            self._process = None  # its end is not reported any more
            self._cluster.end_process(old, "killed: it is stuck")
        try:
            await self._find(old, deadline_s)
        except SimulatedRankMissing:
            return  # the ledger's own deadline ends the rebuild
        self._cluster.watch.used("new process of a rank", self._cluster.now - began_s, deadline_s)
        self._on_started(self.rank)

    async def _find(self, not_this: Process | None, deadline_s: float) -> None:
        until_s = self._cluster.now + deadline_s
        while True:
            process = self._cluster.processes[self.rank]
            if process is not None and process is not not_this:
                self._process = process
                return
            if self._cluster.now >= until_s:
                raise SimulatedRankMissing(f"rank {self.rank} was not there within {deadline_s:g} s")
            await asyncio.sleep(LOOK_EVERY_S)
