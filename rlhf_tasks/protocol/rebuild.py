"""Brings all ranks to a new generation: reset each, restart those that do not answer, then restore all."""

from collections import Counter
from collections.abc import Collection
from enum import Enum

from rlhf_tasks.protocol.instructions import LedgerInstruction, ResetRank, RestartRank, RestoreRank
from rlhf_tasks.protocol.messages import Cause
from rlhf_tasks.protocol.progress import Headway, Pace, Timeouts
from rlhf_tasks.system.invariants import require


class RankState(Enum):
    """The state of a rank in a rebuild."""

    DOWN = "its process is gone or being replaced"
    RESETTING = "asked to reset"
    CLEAN = "has dropped everything of older generations"
    RESTORING = "asked to join the groups and load the commit"
    RESTORED = "holds the commit"


class Rebuild:
    """The rebuild of all ranks for one generation.

    Groups are joined only when every rank is clean, so no rank waits in a collective for a process that is not there.
    A rank that has not reset within `timeouts.reset_s` is stuck and is restarted. While ranks restore, they wait for
    each other, so the progress of all of them together is judged.
    """

    def __init__(
        self,
        generation: int,
        n_ranks: int,
        down: Collection[int],
        now: float,
        timeouts: Timeouts,
        pace: Pace,
    ) -> None:
        self.generation = generation
        self.timeouts = timeouts
        self.pace = pace
        self.states = {r: RankState.DOWN if r in down else RankState.RESETTING for r in range(n_ranks)}
        self._count = Counter(self.states.values())
        self._restarts_until = now + timeouts.reset_s + timeouts.restart_s
        self._reset_until = dict.fromkeys(self.states, now + timeouts.reset_s)
        self._restoring: Headway | None = None

    def begin(self) -> list[LedgerInstruction]:
        """Reset every rank that has a process; start the others."""
        return [
            RestartRank(rank, lost=True) if state is RankState.DOWN else ResetRank(rank, self.generation)
            for rank, state in self.states.items()
        ]

    @property
    def down(self) -> set[int]:
        """Ranks without a process."""
        return {rank for rank, state in self.states.items() if state is RankState.DOWN}

    @property
    def all_clean(self) -> bool:
        """True when every rank has reset: the groups can be joined."""
        return self._count[RankState.CLEAN] == len(self.states)

    @property
    def all_restored(self) -> bool:
        """True when every rank holds the commit."""
        return self._count[RankState.RESTORED] == len(self.states)

    def lost(self, rank: int) -> list[LedgerInstruction]:
        """A rank has lost its process while the ranks reset."""
        if self.states[rank] is RankState.DOWN:
            return []
        self._set(rank, RankState.DOWN)
        return [RestartRank(rank, lost=True)]

    def stuck(self, rank: int) -> list[LedgerInstruction]:
        """A rank cannot reset: replace its process."""
        self._set(rank, RankState.DOWN)
        return [RestartRank(rank, lost=False)]

    def started(self, rank: int, now: float) -> list[LedgerInstruction]:
        """A rank has a new process."""
        self._set(rank, RankState.RESETTING)
        self._reset_until[rank] = now + self.timeouts.reset_s
        return [ResetRank(rank, self.generation)]

    def reset(self, rank: int) -> None:
        """A rank is clean. Late news from a process that is being replaced is ignored."""
        if self.states[rank] is RankState.RESETTING:
            self._set(rank, RankState.CLEAN)

    def restore(self, step: int | None, now: float) -> list[LedgerInstruction]:
        """Every rank is clean: make all join the groups and load the step."""
        require(self.all_clean, f"restore before every rank is clean: {self.states}")
        for rank in self.states:
            self._set(rank, RankState.RESTORING)
        self._restoring = Headway(self.pace, now)
        return [RestoreRank(rank, self.generation, step) for rank in self.states]

    def moved(self, rank: int, total_bytes: int, now: float) -> None:
        """A rank has read so many bytes."""
        if self._restoring is not None:
            self._restoring.moved(rank, total_bytes, now)

    def restored(self, rank: int, now: float) -> bool:
        """A rank has loaded the step. Returns False for repeats."""
        if self._restoring is None or self.states[rank] is not RankState.RESTORING:
            return False
        self._set(rank, RankState.RESTORED)
        self._restoring.advance(now)
        return True

    def tick(self, now: float) -> list[LedgerInstruction]:
        """Restart the ranks that have not reset in time."""
        late = [r for r, s in self.states.items() if s is RankState.RESETTING and now > self._reset_until[r]]
        return [instruction for rank in late for instruction in self.stuck(rank)]

    def overdue(self, now: float) -> Cause | None:
        """The ranks that have not come back, or not restored, in time; None where there are none."""
        if self._restoring is None:
            late = tuple(r for r, s in self.states.items() if s is not RankState.CLEAN)
            if late and now > self._restarts_until:
                return Cause("did not come back after the reset", late)
            return None
        late = tuple(r for r, s in self.states.items() if s is not RankState.RESTORED)
        if late and self._restoring.overdue(now):
            return Cause(f"make no progress in restoring: all ranks have read {self.pace}", late)
        return None

    def _set(self, rank: int, state: RankState) -> None:
        self._count[self.states[rank]] -= 1
        self._count[state] += 1
        self.states[rank] = state
