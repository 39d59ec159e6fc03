"""The ledger: what one attempt has done, and what it must do next. One per controller.

Pure: stimuli in, instructions out. It delivers iterations, counts answers, orders commits, and rebuilds all ranks
after a fault. docs/explanation/protocol.md says what holds.

    start ──► RESETTING ──all ranks clean──► RESTORING ──all loaded──► RUNNING ──last step committed──► Finished
                 ▲   each rank: ResetRank      each: RestoreRank          │
                 │                                                        │  enter(t): Send to each rank its requests
                 │                                                        │  rank_done, of all: the iteration has run
                 │                                                        │  part_durable, of all: WriteCommit
                 │                                                        │  commit_done: Committed; enter(t + 1), ...
                 │                                                        ▼
                 └── a new generation ◄── SUSPECTING ◄── error, loss, refusal, silence past a deadline
                                              │
                                              └── too often, it would repeat, ──► ENDING ──► GaveUp
                                                  or ranks are missing

`_advance` does all that has become possible after a stimulus.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from prefect_rlhf.rlhf_tasks.config.cluster import Limits
from prefect_rlhf.rlhf_tasks.protocol.account import Account, State
from prefect_rlhf.rlhf_tasks.protocol.commit import Cadence, SnapshotSchedule
from prefect_rlhf.rlhf_tasks.protocol.decisions import DecisionError, Decisions
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    SETUP,
    Cause,
    Faulted,
    Finished,
    GaveUp,
    Held,
    LedgerInstruction,
    NotEntered,
    Ready,
)
from prefect_rlhf.rlhf_tasks.protocol.progress import Pace, Rebuild, Timeouts
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Deadlines, Sequencer
from prefect_rlhf.rlhf_tasks.spec import IN_FLIGHT, ExecutionPlan, NodeFailure, NodeKey, NodeResult

ALONE = 1
"""IN_FLIGHT from a fault to the next commit. Otherwise an error that t + 1 repeats could abort t every time."""


class Phase(Enum):
    """What a ledger is doing. The value explains it in messages."""

    NEW = "not started"
    RESETTING = "all ranks drop older generations; lost and stuck ones get new processes"
    RESTORING = "all ranks join the groups and load the last commit"
    RUNNING = "iterations may be entered"
    SUSPECTING = "an error was reported; the loss of a rank that explains it may be reported within a moment"
    ENDING = (
        "a retry would fail again, or ranks are missing: what is complete is committed, then the attempt ends"
    )
    STOPPED = "finished or given up"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.NEW: frozenset({Phase.RESETTING, Phase.STOPPED}),
    Phase.RESETTING: frozenset({Phase.RESETTING, Phase.RESTORING, Phase.ENDING, Phase.STOPPED}),
    Phase.RESTORING: frozenset(
        {Phase.RUNNING, Phase.SUSPECTING, Phase.RESETTING, Phase.ENDING, Phase.STOPPED}
    ),
    Phase.RUNNING: frozenset({Phase.SUSPECTING, Phase.RESETTING, Phase.ENDING, Phase.STOPPED}),
    Phase.SUSPECTING: frozenset({Phase.RESETTING, Phase.ENDING, Phase.STOPPED}),
    Phase.ENDING: frozenset({Phase.STOPPED}),
    Phase.STOPPED: frozenset(),
}


class Ledger:
    """One attempt.

    plan                of every iteration of the attempt
    run, attempt        as in every key
    n_ranks             ranks 0 .. n_ranks - 1 are reset and restored; the plan's devices are among them
    total_iterations    of the whole run, including those before this attempt
    committed_step      the commit to start from; None: initialise the roles and commit step 0 first
    cursor              global id of the first sample of the iteration after that commit
    limits              deadlines of nodes, waits for the disk, rebuilds, commits
    predicted_s         node name -> seconds that the planner predicts
    users_s             node name -> seconds that the user's own code may take in it besides
    rebuilds            rebuilds and earlier attempts since the last commit, which count among them
    past                journal lines of the decisions up to that commit (`Snapshots.decided`)

    account             the iterations, for watchers
    fault               the cause of the last fault
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        *,
        run: str,
        attempt: int,
        n_ranks: int,
        total_iterations: int,
        limits: Limits,
        predicted_s: Mapping[str, float] | None = None,
        users_s: Mapping[str, float] | None = None,
        committed_step: int | None = None,
        cursor: int = 0,
        rebuilds: int = 0,
        timeouts: Timeouts | None = None,
        past: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """Raises DecisionError and ConfigError as `Decisions` does."""
        self.n_ranks = n_ranks
        if n_ranks < plan.n_devices:
            raise ValueError(f"the plan needs {plan.n_devices} devices; there are {n_ranks} ranks.")
        self.last_iteration = self._last_asked = total_iterations - 1  # decisions may lower the first
        self.max_rebuilds = limits.max_restarts  # without a commit in between; one more ends the attempt
        self.awaits_lost = limits.awaits_lost
        self.timeouts = timeouts or Timeouts.of(limits.patience)
        self.pace = pace = Pace(limits.io_floor_s, limits.io_least_bytes_per_s)
        deadlines = Deadlines(
            limits.deadline_factor, limits.deadline_floor_s, predicted_s or {}, users_s or {}
        )
        self.phase = Phase.NEW
        self.fault: Cause | None = None
        self.account = Account(
            Sequencer(
                plan,
                run,
                attempt,
                deadlines,
                first_iteration=committed_step or 0,
                first_sample=cursor,
            ).whole_groups(),
            SnapshotSchedule(limits.snapshot_every, total_iterations, limits.evaluated_every),
            committed_step,
            self.timeouts,
            pace,
            Cadence(limits.snapshot_max_s) if limits.snapshot_every == "auto" else None,
            Decisions(plan, past, committed_step or 0),
        )
        if committed_step and self.account.decisions.stops(committed_step - 1):
            self.last_iteration = committed_step - 1
        self._paused = False
        self._held: int | None = None  # the step that Held told
        self._rebuild = Rebuild(0, n_ranks, (), 0.0, self.timeouts, pace)
        self._rebuilds = rebuilds
        self._suspect: Cause | None = None
        self._suspect_until = 0.0

    @property
    def generation(self) -> int:
        """The current generation."""
        return self.account.sequencer.generation

    @property
    def committed_step(self) -> int | None:
        """The last written commit: the number of committed iterations; None before step 0."""
        return self.account.commits.committed

    @property
    def enterable(self) -> int | None:
        """The iteration that may be entered now; None where there is none."""
        iteration = self.account.next_iteration
        return iteration if self._entry_refusal(iteration, self.generation) is None else None

    # --- stimuli from the flow --------------------------------------------------------------------------

    def start(self, now: float) -> list[LedgerInstruction]:
        """Begin the attempt: build generation 0; Ready follows."""
        if self._is_finished:
            return self._finish()
        return self._start_rebuild(0, (), now)

    def enter(self, iteration: int, generation: int, now: float) -> list[LedgerInstruction]:
        """Deliver an iteration. Idempotent. Refused, with the reason, when the iteration may not be entered now."""
        state = self.account.iteration_state(iteration, generation)
        if state in (State.RUNNING, State.DONE, State.COMMITTED):
            return []
        reason = self._entry_refusal(iteration, generation)
        if reason is not None:
            return [NotEntered(iteration=iteration, generation=generation, reason=reason)]
        if self._next_in_snapshot:
            self.account.commits.want_snapshot(iteration)
        return self.account.deliver(iteration, now)

    def stop_after(self, iteration: int, now: float) -> list[LedgerInstruction]:
        """Make an iteration the run's last one; it ends in a snapshot. This ends a pause.

        If later iterations are already in flight or committed, the newest of them is the last, or, where that ends in
        no snapshot, the one after it.
        """
        account, commits = self.account, self.account.commits
        last = max(iteration, account.newest_live, 0)
        if commits.first_uncommitted <= last == account.newest_live and not commits.is_snapshot(last):
            last += 1
        if last < self.last_iteration:
            self.last_iteration = self._last_asked = last
            commits.want_snapshot(last)
        return self.resume(now)

    def pause(self, now: float) -> list[LedgerInstruction]:
        """Stop delivering as soon as a commit can cover all delivered iterations. Held follows that commit.

        If the newest delivered iteration does not end in a snapshot, one more is entered, which does.
        """
        self._paused = True
        return self._advance(now)

    def resume(self, now: float) -> list[LedgerInstruction]:
        """End a pause."""
        self._paused, self._held = False, None
        return self._advance(now)

    # --- stimuli from the ranks: news of other generations is ignored -----------------------------------

    def rank_entered(self, rank: int, key: NodeKey, now: float) -> list[LedgerInstruction]:
        """A rank has entered a node. The node's deadline starts when its last rank has."""
        if self._is_current(key):
            self.account.entered(rank, key, now)
        return []

    def rank_done(self, result: NodeResult, now: float) -> list[LedgerInstruction]:
        """A rank has answered."""
        if not self._is_current(result.key):
            return []
        try:
            instructions = self.account.done(result, now)
        except DecisionError as fault:
            where = _cause(result.rank, result.key, str(fault))
            return self._end_by(replace(where, ranks=(), lasting=True), now)
        if (
            not instructions
        ):  # the hot path of 1,024 ranks: until a node has ended, nothing else has become possible
            return []
        iteration = result.key.iteration
        if self.account.decisions.stops(iteration):
            self.last_iteration = min(self.last_iteration, iteration)
        return instructions + self._advance(now)

    def part_durable(self, rank: int, key: NodeKey, parts: Any, now: float) -> list[LedgerInstruction]:
        """A rank's part of a snapshot is on the disk.

        key    the save node's; iteration SETUP for the parts of step 0
        parts  details of the files for the manifest, JSON-able
        """
        if not self._is_current(key):
            return []
        self.account.durable(rank, key, parts, now)
        return self._advance(now)

    def rank_failed(self, failure: NodeFailure, now: float) -> list[LedgerInstruction]:
        """An error on a rank: in a node, a background save (with the save node's key), a reset or a restore."""
        if not self._is_current(failure.key):
            return []
        if self.phase is Phase.RESETTING:
            return self._rebuild.stuck(failure.rank)
        cause = _cause(failure.rank, failure.key, failure.error, failure.traceback)
        if failure.lasting:
            return self._end_by(replace(cause, lasting=True), now)
        return self._suspect_error(cause, now)

    def rank_refused(self, rank: int, key: NodeKey, reason: str, now: float) -> list[LedgerInstruction]:
        """A rank refuses a request, or a request did not reach it. A refused reset ends the attempt."""
        if not self._is_current(key):
            return []
        cause = _cause(rank, key, reason)
        return self._give_up(str(cause)) if self.phase is Phase.RESETTING else self._suspect_error(cause, now)

    def rank_reset(self, rank: int, generation: int, now: float) -> list[LedgerInstruction]:
        """A rank is clean for a generation."""
        if self.phase is not Phase.RESETTING or generation != self.generation:
            return []
        self._rebuild.reset(rank)
        return self._advance(now)

    def rank_restored(self, rank: int, generation: int, now: float) -> list[LedgerInstruction]:
        """A rank has joined the groups and loaded the step."""
        if self.phase is not Phase.RESTORING or generation != self.generation:
            return []
        if self._rebuild.restored(rank, now) and self.committed_step is None:
            self.account.initialised(rank, now)
        return self._advance(now)

    def rank_moved(self, rank: int, generation: int, total_bytes: int, now: float) -> list[LedgerInstruction]:
        """A rank's process has read, written and checked so many bytes since it began."""
        if generation == self.generation:
            self._rebuild.moved(rank, total_bytes, now)
            self.account.parts.moved(rank, total_bytes, now)
        return []

    def rank_lost(self, rank: int, reason: str, now: float) -> list[LedgerInstruction]:
        """A rank's process is gone."""
        if self.phase is Phase.NEW or self._is_over:
            return []
        if self.phase is Phase.RESETTING:
            return self._rebuild.lost(rank)
        return self._declare(self._explain_loss(rank, f"lost: {reason}"), now, lost=(rank,))

    def rank_started(self, rank: int, now: float) -> list[LedgerInstruction]:
        """A rank has a new process. Call it exactly once for each process except the first."""
        if self.phase is Phase.NEW or self._is_over:
            return []
        if self.phase is Phase.RESETTING:
            return self._rebuild.started(rank, now)
        return self._declare(self._explain_loss(rank, "lost: its process was replaced"), now)

    # --- stimuli from the disk and the clock ------------------------------------------------------------

    def commit_done(self, step: int, now: float) -> list[LedgerInstruction]:
        """A commit is written."""
        if self.phase is Phase.STOPPED or step != self.account.commits.writing:
            return []
        self._rebuilds = 0
        return self.account.committed(step, now) + self._advance(now)

    def commit_failed(self, step: int, error: str, lasting: bool, now: float) -> list[LedgerInstruction]:
        """A commit could not be written. Its iterations are run again, unless that would fail again (`lasting`)."""
        if self.phase is Phase.STOPPED or step != self.account.commits.writing:
            return []
        self.account.commit_failed(now)
        cause = Cause(f"step {step} could not be committed: {error}", lasting=lasting)
        if self._is_over:
            return self._give_up(f"{self.fault}; {cause}")
        return self._end_by(cause, now) if lasting else self._declare(cause, now)

    def disk_moved(self, total_bytes: int, now: float) -> list[LedgerInstruction]:
        """The controller has written and removed so many bytes of commits since it began."""
        self.account.disk_moved(total_bytes, now)
        return []

    def tick(self, now: float) -> list[LedgerInstruction]:
        """Time has passed: a wait that is past its deadline ends here. Call it several times a second."""
        if self.phase in (Phase.NEW, Phase.STOPPED):
            return []
        late = self.account.commit_overdue(now)
        if late is not None:
            return self._give_up(late)
        if self._is_over:
            return []
        if self._suspect is not None and now > self._suspect_until:
            return self._declare(self._suspect, now)
        cause = self._overdue(now)
        if cause is not None and cause.missing and not self.awaits_lost:
            return self._end_by(replace(cause, lasting=True), now)
        if cause is not None:
            return self._declare(cause, now)
        return self._rebuild.tick(now) if self.phase is Phase.RESETTING else []

    # --- inside -----------------------------------------------------------------------------------------

    def _move(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"ledger: {self.phase.name} -> {phase.name}"
        self.phase = phase

    def _is_current(self, key: NodeKey) -> bool:
        """True for news of the current run, attempt and generation, until the attempt is over."""
        mine = self.account.sequencer
        names = (mine.run, mine.attempt, mine.generation)
        return not self._is_over and (key.run, key.attempt, key.generation) == names

    @property
    def _is_over(self) -> bool:
        """Nothing runs any more. A commit may still be in progress."""
        return self.phase in (Phase.ENDING, Phase.STOPPED)

    @property
    def _is_finished(self) -> bool:
        return self.committed_step is not None and self.committed_step > self.last_iteration

    @property
    def _next_in_snapshot(self) -> bool:
        """Whether the next iteration ends in a snapshot whatever the schedule says: in a pause; and where commits are
        chosen by their cost, after a fault, so that what is done again is kept at once."""
        return self._paused or (self._rebuilds > 0 and self.account.cadence is not None)

    def _entry_refusal(self, iteration: int, generation: int) -> str | None:
        """Why an iteration may not be entered now; None when it may."""
        if self._is_over:
            return "the attempt has ended."
        if generation != self.generation:
            return f"generation {generation} has ended ({self.fault}); this is generation {self.generation}."
        if self.phase is not Phase.RUNNING:
            return f"the ranks are not ready: {self.phase.value}."
        if iteration != self.account.next_iteration:
            return f"iterations follow each other: the next one is {self.account.next_iteration + 1}."
        if iteration > self.last_iteration:
            return f"iteration {self.last_iteration + 1} is the last one."
        if (
            iteration > self.account.sequencer.first_iteration
            and self.account.decisions.stops(iteration - 1) is None
        ):
            return f"iteration {iteration} decides whether it is the last one."
        if self._paused and self.account.ends_in_commit:
            return "the run is paused."
        return self.account.crowded(iteration, ALONE if self._rebuilds else IN_FLIGHT, self._next_in_snapshot)

    def _advance(self, now: float) -> list[LedgerInstruction]:
        """Do everything that has become possible: commit, finish, restore, run."""
        if self.phase in (Phase.NEW, Phase.STOPPED):
            return []
        instructions: list[LedgerInstruction] = []
        commit = self.account.next_commit(now, initialised=self._rebuild.all_restored)
        if commit is not None:
            instructions.append(commit)
        if self._is_finished:
            instructions += self._finish()
        elif self.phase is Phase.ENDING:
            if not self.account.commits.pending:
                assert self.fault is not None
                instructions += self._give_up(str(self.fault), self.fault.traceback)
        elif (
            self.phase is Phase.RESETTING and self._rebuild.all_clean and self.account.commits.writing is None
        ):
            instructions += self._restore(now)
        elif self.phase is Phase.RESTORING and self._rebuild.all_restored and self.committed_step is not None:
            self._move(Phase.RUNNING)
            instructions.append(Ready(self.generation, self.account.next_iteration))
        return instructions + self._hold()

    def _hold(self) -> list[LedgerInstruction]:
        """Held, once for each pause, when the ranks are idle at a commit."""
        step = self.committed_step
        reached = self.phase is Phase.RUNNING and self._paused and step == self.account.next_iteration
        if not reached or step is None or step == self._held:
            return []
        self._held = step
        return [Held(step=step)]

    def _restore(self, now: float) -> list[LedgerInstruction]:
        """Every rank is clean and nothing is being committed: join the groups, load the last commit."""
        self._move(Phase.RESTORING)
        self.account.begin_generation(self.generation)
        if self.committed_step is None:
            self.account.expect_setup_parts()
        return self._rebuild.restore(self.committed_step, now)

    def _finish(self) -> list[LedgerInstruction]:
        assert self.committed_step is not None
        self._move(Phase.STOPPED)
        return [Finished(step=self.committed_step)]

    def _give_up(self, reason: str, traceback: str = "") -> list[LedgerInstruction]:
        self._move(Phase.STOPPED)
        missing = self.fault.ranks if self.fault is not None and self.fault.missing else ()
        step = self.committed_step
        return [GaveUp(reason=reason, committed_step=step, traceback=traceback, missing=missing)]

    def _overdue(self, now: float) -> Cause | None:
        """The first wait, other than that for a commit, that is past its deadline."""
        if self.phase in (Phase.RESETTING, Phase.RESTORING):
            return self._rebuild.overdue(now) or self.account.overdue(now)
        return self.account.overdue(now) or self.account.occupancy.overdue(now)

    def _suspect_error(self, cause: Cause, now: float) -> list[LedgerInstruction]:
        """An error may be caused by the loss of a peer: wait a moment for that news. Only the first error counts."""
        if self.phase is Phase.SUSPECTING:
            return []
        self._move(Phase.SUSPECTING)
        self._suspect, self._suspect_until = cause, now + self.timeouts.blame_s
        return []

    def _explain_loss(self, rank: int, error: str) -> Cause:
        """The cause to report for a lost rank: the error that it reported itself, else `error` and where it was."""
        if self._suspect is not None and self._suspect.ranks == (rank,):
            return self._suspect
        iteration, node = self.account.occupancy.position(rank)
        return Cause(error, (rank,), node, iteration)

    def _end_by(self, cause: Cause, now: float) -> list[LedgerInstruction]:
        """End the attempt, for a retry would fail again or ranks are missing: commit what can be, abort the rest."""
        instructions = self._abort(cause)
        self._move(Phase.ENDING)
        return instructions + self._advance(now)

    def _abort(self, cause: Cause) -> list[LedgerInstruction]:
        """End the generation: abort every iteration that cannot be committed."""
        self.fault, self._suspect = cause, None
        return [Faulted(generation=self.generation, cause=cause), *self.account.abort(cause)]

    def _declare(self, cause: Cause, now: float, lost: Collection[int] = ()) -> list[LedgerInstruction]:
        """A fault of the ranks or the disk: end the generation and build a new one."""
        instructions = self._abort(cause)
        self._rebuilds += 1
        if self._rebuilds > self.max_rebuilds and not self.account.commits.pending:
            without = f"{self.max_rebuilds} rebuilds without a commit in between"
            return instructions + self._give_up(f"{cause} (after {without})")
        return instructions + self._start_rebuild(self.generation + 1, self._rebuild.down.union(lost), now)

    def _start_rebuild(self, generation: int, down: Collection[int], now: float) -> list[LedgerInstruction]:
        """Reset every rank to a generation."""
        self._move(Phase.RESETTING)
        self.account.begin_generation(generation)
        if self.account.decisions.stops(self.last_iteration) is None:  # who has decided it, is run again
            self.last_iteration = self._last_asked
        self._rebuild = Rebuild(generation, self.n_ranks, down, now, self.timeouts, self.pace)
        return self._rebuild.begin()


def _cause(rank: int, key: NodeKey, error: str, traceback: str = "") -> Cause:
    iteration = None if key.iteration == SETUP else key.iteration
    return Cause(error, (rank,), key.node, iteration, traceback)
