"""Which step may be committed when: the pure part of the commit, and the interface of the part that writes.

Step N is the state after N iterations. Iterations become *complete* in any order: every node is done, and every part
of their snapshot is durable. Commits are written in order, one at a time.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from rlhf_tasks.protocol.instructions import SETUP, WriteCommit
from rlhf_tasks.spec import NodeResult
from rlhf_tasks.system.durable import ByteCount
from rlhf_tasks.system.invariants import require


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
        self._ready: deque[int] = (
            deque()
        )  # iterations with a snapshot that a commit can cover, not written yet

    def want_snapshot(self, iteration: int) -> None:
        """An iteration that is not delivered yet must end in a snapshot, whatever the schedule says."""
        self._wanted.add(iteration)

    def is_snapshot(self, iteration: int) -> bool:
        """True for each iteration that ends in a snapshot, and for SETUP (step 0)."""
        return iteration in self._wanted or self.schedule.is_snapshot(iteration)

    def next_snapshot(self, iteration: int) -> int:
        """The first iteration at or after this one that ends in a snapshot, as far as it is decided."""
        while not self.is_snapshot(iteration):
            iteration += 1
        return iteration

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
