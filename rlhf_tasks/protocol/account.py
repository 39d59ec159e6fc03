"""The account: which iterations were delivered, what their ranks have answered, what is committed.

It is the book-keeping half of the ledger and does not know phases or faults. Watchers read it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from prefect_rlhf.rlhf_tasks.protocol.commit import Cadence, CommitOrder, SnapshotSchedule
from prefect_rlhf.rlhf_tasks.protocol.decisions import Decisions
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    SETUP,
    Aborted,
    Cause,
    Committed,
    IterationDone,
    LedgerInstruction,
    NodeEnded,
    Send,
    WriteCommit,
)
from prefect_rlhf.rlhf_tasks.protocol.progress import (
    Headway,
    IterationProgress,
    NodeProgress,
    NodeSummary,
    Occupancy,
    Pace,
    PartsInWriting,
    Timeouts,
)
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.spec import NodeKey, NodeRequest, NodeResult

DISK = -1
"""The controller's disk, as a source of bytes; others are ranks."""
REMEMBERED = 8
"""Number of committed iterations whose summaries are kept for watchers that ask late."""


class State(Enum):
    """The state of a node or an iteration, for watchers."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Account:
    """All iterations of one attempt.

    sequencer         makes the requests of the current generation
    cadence           decides which iterations end in a snapshot; None where the configuration does
    decisions         what is decided by the metrics of finished calls
    next_iteration    the iteration to deliver next
    """

    def __init__(
        self,
        sequencer: Sequencer,
        schedule: SnapshotSchedule,
        committed: int | None,
        timeouts: Timeouts,
        pace: Pace,
        cadence: Cadence | None = None,
        decisions: Decisions | None = None,
    ) -> None:
        self.sequencer = sequencer
        self.decisions = decisions or Decisions(sequencer.plan)
        self._withheld: dict[int, deque[NodeRequest]] = {}  # rank -> requests from the first undecided one on
        self.commits = CommitOrder(schedule, committed)
        self.cadence = cadence
        self.occupancy = Occupancy(timeouts.entry_s)
        self.parts = PartsInWriting(pace)
        self.next_iteration = committed or 0
        self._timeouts, self._pace = timeouts, pace
        self._commit_headway: Headway | None = None
        self._iterations: dict[int, IterationProgress] = {}
        self._incomplete: dict[int, IterationProgress] = {}  # those of them that no commit can cover yet
        self._aborted: dict[tuple[int, int], Cause] = {}

    # --- for watchers -----------------------------------------------------------------------------------

    def iteration_state(self, iteration: int, generation: int) -> State:
        """The state of an iteration that was, or will be, entered under a generation."""
        progress = self._iterations.get(iteration)
        if progress is not None and progress.generation == generation:
            if progress.committed:
                return State.COMMITTED
            return State.DONE if progress.nodes_done else State.RUNNING
        if generation != self.sequencer.generation or (iteration, generation) in self._aborted:
            return State.ABORTED
        return State.COMMITTED if iteration < self.commits.first_uncommitted else State.WAITING

    def node_state(self, iteration: int, generation: int, node: str) -> State:
        """The state of a node: WAITING until its last rank has entered, then RUNNING, DONE, or ABORTED."""
        whole = self.iteration_state(iteration, generation)
        if whole in (State.ABORTED, State.WAITING):
            return whole
        progress = self._iterations.get(iteration)
        if progress is None or progress.nodes[node].done:
            return State.DONE
        return State.WAITING if progress.nodes[node].deadline is None else State.RUNNING

    def summary(self, iteration: int, node: str) -> NodeSummary | None:
        """The summary of a node that is done; None once it is dropped."""
        progress = self._iterations.get(iteration)
        return None if progress is None else progress.nodes[node].summary

    def results(self, iteration: int) -> dict[str, dict[int, NodeResult]]:
        """Node -> rank -> result, for the results that have arrived.

        Dropped at the commit after the iteration's own, so that the garbage collector need not visit them repeatedly.
        """
        progress = self._iterations[iteration]
        return {name: dict(node.results) for name, node in progress.nodes.items()}

    @property
    def newest_live(self) -> int:
        """The newest iteration that is in flight, complete or committed, and not aborted."""
        return max((*self._iterations, self.commits.first_uncommitted - 1))

    @property
    def ends_in_commit(self) -> bool:
        """Whether everything delivered by this generation is committed, or will be without another iteration."""
        newest = self.next_iteration - 1
        return newest < self.commits.first_uncommitted or self.commits.is_snapshot(newest)

    # --- delivery and news ------------------------------------------------------------------------------

    def crowded(self, iteration: int, limit: int, in_snapshot: bool) -> str | None:
        """Why an iteration may not enter while `limit` iterations are in flight; None when it may.

        in_snapshot  it must end in a snapshot, whatever the schedule says

        Where every iteration ends in a snapshot, those that are not committed are in flight. Elsewhere those that
        still run are, so that training does not wait for a long commit; and as many snapshots may be unfinished, for
        each holds its parts in host memory. After a fault, with a limit of 1, snapshots must be complete, too.
        """
        if self.commits.schedule.every == 1:
            oldest, end = self.commits.first_uncommitted, "is committed"
        elif limit == 1:
            oldest, end = self.commits.first_incomplete, "is complete"
        else:
            running = (i for i, progress in self._incomplete.items() if not progress.nodes_done)
            oldest, end = min(running, default=iteration), "has ended"
            unfinished = sum(bool(progress.saves) for progress in self._incomplete.values())
            if unfinished >= limit and (in_snapshot or self.commits.is_snapshot(iteration)):
                return f"the snapshots of {limit} iterations are being written; {iteration + 1} may enter after one."
        if iteration - oldest < limit:
            return None
        flying = f"iterations {oldest + 1} to {iteration} are in flight"
        return f"{flying}; {iteration + 1} may enter when {oldest + 1} {end}."

    def deliver(self, iteration: int, now: float) -> list[LedgerInstruction]:
        """Open an iteration and send every rank its requests, up to the first that waits for a decision. Whether it
        ends in a snapshot is decided here."""
        if self.cadence is not None:
            if iteration == self.sequencer.first_iteration:
                self.cadence.begin(iteration, now)
            if self.cadence.wants(iteration):
                self.commits.want_snapshot(iteration)
            self.cadence.delivered(iteration, self.commits.is_snapshot(iteration))
        in_snapshot = self.commits.is_snapshot(iteration)
        requests = self.sequencer.requests(iteration, in_snapshot=in_snapshot)
        nodes = {
            node.name: NodeProgress(
                self.sequencer.devices[node.name], self.sequencer.deadline_s(iteration, node)
            )
            for node in self.sequencer.plan.nodes
        }
        saves: Mapping[str, tuple[int, ...]] = self.sequencer.saves if in_snapshot else {}
        progress = IterationProgress(iteration, self.sequencer.generation, nodes, saves)
        self._iterations[iteration] = self._incomplete[iteration] = progress
        self.next_iteration = iteration + 1
        if not self.decisions.readers:
            return [self._send(rank, mine, now) for rank, mine in requests.items()]
        for rank, mine in requests.items():
            self._withheld.setdefault(rank, deque()).extend(mine)
        return self._send_decided(now)

    def _send(self, rank: int, requests: tuple[NodeRequest, ...], now: float) -> Send:
        self.occupancy.delivered(rank, requests, now)
        return Send(rank, requests)

    def _send_decided(self, now: float) -> list[LedgerInstruction]:
        """Send each rank what it was not sent yet, up to the first request that still waits for a decision. One
        message has requests of one iteration."""
        sent: list[LedgerInstruction] = []
        for rank, waiting in self._withheld.items():
            ready: list[NodeRequest] = []
            while waiting and (request := self._decided(waiting[0])) is not None:
                waiting.popleft()
                if ready and ready[0].key.iteration != request.key.iteration:
                    sent.append(self._send(rank, tuple(ready), now))
                    ready = []
                ready.append(request)
            if ready:
                sent.append(self._send(rank, tuple(ready), now))
        return sent

    def _decided(self, request: NodeRequest) -> NodeRequest | None:
        """A request with the decisions that its node reads; None while one is not made."""
        iteration, node = request.key.iteration, request.key.node
        if node not in self.decisions.readers:
            return request
        values, in_snapshot = self.decisions.values(iteration, node), self.commits.is_snapshot(iteration)
        return None if values is None else replace(request, decided=values, in_snapshot=in_snapshot)

    def _decide(self, progress: IterationProgress, node: str, now: float) -> list[LedgerInstruction]:
        """A node has ended: make its decisions, and send what has waited for them."""
        results, iteration = progress.nodes[node].results, progress.iteration
        rank, first = next(iter(results.items()))
        results[rank] = self.decisions.make(iteration, node, first)
        if self.decisions.stops(iteration) and not self.commits.is_snapshot(iteration):
            self.commits.want_snapshot(iteration)
            progress.expect(self.sequencer.saves)
        return self._send_decided(now)

    def expect_setup_parts(self) -> None:
        """The roles are being initialised: each rank saves its parts of step 0 before it has restored."""
        setup = IterationProgress(SETUP, self.sequencer.generation, {}, self.sequencer.initial_saves)
        self._iterations[SETUP] = self._incomplete[SETUP] = setup

    def initialised(self, rank: int, now: float) -> None:
        """A rank has initialised its roles, and has copied its parts of step 0."""
        for node in self.sequencer.initial_saves:
            self._expect_part(rank, SETUP, node, now)

    def entered(self, rank: int, key: NodeKey, now: float) -> None:
        """A rank has entered a node."""
        progress = self._iterations.get(key.iteration)
        if progress is not None:
            progress.nodes[key.node].enter(rank, now)
            self.occupancy.entered(rank, key.iteration, key.node, now)
            if self.cadence is not None and progress.awaits_part(rank, key.node):
                self.cadence.writing((rank, key.iteration, key.node), now)

    def done(self, result: NodeResult, now: float) -> list[LedgerInstruction]:
        """A rank has answered. Repeats change nothing."""
        key, rank = result.key, result.rank
        progress = self._iterations.get(key.iteration)
        if progress is None:
            return []
        node_done = progress.done(rank, key.node, result, now)
        self.occupancy.left(rank, key.iteration, key.node, now)
        self._expect_part(rank, key.iteration, key.node, now)
        if not node_done:
            return []
        summary = progress.nodes[key.node].summary
        assert summary is not None, f"{key.node} of iteration {key.iteration} is done"
        done = NodeEnded(
            iteration=key.iteration,
            generation=progress.generation,
            node=key.node,
            started_s=summary.started_s,
            ended_s=summary.ended_s,
        )
        instructions: list[LedgerInstruction] = [done]
        if key.node in self.decisions.made_after:
            instructions += self._decide(progress, key.node, now)
        if progress.nodes_done:
            if self.cadence is not None:
                self.cadence.iteration_ended(key.iteration, now)
            instructions.append(IterationDone(key.iteration))
        return instructions

    def _expect_part(self, rank: int, iteration: int, node: str, now: float) -> None:
        progress = self._iterations.get(iteration)
        if progress is not None and progress.awaits_part(rank, node):
            self.parts.expect(rank, iteration, node, now)
            if self.cadence is not None:
                self.cadence.writing((rank, iteration, node), now)

    def durable(self, rank: int, key: NodeKey, parts: Any, now: float) -> None:
        """A rank's part of a snapshot is on the disk."""
        progress = self._iterations.get(key.iteration)
        if progress is not None:
            progress.durable(rank, key.node, parts)
            self.parts.durable(rank, key.iteration, key.node, now)
            if self.cadence is not None:
                self.cadence.wrote((rank, key.iteration, key.node), now)

    def overdue(self, now: float) -> Cause | None:
        """The first node of this generation that is past its deadline, or rank that does not continue writing."""
        for progress in self._incomplete.values():
            late = progress.overdue(now) if progress.generation == self.sequencer.generation else None
            if late is not None:
                return late
        return self.parts.overdue(now)

    # --- commits and generations ------------------------------------------------------------------------

    def next_commit(self, now: float, *, initialised: bool) -> WriteCommit | None:
        """The commit to write now, if any.

        initialised  every rank has initialised its roles; step 0 is committed only then
        """
        for iteration, progress in list(self._incomplete.items()):
            if progress.complete and (initialised or iteration != SETUP):
                del self._incomplete[iteration]
                self.commits.complete(iteration)
        step = self.commits.start_next()
        if step is None:
            return None
        self._commit_headway = Headway(self._pace, now)
        if self.cadence is not None:
            self.cadence.writing(DISK, now)
        return WriteCommit(
            step,
            tuple(i for i in self.commits.covered(step) if i != SETUP),
            {name: dict(parts) for name, parts in self._iterations[step - 1].parts.items()},
            self.sequencer.cursor(step),
            self.sequencer.versions(step),
            self.sequencer.plan,
        )

    def disk_moved(self, total_bytes: int, now: float) -> None:
        """The controller has written and removed so many bytes."""
        if self._commit_headway is not None:
            self._commit_headway.moved(DISK, total_bytes, now)

    def commit_overdue(self, now: float) -> str | None:
        """Why the commit that is being written is given up; None where it continues or there is none."""
        if self._commit_headway is None or not self._commit_headway.overdue(now):
            return None
        return f"step {self.commits.writing} is not committed: the controller has written {self._pace}"

    def commit_failed(self, now: float) -> None:
        """The commit could not be written: the iterations that it covers must be run again."""
        self._end_commit(now)
        self.commits.failed()

    def _end_commit(self, now: float) -> None:
        self._commit_headway = None
        if self.cadence is not None:
            self.cadence.wrote(DISK, now)

    def committed(self, step: int, now: float) -> list[LedgerInstruction]:
        """A commit is written. Drops the results of iterations that were committed before it.

        Also drops iterations that are more than REMEMBERED older than the ones it covers.
        """
        for progress in self._iterations.values():
            if progress.committed:
                progress.forget_results()
        self._end_commit(now)
        if self.cadence is not None:
            self.cadence.committed(step - 1)
        covered = self.commits.written(step)
        told: list[LedgerInstruction] = []
        for iteration in covered:
            self._iterations[iteration].committed = True
            if iteration != SETUP:
                results = {node: tuple(by_rank.values()) for node, by_rank in self.results(iteration).items()}
                told.append(Committed(iteration=iteration, results=results))
        oldest = covered.start - REMEMBERED
        self.decisions.forget(oldest, self.next_iteration)
        self._iterations = {i: p for i, p in self._iterations.items() if i >= oldest and i != SETUP}
        self._aborted = {name: cause for name, cause in self._aborted.items() if name[0] >= oldest}
        return told

    def abort(self, cause: Cause) -> list[LedgerInstruction]:
        """After a fault: abort every iteration that no commit can cover any more."""
        instructions: list[LedgerInstruction] = []
        for iteration in self.commits.lost(i for i, p in self._iterations.items() if not p.committed):
            generation = self._iterations.pop(iteration).generation
            self._incomplete.pop(iteration, None)
            self._aborted[iteration, generation] = cause
            if iteration != SETUP:
                instructions.append(Aborted(iteration=iteration, generation=generation, cause=cause))
        return instructions

    def begin_generation(self, generation: int) -> None:
        """Begin a generation at the first uncommitted iteration, with new numbers."""
        self.next_iteration = max(0, self.commits.first_uncommitted)
        self.sequencer = self.sequencer.starting_at(generation, self.next_iteration)
        self.occupancy = Occupancy(self._timeouts.entry_s)
        self.parts = PartsInWriting(self._pace)
        self._withheld.clear()
        self.decisions.forget(0, self.next_iteration)
        if self.cadence is not None:
            self.cadence.stop_writing()
