"""One attempt of a run on the controller: drives the ledger, on the worker's event loop.

The ledger decides. This module carries out its instructions (send, restart, commit), feeds it what ranks, disk and
clock report, and tells the flow.

    flow ── enter, pause, resume, stop_after ──┐                        ┌── Send, ResetRank, RestoreRank ──► ranks
    ranks ── results, parts, errors, losses ───┤                        ├── WriteCommit ──► disk
    disk ── commit written or not, bytes ──────┼─► _feed ─► Ledger ─► _apply
    clock ── a tick each TICK_S ───────────────┘                        └── Enterable, Committed, Faulted ──► flow
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from pydantic import BaseModel

from prefect_rlhf.rlhf_tasks.checkpoint.journals import MetricsLines
from prefect_rlhf.rlhf_tasks.protocol.account import State
from prefect_rlhf.rlhf_tasks.protocol.commit import Snapshots
from prefect_rlhf.rlhf_tasks.protocol.ledger import Ledger, Phase
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    HOST,
    SETUP,
    Deliver,
    Done,
    Enterable,
    Failed,
    Faulted,
    GaveUp,
    GenerationSpec,
    IterationDone,
    IterationRan,
    Moved,
    NodeBegun,
    NodeEnded,
    Ready,
    Reset,
    ResetRank,
    RestartRank,
    Restore,
    RestoreRank,
    RunSpec,
    SavedPart,
    Send,
    Told,
    WriteCommit,
)
from prefect_rlhf.rlhf_tasks.protocol.progress import Timeouts
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Deadlines
from prefect_rlhf.rlhf_tasks.spec import (
    IN_FLIGHT,
    ExecutionPlan,
    NodeFailure,
    NodeKey,
    SaveNode,
    SaveSamplesNode,
)
from prefect_rlhf.rlhf_tasks.system.durable import NotWritable
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, at, reach

logger = logging.getLogger(__name__)
TICK_S = 0.2
OF_RANKS = {Ledger.rank_entered, Ledger.rank_done, Ledger.rank_moved}
"""News that come from every rank for every node. Without instructions, the flow may enter what it could before."""
# Ranks wait in collectives for one that still loads a large commit. The ledger ends a wait without progress, long
# before the groups' own timeout.
GROUP_TIMEOUT_FLOOR_S = 24 * 3600.0
CONNECT_DEADLINE_S = 300.0  # a rank first imports torch and transformers, and other ranks share its cores
ALIVE_S = (
    2.0  # a running process answers within this; killing one that does not frees the peers that it blocks
)


class Link(Protocol):
    """The way to one rank. `RankLink` has the meaning of its methods.

    process  the rank's present process, whatever stands for it; None before `open`
    """

    @property
    def process(self) -> Any: ...
    async def open(self, deadline_s: float) -> None: ...
    def send(self, message: BaseModel) -> None: ...
    async def answers(self, within_s: float) -> bool: ...
    def restart(self, lost: bool, deadline_s: float) -> None: ...
    async def close(self) -> None: ...


class MeetingPlace(Protocol):
    """Where the ranks of a generation find each other: the address of a store."""

    host: str
    port: int

    def close(self) -> None: ...


class LinkFactory(Protocol):
    """Makes the way to a rank; the arguments are as in `RankLink`."""

    def __call__(
        self,
        rank: int,
        name: str,
        client: str,
        executor: str,
        on_news: Callable[[Any], None],
        on_lost: Callable[[int, str], None],
        on_started: Callable[[int], None],
    ) -> Link: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an attempt works with outside its own process. A rehearsal gives simulated ones.

    link        makes the way to each rank
    rendezvous  where the ranks meet
    snapshots   makes what finds and writes commits
    """

    link: LinkFactory
    rendezvous: MeetingPlace
    snapshots: Callable[[RunSpec], Snapshots]


