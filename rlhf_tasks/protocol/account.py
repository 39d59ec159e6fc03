"""The account: which iterations were delivered, what their ranks have answered, what is committed.

The book-keeping half of the ledger; it knows no phases and no faults. Watchers read it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_tasks.protocol.commit import CommitOrder, SnapshotSchedule
from rlhf_tasks.protocol.instructions import (
    SETUP,
    AbortIteration,
    Cause,
    IterationCommitted,
    IterationDone,
    LedgerInstruction,
    NodeDone,
    Send,
    WriteCommit,
)
from rlhf_tasks.protocol.phases import State, Timeouts
from rlhf_tasks.protocol.progress import IterationProgress, NodeProgress, NodeSummary, Occupancy
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan, plan_at
from rlhf_tasks.protocol.sequencer import Sequencer
from rlhf_tasks.spec import NodeKey, NodeResult

REMEMBERED = 8
"""Committed iterations whose summaries stay, for whoever asks late."""


class Account:
    """All iterations of one attempt.

    sequencer         writes the requests of the current generation
    plans             which plan each iteration goes by
    next_iteration    the one to be delivered next
    newest_delivered  under any generation
    """

    def __init__(
        self,
        sequencer: Sequencer,
        plans: Sequence[ScheduledPlan],
        schedule: SnapshotSchedule,
        committed: int | None,
        timeouts: Timeouts,
    ) -> None:
        self.sequencer = sequencer
        self.plans = tuple(plans)
        self.commits = CommitOrder(schedule, committed)
        self.occupancy = Occupancy(timeouts.entry_s)
        self.next_iteration = committed or 0
        self.newest_delivered = self.next_iteration - 1
        self._timeouts = timeouts
        self._iterations: dict[int, IterationProgress] = {}
        self._aborted: dict[tuple[int, int], Cause] = {}

    # --- for watchers -----------------------------------------------------------------------------------

    def iteration_state(self, iteration: int, generation: int) -> State:
        """Where an iteration stands that was, or is to be, entered under a generation."""
        progress = self._iterations.get(iteration)
        if progress is not None and progress.generation == generation:
            if progress.committed:
                return State.COMMITTED
            return State.DONE if progress.nodes_done else State.RUNNING
        if generation != self.sequencer.generation or (iteration, generation) in self._aborted:
            return State.ABORTED
        return State.COMMITTED if iteration < self.commits.first_uncommitted else State.WAITING

    def node_state(self, iteration: int, generation: int, node: str) -> State:
        """Where a node stands: WAITING until its last rank has entered, RUNNING, DONE, or ABORTED."""
        whole = self.iteration_state(iteration, generation)
        if whole in (State.ABORTED, State.WAITING):
            return whole
        progress = self._iterations.get(iteration)
        if progress is None or progress.nodes[node].done:
            return State.DONE
        return State.WAITING if progress.nodes[node].deadline is None else State.RUNNING

    def summary(self, iteration: int, node: str) -> NodeSummary | None:
        """What a node that is done has cost; None once that is forgotten."""
        progress = self._iterations.get(iteration)
        return None if progress is None else progress.nodes[node].summary

    def results(self, iteration: int) -> dict[str, dict[int, NodeResult]]:
        """Node -> rank -> result, as far as they are in. Forgotten at the commit after the iteration's own: the
        garbage collector would visit them all, again and again."""
        progress = self._iterations[iteration]
        return {name: dict(node.results) for name, node in progress.nodes.items()}

    def abort_cause(self, iteration: int, generation: int) -> Cause | None:
        """Why an iteration was aborted; None when it was not, or not delivered under that generation."""
        return self._aborted.get((iteration, generation))

    @property
    def newest_live(self) -> int:
        """The newest iteration that is in flight, complete or committed: no fault has taken it."""
        return max((*self._iterations, self.commits.first_uncommitted - 1))

    @property
    def ends_in_commit(self) -> bool:
        """Whether what this generation has delivered is committed, or will be without anything further."""
        newest = self.next_iteration - 1
        return newest < self.commits.first_uncommitted or self.commits.is_snapshot(newest)

    # --- delivery and news ------------------------------------------------------------------------------

    def changes_plan(self, iteration: int) -> bool:
        """Whether an iteration goes by another plan than this generation."""
        return plan_at(self.plans, iteration).plan is not self.sequencer.plan

    def crowded(self, iteration: int, limit: int) -> str | None:
        """Why an iteration would be one too many in flight; None when it would not.

        Counted from the first iteration that is not committed, or with fewer snapshots not complete.
        """
        each = self.commits.schedule.every == 1
        oldest = self.commits.first_uncommitted if each else self.commits.first_incomplete
        if iteration - oldest < limit:
            return None
        end = "is committed" if each else "is complete"
        flying = f"iterations {oldest + 1} to {iteration} are in flight"
        return f"{flying}; {iteration + 1} may enter when {oldest + 1} {end}."

    def deliver(self, iteration: int, now: float) -> list[LedgerInstruction]:
        """Open an iteration and send every rank its requests."""
        in_snapshot = self.commits.is_snapshot(iteration)
        requests = self.sequencer.requests(iteration, in_snapshot=in_snapshot)
        nodes = {
            name: NodeProgress(ranks, self.sequencer.deadlines.of(name))
            for name, ranks in self.sequencer.devices.items()
        }
        saves: Mapping[str, tuple[int, ...]] = self.sequencer.saves if in_snapshot else {}
        self._iterations[iteration] = IterationProgress(iteration, self.sequencer.generation, nodes, saves)
        for rank, mine in requests.items():
            self.occupancy.delivered(rank, mine, now)
        self.next_iteration = iteration + 1
        self.newest_delivered = max(self.newest_delivered, iteration)
        return [Send(rank, mine) for rank, mine in requests.items()]

    def expect_setup_parts(self, until: float) -> None:
        """The roles are being initialised: every save node's parts of step 0 are due."""
        setup = IterationProgress(SETUP, self.sequencer.generation, {}, self.sequencer.saves)
        for node, ranks in self.sequencer.saves.items():
            for rank in ranks:
                setup.expect_part(rank, node, until)
        self._iterations[SETUP] = setup

    def entered(self, rank: int, key: NodeKey, now: float) -> None:
        """A rank is inside a node."""
        progress = self._iterations.get(key.iteration)
        if progress is not None:
            progress.nodes[key.node].enter(rank, now)
            self.occupancy.entered(rank, key.iteration, key.node, now)

    def done(self, result: NodeResult, now: float) -> list[LedgerInstruction]:
        """A rank has answered. Repeats change nothing."""
        key, rank = result.key, result.rank
        progress = self._iterations.get(key.iteration)
        if progress is None:
            return []
        node_done = progress.done(rank, key.node, result, now)
        self.occupancy.left(rank, key.iteration, key.node, now)
        progress.expect_part(rank, key.node, now + self._timeouts.durable_s)
        if not node_done:
            return []
        done = NodeDone(key.iteration, key.node, dict(progress.nodes[key.node].results))
        return [done, IterationDone(key.iteration)] if progress.nodes_done else [done]

    def durable(self, rank: int, key: NodeKey, parts: Any) -> None:
        """A rank's part of a snapshot is on the disk."""
        progress = self._iterations.get(key.iteration)
        if progress is not None:
            progress.durable(rank, key.node, parts)

    def overdue(self, now: float) -> Cause | None:
        """The first node or part of this generation that outlived its deadline."""
        for progress in self._iterations.values():
            late = progress.overdue(now) if progress.generation == self.sequencer.generation else None
            if late is not None:
                return late
        return None

    # --- commits and generations ------------------------------------------------------------------------

    def next_commit(self, *, initialised: bool) -> WriteCommit | None:
        """The commit to write now, if any. initialised: every rank has a state, as step 0 needs."""
        for iteration, progress in self._iterations.items():
            if not progress.committed and progress.complete and (initialised or iteration != SETUP):
                self.commits.complete(iteration)
        step = self.commits.start_next()
        if step is None:
            return None
        return WriteCommit(
            step,
            tuple(i for i in self.commits.covered(step) if i != SETUP),
            {name: dict(parts) for name, parts in self._iterations[step - 1].parts.items()},
            self.sequencer.cursor(step),
            self.sequencer.versions(step),
            plan_at(self.plans, max(step - 1, 0)).plan,
        )

    def committed(self, step: int) -> list[LedgerInstruction]:
        """A commit is written. What is REMEMBERED iterations older than what it covers is forgotten, and of what was
        committed before every rank's results."""
        for progress in self._iterations.values():
            if progress.committed:
                progress.forget_results()
        covered = self.commits.written(step)
        for iteration in covered:
            self._iterations[iteration].committed = True
        oldest = covered.start - REMEMBERED
        self._iterations = {i: p for i, p in self._iterations.items() if i >= oldest and i != SETUP}
        self._aborted = {name: cause for name, cause in self._aborted.items() if name[0] >= oldest}
        return [IterationCommitted(i) for i in covered if i != SETUP]

    def abort(self, cause: Cause) -> list[LedgerInstruction]:
        """After a fault: give up every iteration that no commit can cover any more."""
        instructions: list[LedgerInstruction] = []
        for iteration in self.commits.lost(i for i, p in self._iterations.items() if not p.committed):
            generation = self._iterations.pop(iteration).generation
            self._aborted[iteration, generation] = cause
            if iteration != SETUP:
                instructions.append(AbortIteration(iteration, generation, cause))
        return instructions

    def begin_generation(self, generation: int) -> None:
        """Number and name the requests anew, from the first uncommitted iteration on, by that one's plan."""
        self.next_iteration = max(0, self.commits.first_uncommitted)
        planned = plan_at(self.plans, self.next_iteration)
        self.sequencer = self.sequencer.starting_at(generation, self.next_iteration, planned)
        self.occupancy = Occupancy(self._timeouts.entry_s)
