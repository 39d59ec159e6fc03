"""What happened in a rehearsal: where its time went, and how near each wait came to its deadline."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from prefect_rlhf.rlhf_tasks.spec import IN_FLIGHT

RUNNING, WAITING = "running", "waiting for commits"
STARTING = "starting"
RETURNING = "taking devices back"
OWN = "a limit of the run itself"
"""The cause of a fault without any injected one: the run has ended a generation by itself."""


class RanIteration(NamedTuple):
    """When an iteration had run, and the seconds spent until then."""

    iteration: int
    seconds: dict[str, float]


class CommitMade(NamedTuple):
    """A commit: its step, when it was written, and the seconds since the last of its iterations had run."""

    step: int
    at_s: float
    lag_s: float


@dataclass(frozen=True)
class FaultSeen:
    """The end of a generation.

    cause     the kind of the injected fault, or OWN
    sentence  what the ledger says
    """

    at_s: float
    cause: str
    sentence: str


class Story:
    """Follows a rehearsal. Every second belongs to one state, so the seconds of all states add up to the time so far.

    seconds     state -> seconds: STARTING, RETURNING, RUNNING (some node runs), WAITING (none does, though the ranks
                are there), and `noticing`, `repeating` and `rebuilding` by cause
    committed   iterations that are committed
    leapt_s, leapt_iterations  of quiet times that were counted and not rehearsed. `now_s` of all methods leaves them
                out, and so does the number of an iteration
    struck      kind -> faults that have struck, those among them that found nothing to hit
    slow        kinds of the faults by which hosts or disks are slow at present, in the order in which they struck
    """

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.committed = 0
        self.leapt_s, self.leapt_iterations = 0.0, 0
        self.commits: list[CommitMade] = []
        self.faults: list[FaultSeen] = []
        self.struck: Counter[str] = Counter()
        self._state, self._since_s = STARTING, 0.0
        self._idle = True
        self.slow: list[str] = []
        # The kind of a fault that ends a generation, until all is well again.
        self._pending: str | None = None
        # The kind of a slow time that is over, and the last iteration that it delays.
        self._late: tuple[str, int] | None = None
        self._cause = ""
        self._ran: list[RanIteration] = [RanIteration(-1, {})]
        self._ran_s: dict[int, float] = {}

    def at(self, now_s: float) -> None:
        """Time has passed."""
        self.seconds[self._state] += now_s - self._since_s
        self._since_s = now_s

    def _become(self, state: str, now_s: float) -> None:
        self.at(now_s)
        self._state = state

    def idle(self, idle: bool, now_s: float) -> None:
        """From now on no node runs, or one does."""
        self._idle = idle
        if self._state in (RUNNING, WAITING):
            self._become(WAITING if idle else RUNNING, now_s)

    def ready(self, now_s: float, well: bool) -> None:
        """Iterations may be entered. well: every rank can continue; otherwise what has struck will show yet."""
        if self._state not in (RUNNING, WAITING) and not self._state.startswith("noticing"):
            self._late = None
            if well:
                self._pending = None
            going_on = WAITING if self._idle else RUNNING
            self._become(f"noticing: {self._pending}" if self._pending else going_on, now_s)
            self._mark(self._ran[-1].iteration)

    def renews(self, now_s: float) -> None:
        """The attempt has ended at a commit, for devices are back."""
        self._become(RETURNING, now_s)

    def hits(self, kind: str, now_s: float) -> None:
        """A fault hits something: it will end the generation."""
        if self._pending is None:
            self._pending = kind
            if self._state in (RUNNING, WAITING):
                self._become(f"noticing: {kind}", now_s)

    def slows(self, kind: str) -> None:
        """A host or its disk becomes slow. That may end generations, and need not."""
        self.slow.append(kind)

    def calms(self, kind: str) -> None:
        """A slow time is over. What has begun in it may still take too long."""
        self.slow.remove(kind)
        self._late = (kind, self._ran[-1].iteration + IN_FLIGHT)

    def iteration_ran(self, iteration: int, now_s: float) -> None:
        """All nodes of an iteration have ended."""
        self.at(now_s)
        self._ran_s[iteration] = now_s
        self._mark(iteration)
        if self._late is not None and iteration >= self._late[1]:
            self._late = None

    def faulted(self, sentence: str, now_s: float) -> None:
        """A generation has ended, by the fault that has struck, or else by what is or was slow, or else by itself."""
        slow = self.slow[-1] if self.slow else self._late[0] if self._late else None
        self._cause = self._pending or slow or OWN
        self.faults.append(FaultSeen(now_s + self.leapt_s, self._cause, sentence))
        self._become(f"rebuilding: {self._cause}", now_s)

    def aborted(self, iteration: int) -> None:
        """An iteration that ran, or did in part, will be repeated: its seconds are lost."""
        while len(self._ran) > 1 and self._ran[-1].iteration >= iteration:
            self._ran.pop()
        spent = self._ran[-1].seconds
        for state in (RUNNING, WAITING):
            lost_s = self.seconds[state] - spent.get(state, 0.0)
            self.seconds[f"repeating: {self._cause}"] += lost_s
            self.seconds[state] -= lost_s

    def has_committed(self, iteration: int) -> None:
        """An iteration is committed."""
        self.committed = iteration + 1 + self.leapt_iterations
        self._ran = [one for one in self._ran if one.iteration >= iteration] or self._ran[-1:]

    def commit_written(self, step: int, now_s: float) -> None:
        """A commit is written."""
        ran_s = self._ran_s.get(step - 1, now_s)
        self._ran_s = {i: s for i, s in self._ran_s.items() if i >= step}
        at_s = now_s + self.leapt_s
        self.commits.append(CommitMade(step + self.leapt_iterations, at_s, now_s - ran_s))

    def _mark(self, iteration: int) -> None:
        self._ran.append(
            RanIteration(iteration, {state: self.seconds[state] for state in (RUNNING, WAITING)})
        )

    # --- quiet times ------------------------------------------------------------------------------------

    def leap(self, window: "Window", times: int) -> None:
        """Count a window `times` times more, instead of rehearsing what would be like it."""
        self.at(self._since_s)
        for state, spent_s in window.spent.items():
            self.seconds[state] += times * spent_s
        self._ran = [
            RanIteration(
                one.iteration, {s: one.seconds[s] + times * window.spent.get(s, 0.0) for s in one.seconds}
            )
            for one in self._ran
        ]
        self.commits += [
            CommitMade(step + n * window.iterations, at_s + n * window.seconds, lag_s)
            for n in range(1, times + 1)
            for step, at_s, lag_s in window.commits
        ]
        self.leapt_s += times * window.seconds
        self.leapt_iterations += times * window.iterations
        self.committed += times * window.iterations


class Window(NamedTuple):
    """A quiet time from one commit to another.

    spent  state -> seconds
    """

    iterations: int
    seconds: float
    spent: dict[str, float]
    commits: tuple[CommitMade, ...]

    @property
    def mean_lag_s(self) -> float:
        return sum(commit.lag_s for commit in self.commits) / len(self.commits)

    def is_like(self, other: "Window") -> bool:
        """Whether two windows take as long an iteration, and their commits lag as much, within LIKE."""
        ours, theirs = self.seconds / self.iterations, other.seconds / other.iterations
        more_lag_s = abs(self.mean_lag_s - other.mean_lag_s)
        return abs(ours - theirs) <= LIKE * theirs and more_lag_s <= LIKE * max(theirs, other.mean_lag_s)


LIKE = 0.1
"""Relative difference up to which two windows count as alike."""


NEAR = 0.5
"""Share of its deadline from which a wait counts as near: within a factor of two of firing."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The longest of the waits of one kind, by its share of what it may take."""

    used_s: float
    limit_s: float
    near: int = 0

    @property
    def share(self) -> float:
        """How much of its time it has used; 1: its deadline fires."""
        return self.used_s / self.limit_s


class WaitLog:
    """Kinds of waits, each with its longest one and the number of those that came near their deadline."""

    def __init__(self) -> None:
        self.waits: dict[str, Wait] = {}

    def used(self, what: str, used_s: float, limit_s: float) -> None:
        """A wait has ended after `used_s` seconds; after `limit_s` it would have been a fault."""
        known = self.waits.get(what)
        near = (known.near if known else 0) + (used_s >= NEAR * limit_s)
        if known is None or used_s / limit_s > known.share:
            self.waits[what] = Wait(used_s, limit_s, near)
        elif near != known.near:
            self.waits[what] = Wait(known.used_s, known.limit_s, near)

    @property
    def near(self) -> dict[str, Wait]:
        """The kinds with a wait that came within a factor of two of its deadline, the nearest first."""
        near = {what: wait for what, wait in self.waits.items() if wait.near}
        return dict(sorted(near.items(), key=lambda item: -item[1].share))
