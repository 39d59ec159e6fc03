"""The progress of iterations in flight, of waits, and of rebuilds: who has answered, what is durable, what is late.

Pure: bytes and times are passed in. A wait for the disk has no limit in total, because a commit may have any size. It
is a fault when bytes stop moving.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from prefect_rlhf.rlhf_tasks.protocol.messages import (
    Cause,
    LedgerInstruction,
    ResetRank,
    RestartRank,
    RestoreRank,
)
from prefect_rlhf.rlhf_tasks.spec import NodeRequest, NodeResult
from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError, require

INTERRUPT_GRACE_S = 5.0
"""If a rank's aborted job still runs after this, its process exits."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The slowest progress that a wait may make.

    floor_s            seconds in which there must be progress
    least_bytes_per_s  progress is this rate times `floor_s`, or the end of a file or of a rank's work
    """

    floor_s: float
    least_bytes_per_s: float

    @property
    def least_bytes(self) -> float:
        """Bytes to move in `floor_s` seconds."""
        return self.floor_s * self.least_bytes_per_s

    def __str__(self) -> str:
        return (
            f"fewer than {self.least_bytes:.0f} bytes in {self.floor_s:g} s; if the disk was only slow, raise "
            "patience"
        )


class Headway:
    """One wait, for one or several sources of bytes (ranks, or the controller's disk).

    A window of `pace.floor_s` seconds begins with the wait, and anew with each progress. The wait is overdue when a
    window ends without progress.
    """

    def __init__(self, pace: Pace, now: float) -> None:
        self._pace = pace
        self._since = now
        self._begun_bytes = 0  # of the total, when the window began
        self._total_bytes = 0
        self._of_source: dict[int, int] = {}

    def moved(self, source: int, total_bytes: int, now: float) -> None:
        """A source has moved so many bytes since it began to count. Repeats and old news change nothing."""
        new_bytes = total_bytes - self._of_source.get(source, 0)
        if new_bytes > 0:
            self._of_source[source] = total_bytes
            self._total_bytes += new_bytes
        if self._total_bytes - self._begun_bytes >= self._pace.least_bytes:
            self.advance(now)

    def advance(self, now: float) -> None:
        """A file, or a source's work, is at its end: that is progress, however small it was."""
        self._since, self._begun_bytes = now, self._total_bytes

    def overdue(self, now: float) -> bool:
        """Whether the present window has ended without progress."""
        return now - self._since > self._pace.floor_s


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds after which a wait is a fault. Node deadlines come with the requests (`Deadlines`), waits for the disk
    are judged by their progress (`Pace`).

    blame_s    after an error, to wait for the loss of a rank that explains it
    entry_s    for a rank that has work but is inside no node to enter its next one
    reset_s    for a rank to reset; after that it is stuck, and is restarted
    restart_s  after the time to reset, for every rank to be up and clean
    """

    blame_s: float = 1.0
    entry_s: float = 60.0
    reset_s: float = 2 * INTERRUPT_GRACE_S  # a rank with a stuck job has exited by itself by then
    restart_s: float = 300.0

    @classmethod
    def of(cls, patience: float) -> Self:
        """The waits for ranks to work and to start, times `patience`. Below 1 it does not shorten them: imports take
        what they take. The others follow from what a rank does by itself.
        """
        usual, factor = cls(), max(1.0, patience)
        return cls(entry_s=usual.entry_s * factor, restart_s=usual.restart_s * factor)


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """The times, bytes and metrics of a node, over all its ranks.

    started_s, ended_s  time.time(): when the first rank entered, when the last one left
    bytes_sent          sum over ranks
    metrics             global values
    """

    ranks: tuple[int, ...]
    started_s: float
    ended_s: float
    bytes_sent: int
    metrics: Mapping[str, float]


class NodeProgress:
    """One node of one iteration.

    unfinished  the ranks that have not answered
    results     rank -> result, until they are dropped
    summary     of all results; None until the last one has arrived
    deadline    time, on the clock of `now`, after which the node is overdue; None until its last rank has entered
    """

    __slots__ = ("_outside", "deadline", "deadline_s", "results", "summary", "unfinished")

    def __init__(self, ranks: Iterable[int], deadline_s: float) -> None:
        self.unfinished = set(ranks)
        self._outside = set(self.unfinished)
        self.deadline_s = deadline_s
        self.results: dict[int, NodeResult] = {}
        self.summary: NodeSummary | None = None
        self.deadline: float | None = None

    @property
    def done(self) -> bool:
        """True when every rank has answered."""
        return not self.unfinished

    def enter(self, rank: int, now: float) -> None:
        """A rank has entered. The deadline starts when the last one has."""
        self._outside.discard(rank)
        if self.deadline is None and not self._outside:
            self.deadline = now + self.deadline_s

    def answer(self, rank: int, result: NodeResult, now: float) -> None:
        """A rank has answered, for the first time."""
        if rank not in self.unfinished:  # not `require`: this is the hot path of 1,024 ranks
            raise InvariantError(f"rank {rank} answered for {result.key}, which is not its work")
        self.enter(rank, now)
        self.unfinished.remove(rank)
        self.results[rank] = result
        if self.done:
            self.summary = _summary(self.results)


def _summary(results: Mapping[int, NodeResult]) -> NodeSummary:
    ranks = tuple(sorted(results))
    return NodeSummary(
        ranks,
        started_s=min(result.started_s for result in results.values()),
        ended_s=max(result.ended_s for result in results.values()),
        bytes_sent=sum(result.bytes_sent for result in results.values()),
        metrics=results[ranks[0]].metrics,
    )


class IterationProgress:
    """One delivered iteration under one generation.

    saves  the save nodes whose parts must become durable; empty where the iteration ends in no snapshot
    """

    def __init__(
        self,
        iteration: int,
        generation: int,
        nodes: Mapping[str, NodeProgress],
        saves: Mapping[str, Sequence[int]],
    ) -> None:
        self.iteration = iteration
        self.generation = generation
        self.nodes = nodes
        self.committed = False
        self._nodes_left = sum(not node.done for node in nodes.values())
        self.expect(saves)

    def expect(self, saves: Mapping[str, Sequence[int]]) -> None:
        """These nodes save: the iteration ends in a snapshot. None of them has run."""
        self.saves = {name: frozenset(ranks) for name, ranks in saves.items()}
        self.parts: dict[str, dict[int, Any]] = {name: {} for name in saves}
        self._parts_left = sum(len(ranks) for ranks in self.saves.values())

    def done(self, rank: int, node: str, result: NodeResult, now: float) -> bool:
        """A rank has answered. Returns True when this made the node done; False for repeats."""
        progress = self.nodes[node]
        if progress.done or rank in progress.results:
            return False
        progress.answer(rank, result, now)
        self._nodes_left -= progress.done
        return progress.done

    def durable(self, rank: int, node: str, parts: Any) -> None:
        """A rank's part of a snapshot is on the disk.

        parts  details of the files for the manifest
        """
        if rank not in self.saves[node]:
            raise InvariantError(f"rank {rank} saved for {node}, which runs on {sorted(self.saves[node])}")
        if rank not in self.parts[node]:
            self.parts[node][rank] = parts
            self._parts_left -= 1

    def awaits_part(self, rank: int, node: str) -> bool:
        """Whether a rank's part of the snapshot, which this node saves, is not durable yet."""
        return rank in self.saves.get(node, ()) and rank not in self.parts[node]

    @property
    def nodes_done(self) -> bool:
        """True when every node is done on every rank."""
        return self._nodes_left == 0

    @property
    def complete(self) -> bool:
        """True when every node is done and every part durable: the iteration can be committed."""
        return self._nodes_left == self._parts_left == 0

    def forget_results(self) -> None:
        """Drop every rank's results. The summaries stay."""
        for node in self.nodes.values():
            node.results = {}

    def overdue(self, now: float) -> Cause | None:
        """The first node, in plan order, that is past its deadline."""
        for name, node in self.nodes.items():
            if node.deadline is not None and not node.done and now > node.deadline:
                error = (
                    f"not finished {node.deadline_s:g} s after the last rank entered; if it was only slow, raise "
                    "patience"
                )
                return Cause(error, tuple(sorted(node.unfinished)), name, self.iteration)
        return None


class PartsInWriting:
    """Which parts of snapshots each rank has to write, and whether it continues with them.

    A rank writes one part after the other and waits for nobody. So each is judged by its own bytes.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._parts: dict[int, dict[tuple[int, str], None]] = {}  # rank -> (iteration, node), in order
        self._headway: dict[int, Headway] = {}

    def expect(self, rank: int, iteration: int, node: str, now: float) -> None:
        """A rank has copied a part, which must become durable. Repeats change nothing."""
        parts = self._parts.setdefault(rank, {})
        if not parts:
            self._headway.setdefault(rank, Headway(self._pace, now)).advance(now)
        parts[iteration, node] = None

    def moved(self, rank: int, total_bytes: int, now: float) -> None:
        """A rank has written and checked so many bytes."""
        self._headway.setdefault(rank, Headway(self._pace, now)).moved(rank, total_bytes, now)

    def durable(self, rank: int, iteration: int, node: str, now: float) -> None:
        """A part is durable."""
        if self._parts.get(rank, {}).pop((iteration, node), "unknown") is None:
            self._headway[rank].advance(now)

    def overdue(self, now: float) -> Cause | None:
        """The first rank that has parts to write and does not continue."""
        for rank, parts in self._parts.items():
            if parts and self._headway[rank].overdue(now):
                iteration, node = next(iter(parts))
                error = f"the saved part does not become durable: the rank has written {self._pace}"
                return Cause(error, (rank,), node, iteration)
        return None


class Occupancy:
    """Which rank is inside which node, over all iterations in flight: finds ranks that hang between nodes.

    A rank waits only inside nodes, for its peers. So a rank that has work but is inside no node should enter its next
    one at once. If it does not within `grace_s` seconds, it hangs.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self._order: dict[
            int, dict[tuple[int, str], bool]
        ] = {}  # rank -> (iteration, node) that is not done -> whether the rank is inside
        self._moved: dict[int, float] = {}

    def delivered(self, rank: int, requests: Iterable[NodeRequest], now: float) -> None:
        """A rank has been sent these requests, in this order."""
        order = self._order.setdefault(rank, {})
        if not order:
            self._moved[rank] = now
        for request in requests:
            order[request.key.iteration, request.key.node] = False

    def entered(self, rank: int, iteration: int, node: str, now: float) -> None:
        """A rank has entered a node. Late news of a node that is done is ignored."""
        order = self._order[rank]
        if (iteration, node) in order:
            order[iteration, node] = True
            self._moved[rank] = now

    def left(self, rank: int, iteration: int, node: str, now: float) -> None:
        """A rank is done with a node."""
        self._order[rank].pop((iteration, node), None)
        self._moved[rank] = now

    def position(self, rank: int) -> tuple[int | None, str | None]:
        """(iteration, node) that a rank is inside, else its next one; (None, None) when it has no work."""
        order = self._order.get(rank, {})
        inside = [place for place, is_inside in order.items() if is_inside]
        return (inside or list(order) or [(None, None)])[0]

    def overdue(self, now: float) -> Cause | None:
        """The first rank that has had work but been inside no node for more than `grace_s` seconds."""
        for rank, order in self._order.items():
            if now - self._moved[rank] > self.grace_s and order and not any(order.values()):
                iteration, node = next(iter(order))
                return Cause(
                    f"did not enter its next call within {self.grace_s:g} s", (rank,), node, iteration
                )
        return None


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
        self.awaited_s = timeouts.reset_s + timeouts.restart_s
        self._restarts_until = now + self.awaited_s
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
                return Cause(f"did not come back within {self.awaited_s:g} s", late, missing=True)
            return None
        late = tuple(r for r, s in self.states.items() if s is not RankState.RESTORED)
        if late and self._restoring.overdue(now):
            return Cause(f"make no progress in restoring: all ranks have read {self.pace}", late)
        return None

    def _set(self, rank: int, state: RankState) -> None:
        self._count[self.states[rank]] -= 1
        self._count[state] += 1
        self.states[rank] = state
