"""When a commit is worth what it costs: the decision of `snapshot_every: auto`. Pure: times are passed in.

An iteration is decided on once, when it is delivered, and each rank's requests say what was decided. No result of
the training depends on it. Nothing is kept for a later attempt: each begins at a commit and measures anew.
"""

from collections import deque
from collections.abc import Hashable
from statistics import median

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
