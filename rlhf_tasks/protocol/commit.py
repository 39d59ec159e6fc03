"""Which step may be committed when: the pure part of the commit, and the interface of the part that writes.

Step N is the state after N iterations. Iterations become *complete* in any order: every node is done, and every part
of their snapshot is durable. Commits are written in order, one at a time.

With `snapshot_every: auto` the `Cadence` decides when a commit is worth what it costs. An iteration is decided on
once, when it is delivered, and each rank's requests say what was decided. No result of the training depends on it.
Nothing is kept for a later attempt: each begins at a commit and measures anew.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Protocol

from prefect_rlhf.rlhf_tasks.protocol.messages import SETUP, WriteCommit
from prefect_rlhf.rlhf_tasks.spec import NodeResult
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount
from prefect_rlhf.rlhf_tasks.system.invariants import require


@dataclass(frozen=True, slots=True)
class SnapshotSchedule:
    """Which iterations end in a snapshot by configuration.

    every             every so many iterations; 1 means each; auto: those that the ledger asks for
    total_iterations  iterations of the run, of which the last always ends in a snapshot
    evaluated_every   every so many iterations there is a snapshot in any case, for its evaluation may be the best;
                      None: no snapshot is kept for its evaluation
    """

    every: int | Literal["auto"]
    total_iterations: int
    evaluated_every: int | None = None

    def __post_init__(self) -> None:
        if self.every != "auto" and self.every < 1:
            raise ValueError(f"snapshot_every={self.every} is not a positive whole number.")

    def is_snapshot(self, iteration: int) -> bool:
        """True for each iteration that ends in a snapshot, and for SETUP (step 0)."""
        periods = [period for period in (self.every, self.evaluated_every) if isinstance(period, int)]
        due = any((iteration + 1) % period == 0 for period in periods)
        return due or iteration in (SETUP, self.total_iterations - 1)


class Snapshots(Protocol):
    """The commits in a run folder. All methods may block, so they are called outside the event loop.

    moved  bytes written and removed so far
    """

    moved: ByteCount

    def latest(self) -> tuple[int, int] | None:
        """(step, cursor) of the newest commit that passes verification; None when there is none."""
        ...

    def decided(self) -> Iterable[Mapping[str, Any]]:
        """The lines of the journal that have decisions, up to the commit that `latest` has given."""
        ...

    def commit(
        self, order: WriteCommit, results: Mapping[int, Mapping[str, Mapping[int, NodeResult]]]
    ) -> None:
        """Write the manifest of a step, rename its folder, and append the metrics of `order.iterations`.

        results  iteration -> node -> rank -> result, for the iterations that this commit makes final
        """
        ...

    def prune(self) -> None:
        """Remove the commits that are no longer kept. Failures are logged: the commit before it stands."""
        ...


class CommitOrder:
    """Turns iterations completed in any order into commits in order.

    committed  the last written step; None before step 0 is written
    """

    def __init__(self, schedule: SnapshotSchedule, committed: int | None) -> None:
        self.schedule = schedule
        self.committed = committed
        self.writing: int | None = None
        self._complete: set[int] = set()
        self._wanted: set[int] = set()
        self._first_incomplete = self.first_uncommitted
        # iterations with a snapshot that a commit can cover, not written yet
        self._ready: deque[int] = deque()

    def want_snapshot(self, iteration: int) -> None:
        """An iteration whose saves are not delivered yet must end in a snapshot, whatever the schedule says."""
        self._wanted.add(iteration)

    def is_snapshot(self, iteration: int) -> bool:
        """True for each iteration that ends in a snapshot, and for SETUP (step 0)."""
        return iteration in self._wanted or self.schedule.is_snapshot(iteration)

    @property
    def first_uncommitted(self) -> int:
        """The first iteration that is not committed; SETUP before step 0 is."""
        return SETUP if self.committed is None else self.committed

    @property
    def first_incomplete(self) -> int:
        """The first iteration that is not complete."""
        return self._first_incomplete

    def complete(self, iteration: int) -> None:
        """Every node of the iteration is done and every part of its snapshot, if it has one, is durable."""
        require(iteration >= self.first_uncommitted, f"iteration {iteration} is committed already")
        self._complete.add(iteration)
        while self._first_incomplete in self._complete:
            if self.is_snapshot(self._first_incomplete):
                self._ready.append(self._first_incomplete)
            self._first_incomplete += 1

    def start_next(self) -> int | None:
        """The step to commit now; None while a commit is being written or none is ready."""
        if self.writing is not None or not self._ready:
            return None
        self.writing = self._ready[0] + 1
        return self.writing

    def covered(self, step: int) -> range:
        """The iterations that a commit makes final."""
        return range(self.first_uncommitted, step)

    def written(self, step: int) -> range:
        """The commit is written. Returns the iterations that it makes final."""
        require(step == self.writing, f"step {step} was written, and {self.writing} was asked for")
        covered = self.covered(step)
        self.committed, self.writing = step, None
        self._ready.popleft()
        self._complete.difference_update(covered)
        self._wanted.difference_update(covered)
        return covered

    def failed(self) -> None:
        """The commit could not be written: the iterations it covers, and all after them, must be run again."""
        self.writing = None
        self._ready.clear()
        self._complete.clear()
        self._first_incomplete = self.first_uncommitted

    def lost(self, live: Iterable[int]) -> list[int]:
        """After a fault: drops the iterations that no commit can cover any more, and returns those among `live`."""
        reach = self._ready[-1] + 1 if self._ready else self.first_uncommitted
        self._complete = {iteration for iteration in self._complete if iteration < reach}
        self._first_incomplete = reach
        return sorted(iteration for iteration in live if iteration >= reach)

    @property
    def pending(self) -> bool:
        """True while a commit is being written or is ready to be written."""
        return self.writing is not None or bool(self._ready)


WRITING_SHARE = 0.05
"""Commits are as frequent as writing them stays below this share of the time."""
RECENT = 8
"""Iterations over which the length of one is measured."""
MOST_UNWRITTEN = 2
"""Snapshots that may be in the making at once: their parts are in host memory."""


class Cadence:
    """The measured lengths of iterations and commits of one attempt, and what follows from them.

    max_s  most seconds of work that may be lost. A decision is made up to two iterations before the iteration ends,
           so the bound holds where an iteration and a commit are short against it.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._lengths: deque[float] = deque(maxlen=RECENT)
        self._costs: deque[float] = deque(maxlen=2)
        self._base = -1  # the newest iteration that ends in a snapshot
        self._base_s: float | None = None  # when it had ended
        self._newest, self._newest_s = -1, 0.0  # the newest iteration that has ended, and when
        self._unwritten: set[int] = set()  # iterations whose snapshots are not committed
        self._writing: set[Hashable] = set()
        self._writing_since_s = 0.0
        self._written_s = 0.0  # with anything to write, since the last commit
        self._interrupted = False  # since the last commit: its time is not known

    # --- what is measured -------------------------------------------------------------------------------

    def begin(self, iteration: int, now: float) -> None:
        """A generation delivers its first iteration; all before it are committed."""
        self._base = self._newest = iteration - 1
        self._base_s = self._newest_s = now
        self._unwritten.clear()

    def delivered(self, iteration: int, in_snapshot: bool) -> None:
        """An iteration is delivered, and it was decided whether it ends in a snapshot."""
        if in_snapshot:
            self._base, self._base_s = iteration, None
            self._unwritten.add(iteration)

    def iteration_ended(self, iteration: int, now: float) -> None:
        """Every node of an iteration has ended on every rank."""
        self._lengths.append(now - self._newest_s)
        self._newest, self._newest_s = iteration, now
        if iteration == self._base:
            self._base_s = now

    def writing(self, what: Hashable, now: float) -> None:
        """Something of a commit begins to be written: a rank's part, or the manifest. Repeats change nothing."""
        if not self._writing:
            self._writing_since_s = now
        self._writing.add(what)

    def wrote(self, what: Hashable, now: float) -> None:
        """It is written, or never will be. Time counts while at least one thing is being written."""
        if self._writing == {what}:
            self._written_s += now - self._writing_since_s
        self._writing.discard(what)

    def stop_writing(self) -> None:
        """A generation has ended: its parts will not be written, and say nothing of a commit's cost."""
        self._interrupted = self._interrupted or bool(self._writing) or self._written_s > 0
        self._writing.clear()
        self._written_s = 0.0

    def committed(self, iteration: int) -> None:
        """The commit of the state after an iteration is written; -1 is that of step 0."""
        if not self._interrupted:
            self._costs.append(self._written_s)
        self._written_s, self._interrupted = 0.0, False
        self._unwritten.discard(iteration)

    # --- what follows -----------------------------------------------------------------------------------

    @property
    def commit_s(self) -> float | None:
        """Seconds that a commit takes to write: the longer one of the last two. None before the first."""
        return max(self._costs, default=None)

    @property
    def iteration_s(self) -> float | None:
        """Seconds of an iteration, as the median of the recent ones. None before the first."""
        return median(self._lengths) if self._lengths else None

    def wants(self, iteration: int) -> bool:
        """Whether an iteration that is about to be delivered should end in a snapshot.

        While nothing is measured, one does. Later one begins beside another that is not written only if it is cheap:
        what is at risk is no sooner safe for two that share the disk.
        """
        iteration_s, commit_s = self.iteration_s, self.commit_s
        if iteration_s is None or commit_s is None:
            return not self._unwritten
        since_s = self._since_base_s(iteration, iteration_s)
        worth_it = commit_s <= WRITING_SHARE * since_s and len(self._unwritten) < MOST_UNWRITTEN
        at_risk = since_s + iteration_s + commit_s > self._max_s  # with a commit one iteration later
        return worth_it or (at_risk and not self._unwritten)

    def _since_base_s(self, iteration: int, iteration_s: float) -> float:
        """Seconds expected from the end of the last iteration with a snapshot to the end of this one."""
        if self._base_s is None:
            return (iteration - self._base) * iteration_s
        return self._newest_s - self._base_s + (iteration - self._newest) * iteration_s