class Attempt:
    """One attempt, from its lease to its end.

    around  ranks and disk
    spec    the flow's description of the attempt
    tell    called with each `Event` for the flow

    Its clock is that of the event loop, which is `time.monotonic` unless the loop has another.
    """

    def __init__(self, around: Surroundings, spec: RunSpec, tell: Callable[[Any], None]) -> None:
        self.spec = spec
        self._around = around
        self._tell = tell
        self._client = uuid4().hex
        self._rendezvous = around.rendezvous
        self._snapshots: Snapshots | None = None
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._links: list[Link] = []
        self._lost_early: dict[int, str] = {}
        self._ordered_early: list[tuple[Callable[..., list[Any]], tuple[Any, ...]]] = []
        self._ledger: Ledger | None = None
        self._metrics = MetricsLines(spec.peak_flops_per_s)
        self._enterable: tuple[int, int] | None = None
        self._inside: set[tuple[int, str]] = (
            set()
        )  # (iteration, node) that a rank has entered and not all have left
        self._tasks: set[asyncio.Task[None]] = set()
        self._act: dict[type, Callable[[Any], None]] = {
            ResetRank: self._reset_rank,
            RestartRank: lambda i: self._links[i.rank].restart(i.lost, self._timeouts.restart_s),
            RestoreRank: self._restore_rank,
            Send: self._deliver,
            WriteCommit: lambda i: self._background(self._commit(i)),
            Ready: lambda i: None,  # `_apply` reads `Ledger.enterable` and tells `Enterable`
            IterationDone: self._ran,
            Faulted: self._faulted,
            NodeEnded: self._node_ended,
        }

    @property
    def _timeouts(self) -> Timeouts:
        return self.ledger.timeouts

    @property
    def ledger(self) -> Ledger:
        """The ledger of this attempt. It exists after `start`."""
        assert self._ledger is not None, "the attempt has not started"
        return self._ledger

    @property
    def unreached(self) -> tuple[int, ...]:
        """Ranks that `start` has not reached yet, or not at all."""
        return tuple(rank for rank, link in enumerate(self._links) if link.process is None)

    # --- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the last commit, connect to all ranks, and begin generation 0.

        Raises RankMissing, what `Snapshots.latest` raises when no commit passes verification, and what `Ledger` does
        for decisions.
        """
        spec = self.spec
        self._reach(Point.LEASE)
        self._snapshots = snapshots = self._around.snapshots(spec)
        loop = asyncio.get_running_loop()
        latest = await loop.run_in_executor(self._disk, snapshots.latest)
        decides = any(nodes[0].call.decides for nodes in spec.plan.calls.values())
        past = await loop.run_in_executor(self._disk, lambda: list(snapshots.decided())) if decides else []
        step, cursor = latest if latest is not None else (None, 0)
        news = (self._receive, self._lost, self._started)
        self._links = [
            self._around.link(rank, name, self._client, spec.executor, *news)
            for rank, name in enumerate(spec.ranks)
        ]
        await asyncio.gather(*(link.open(CONNECT_DEADLINE_S) for link in self._links))
        self._ledger = Ledger(
            spec.plan,
            run=spec.run,
            attempt=spec.attempt,
            n_ranks=len(spec.ranks),
            total_iterations=spec.iterations,
            committed_step=step,
            cursor=cursor,
            limits=spec.limits,
            predicted_s=spec.predicted_s,
            users_s=spec.users_s,
            rebuilds=spec.rebuilds,
            past=past,
        )
        for order, facts in self._ordered_early:
            self._feed(order, self._ledger, *facts)
        self._feed(self._ledger.start)
        for rank, reason in self._lost_early.items():
            self._feed(self._ledger.rank_lost, rank, reason)
        self._background(self._tick())

    async def close(self) -> None:
        """Release every rank and leave the run folder to the next attempt. Completes a commit in progress first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links))
        self._rendezvous.close()
        await asyncio.to_thread(self._disk.shutdown)

    # --- for the flow -----------------------------------------------------------------------------------

    def enter(self, iteration: int, generation: int) -> None:
        """Deliver an iteration's requests, if that has not been done."""
        self._feed(self.ledger.enter, iteration, generation)

    def pause(self) -> None:
        """Deliver no more iterations. `Held` is told when all delivered ones are committed."""
        self._order(Ledger.pause)

    def resume(self) -> None:
        """End a pause."""
        self._order(Ledger.resume)

    def stop_after(self, iteration: int) -> None:
        """Make an iteration the last one."""
        self._order(Ledger.stop_after, iteration)

    def _order(self, order: Callable[..., list[Any]], *facts: Any) -> None:
        """Pass on an order, which the flow may give at any time. Orders before the start are kept until then."""
        if self._ledger is None:
            self._ordered_early.append((order, facts))
        else:
            self._feed(order, self._ledger, *facts)

    # --- news of the ranks ------------------------------------------------------------------------------

    def _receive(self, news: Told | Done | Failed | SavedPart | Moved) -> None:
        """Handle news from a rank."""
        if self._ledger is None:
            return
        if isinstance(news, Done):
            self._feed(self._ledger.rank_done, news.result)
        elif isinstance(news, Failed):
            self._feed(self._ledger.rank_failed, news.failure)
        elif isinstance(news, SavedPart):
            self._saved(news)
        elif isinstance(news, Moved):
            if (news.run, news.attempt) == (self.spec.run, self.spec.attempt):
                self._feed(self._ledger.rank_moved, news.rank, news.generation, news.total_bytes)
        elif (news.key.run, news.key.attempt) == (self.spec.run, self.spec.attempt):
            self._told(news)

    def _told(self, news: Told) -> None:
        ledger, rank, key = self.ledger, news.rank, news.key
        match news.kind:
            case "entered":
                self._feed(ledger.rank_entered, rank, key)
                self._node_begun(key)
            case "reset":
                self._feed(ledger.rank_reset, rank, key.generation)
            case "restored":
                self._feed(ledger.rank_restored, rank, key.generation)
            case "refused":
                self._feed(ledger.rank_refused, rank, key, news.reason)

    def _node_begun(self, key: NodeKey) -> None:
        """Tell the flow that the first rank has entered a node, unless that is already aborted or done."""
        iteration, generation, node = key.iteration, key.generation, key.node
        live = self.ledger.account.node_state(iteration, generation, node) in (State.WAITING, State.RUNNING)
        if live and (iteration, node) not in self._inside:
            self._inside.add((iteration, node))
            now = time.time()
            self._tell(NodeBegun(iteration=iteration, generation=generation, node=node, started_s=now))

    def _saved(self, part: SavedPart) -> None:
        key = NodeKey(part.run, part.attempt, part.generation, part.step - 1, self._save_node(part.role))
        if part.error:
            failure = NodeFailure(key=key, rank=part.rank, error=part.error, lasting=part.lasting)
            self._feed(self.ledger.rank_failed, failure)
        else:
            self._feed(self.ledger.part_durable, part.rank, key, part.details)

    def _save_node(self, role: str) -> str:
        saves = [node for node in self.spec.plan.nodes if isinstance(node, SaveNode | SaveSamplesNode)]
        return next(node.name for node in saves if node.role == role)

    def _lost(self, rank: int, reason: str) -> None:
        if self._ledger is None:
            self._lost_early[rank] = reason  # `start` feeds it to the ledger when all ranks are connected
        else:
            self._feed(self._ledger.rank_lost, rank, reason)

    def _started(self, rank: int) -> None:
        self._feed(self.ledger.rank_started, rank)

    def _feed(self, stimulus: Callable[..., list[Any]], *facts: Any) -> None:
        """Give the ledger a stimulus and carry out its instructions. An internal error ends the attempt."""
        try:
            instructions = stimulus(*facts, asyncio.get_running_loop().time())
            self._apply(instructions)
            if instructions or getattr(stimulus, "__func__", None) not in OF_RANKS:
                self._offer()
        except Exception as error:
            logger.exception("run %s: the ledger or one of its instructions has failed", self.spec.run)
            reason = f"internal error: {type(error).__name__}: {error}"
            self._tell(GaveUp(reason=reason, committed_step=self.ledger.committed_step))

    # --- instructions of the ledger ---------------------------------------------------------------------

    def _apply(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            self._act.get(type(instruction), self._tell)(
                instruction
            )  # what the ledger tells is told as it is

    def _offer(self) -> None:
        """Tell the flow which iteration it may enter, where that has changed."""
        enterable = self.ledger.enterable
        place = None if enterable is None else (enterable, self.ledger.generation)
        if place != self._enterable:
            self._enterable = place
            if place is not None:
                self._tell(Enterable(iteration=place[0], generation=place[1]))

    def _node_ended(self, ended: NodeEnded) -> None:
        self._inside.discard((ended.iteration, ended.node))
        self._tell(ended)

    def _reset_rank(self, instruction: ResetRank) -> None:
        spec, rank = self.spec, instruction.rank
        self._links[rank].send(
            Reset(run=spec.run, attempt=spec.attempt, generation=instruction.generation, rank=rank)
        )
        self._reach(Point.RESETTING, generation=instruction.generation)
        if instruction.generation > 0:
            self._background(self._look_alive(rank, instruction.generation))

    def _deliver(self, instruction: Send) -> None:
        self._links[instruction.rank].send(Deliver(requests=instruction.requests))
        self._reach(Point.DELIVERED, instruction.requests[0].key.iteration)

    def _reach(self, point: Point, iteration: int | None = None, generation: int | None = None) -> None:
        with at(iteration=iteration, generation=generation, attempt=self.spec.attempt):
            reach(point)

    async def _look_alive(self, rank: int, generation: int) -> None:
        """Replace, at once, a process that does not even answer: it will not reset.

        Its peers in a collective fail as soon as its connections break. Otherwise they would exit after their own
        grace period too, and restarting them all takes much longer.
        """
        link, ledger = self._links[rank], self.ledger
        process = link.process
        if await link.answers(ALIVE_S) or link.process is not process:
            return
        if (ledger.phase, ledger.generation) == (Phase.RESETTING, generation):
            key = NodeKey(self.spec.run, self.spec.attempt, generation, SETUP, HOST)
            error = f"no answer within {ALIVE_S:g} s"
            self._feed(ledger.rank_failed, NodeFailure(key=key, rank=rank, error=error))

    def _restore_rank(self, instruction: RestoreRank) -> None:
        spec, generation = self.spec, instruction.generation
        generation_spec = GenerationSpec(
            run=spec.run,
            attempt=spec.attempt,
            generation=generation,
            rank=instruction.rank,
            n_ranks=len(spec.ranks),
            plan=spec.plan,
            config=spec.config,
            run_folder=spec.run_folder,
            restore_step=instruction.step,
            iterations=spec.iterations,
            store_host=self._rendezvous.host,
            store_port=self._rendezvous.port,
            store_prefix=f"attempt-{spec.attempt}/generation-{generation}/{self._client}",
            timeout_s=group_timeout_s(spec.plan, self.ledger.account.sequencer.deadlines),
            blocks=spec.blocks,
        )
        self._links[instruction.rank].send(Restore(spec=generation_spec))

    def _ran(self, instruction: IterationDone) -> None:
        iteration, ledger = instruction.iteration, self.ledger
        metrics = self._metrics.metrics(iteration, ledger.account.results(iteration))
        self._tell(IterationRan(iteration=iteration, generation=ledger.generation, metrics=metrics))

    def _faulted(self, faulted: Faulted) -> None:
        cause = faulted.cause
        logger.error("generation %d has ended: %s\n%s", faulted.generation, cause, cause.traceback)
        self._inside.clear()
        if not cause.lasting:
            self._tell(faulted)

    async def _commit(self, order: WriteCommit) -> None:
        account = self.ledger.account
        results = {iteration: account.results(iteration) for iteration in order.iterations}
        assert self._snapshots is not None
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._disk, self._snapshots.commit, order, results)
        except Exception as error:
            logger.exception("step %d could not be committed", order.step)
            full = isinstance(error, NotWritable)
            reason = str(error) if full else f"{type(error).__name__}: {error}"
            self._feed(self.ledger.commit_failed, order.step, reason, full)
        else:
            loop.run_in_executor(self._disk, self._snapshots.prune)  # nobody waits for it but the next commit
            self._feed(self.ledger.commit_done, order.step)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._snapshots is not None:
                self._feed(self.ledger.disk_moved, self._snapshots.moved.total_bytes)
            self._feed(self.ledger.tick)

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def group_timeout_s(plan: ExecutionPlan, deadlines: Deadlines) -> float:
    """Timeout of a generation's process groups, in seconds: longer than any wait that the ledger allows.

    A rank inside a collective waits for everything that its peers run before it. Each node has its own deadline, so
    that is at most the sum of the deadlines of the iterations in flight.
    """
    return GROUP_TIMEOUT_FLOOR_S + IN_FLIGHT * sum(deadlines.of(node.name) for node in plan.nodes)
