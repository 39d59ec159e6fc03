"""The inbox: what one rank may do now. One per rank; pure: stimuli in, instructions out.

It runs exactly the next number of its generation, one job at a time. It holds requests that came early, answers
repeats from the stored result, and refuses requests of another run, attempt or generation. docs/protocol.md has the
table of its phases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rlhf_tasks.protocol.instructions import (
    RESET,
    RESTORE,
    SETUP,
    Clear,
    Interrupt,
    Load,
    RankInstruction,
    Run,
)
from rlhf_tasks.protocol.messages import Done, Failed, Told
from rlhf_tasks.spec import NodeFailure, NodeKey, NodeRequest, NodeResult
from rlhf_tasks.system.invariants import require


class InboxPhase(Enum):
    """The state of an inbox. The value explains it in messages."""

    FREE = "nobody holds the rank"
    DRAINING = "reset, but the engine thread still runs an older job"
    CLEARING = "the engine thread drops everything of older generations"
    CLEAN = "cleared; waits for the restore"
    LOADING = "the engine thread joins the groups and loads a step"
    READY = "runs nodes"
    BROKEN = "a job failed; only a reset helps"


TRANSITIONS: dict[InboxPhase, frozenset[InboxPhase]] = {
    InboxPhase.FREE: frozenset({InboxPhase.CLEARING}),
    InboxPhase.DRAINING: frozenset({InboxPhase.CLEARING}),
    InboxPhase.CLEARING: frozenset(
        {InboxPhase.FREE, InboxPhase.CLEAN, InboxPhase.BROKEN, InboxPhase.DRAINING}
    ),
    InboxPhase.CLEAN: frozenset({InboxPhase.LOADING, InboxPhase.CLEARING}),
    InboxPhase.LOADING: frozenset({InboxPhase.READY, InboxPhase.BROKEN, InboxPhase.DRAINING}),
    InboxPhase.READY: frozenset({InboxPhase.BROKEN, InboxPhase.CLEARING, InboxPhase.DRAINING}),
    InboxPhase.BROKEN: frozenset({InboxPhase.CLEARING}),
}


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may send work to a rank: one attempt of one run at a time.

    client  name of the controller's connection; the lease ends with it
    """

    run: str
    attempt: int
    client: str

    def __str__(self) -> str:
        return f"run {self.run!r}, attempt {self.attempt} (client {self.client})"


def refusal(holder: Lease | None, wanted: Lease) -> str | None:
    """Why `wanted` may not take a rank that `holder` holds; None when it may.

    A later attempt of the same run may take over, because the earlier one must have ended.
    """
    if holder is None or holder == wanted or (holder.run == wanted.run and holder.attempt < wanted.attempt):
        return None
    return (
        f"this rank is held by {holder}; {wanted} must wait until that run has ended, or use other workers."
    )


class Inbox:
    """The queue of one rank.

    lease           who holds the rank
    generation      the current generation under that lease
    gap_deadline_s  seconds for which a missing number may hold back later ones
    """

    def __init__(self, rank: int, gap_deadline_s: float = 30.0) -> None:
        self.rank = rank
        self.gap_deadline_s = gap_deadline_s
        self.phase = InboxPhase.FREE
        self.lease: Lease | None = None
        self.generation = 0
        self._job: NodeKey | None = None
        self._forget()

    def _forget(self) -> None:
        """Drop all requests and answers of the generation."""
        self._next_number = 0
        self._held: dict[int, NodeRequest] = {}
        self._stored: dict[int, NodeResult] = {}  # by number, for repeats
        self._failure: NodeFailure | None = None
        self._newest_iteration = SETUP
        self._gap_since: float | None = None
        self._gap_told = False

    def _move(self, phase: InboxPhase) -> None:
        assert phase in TRANSITIONS[self.phase], f"rank {self.rank}: {self.phase.name} -> {phase.name}"
        self.phase = phase

    def _setup_key(self, node: str) -> NodeKey:
        lease = self.lease
        run, attempt = (lease.run, lease.attempt) if lease else ("", 0)
        return NodeKey(run, attempt, self.generation, SETUP, node)

    # --- stimuli from the controller -----------------------------------------------------------------

    def reset(
        self, run: str, attempt: int, generation: int, client: str, now: float
    ) -> list[RankInstruction]:
        """Take the lease and move to a generation: queued requests are dropped, the running job is interrupted."""
        wanted = Lease(run, attempt, client)
        reason = refusal(self.lease, wanted)
        if reason is None and self.lease == wanted and generation < self.generation:
            reason = f"generation {generation} has ended; this rank is at generation {self.generation}."
        if reason is not None:
            return [self._refusal(NodeKey(run, attempt, generation, SETUP, RESET), reason)]
        if self.lease == wanted and self.generation == generation and self.phase is not InboxPhase.FREE:
            return self._repeat_reset()
        self.lease, self.generation = wanted, generation
        return self._start_clearing()

    def restore(
        self, run: str, attempt: int, generation: int, step: int | None, now: float
    ) -> list[RankInstruction]:
        """Join the generation's groups and load a step."""
        key = NodeKey(run, attempt, generation, SETUP, RESTORE)
        reason = self._stale(key)
        if reason is None and self.phase in (InboxPhase.DRAINING, InboxPhase.CLEARING):
            reason = "the reset has not ended."
        if reason is not None:
            return [self._refusal(key, reason)]
        if self.phase is InboxPhase.CLEAN:
            self._move(InboxPhase.LOADING)
            self._job = key
            return [Load(key, step)]
        if self.phase is InboxPhase.BROKEN:
            return self._repeat_failure()
        return [self._told("restored", key)] if self.phase is InboxPhase.READY else []

    def deliver(self, requests: Sequence[NodeRequest], now: float) -> list[RankInstruction]:
        """Requests of one iteration, in order. They may be repeats, or arrive before an earlier iteration's."""
        first = requests[0].key
        reason = self._stale(first)
        if reason is None and self.phase not in (InboxPhase.READY, InboxPhase.BROKEN):
            reason = f"this rank is not ready: {self.phase.value}."
        if reason is not None:
            return [self._refusal(first, reason)]
        instructions: list[RankInstruction] = []
        for request in requests:
            instructions += self._accept(request)
        self._newest_iteration = max(self._newest_iteration, first.iteration)
        oldest = self._newest_iteration - 1
        self._stored = {n: r for n, r in self._stored.items() if r.key.iteration >= oldest}
        return instructions + self._advance(now)

    def client_lost(self, client: str, now: float) -> list[RankInstruction]:
        """A controller's connection is closed: its lease ends."""
        if self.lease is None or self.lease.client != client:
            return []
        self.lease = None
        return self._start_clearing()

    # --- stimuli from the engine thread --------------------------------------------------------------

    def cleared(self, key: NodeKey, now: float) -> list[RankInstruction]:
        """The job of a `Clear` has succeeded."""
        if key != self._job:
            return []
        self._job = None
        if self.phase is InboxPhase.DRAINING:
            return self._start_clearing()
        if self.lease is None:
            self._move(InboxPhase.FREE)
            return []
        self._move(InboxPhase.CLEAN)
        return [self._told("reset", key)]

    def loaded(self, key: NodeKey, now: float) -> list[RankInstruction]:
        """The job of a `Load` has succeeded."""
        if key != self._job:
            return []
        self._job = None
        if self.phase is InboxPhase.DRAINING:
            return self._start_clearing()
        self._move(InboxPhase.READY)
        return [self._told("restored", key)]

    def finished(self, result: NodeResult, now: float) -> list[RankInstruction]:
        """The job of a `Run` has succeeded."""
        if result.key != self._job:
            return []
        self._job = None
        if self.phase is InboxPhase.DRAINING:
            return self._start_clearing()
        self._stored[self._next_number - 1] = result
        return [Done(result=result), *self._advance(now)]

    def failed(self, failure: NodeFailure, now: float) -> list[RankInstruction]:
        """A job has failed. The failure's key says which job (`Clear` and `Load` have keys too)."""
        if failure.key != self._job:
            return []
        self._job = None
        if self.phase is InboxPhase.DRAINING:
            return self._start_clearing()
        self._move(InboxPhase.BROKEN)
        self._failure = failure
        return self._repeat_failure()

    def tick(self, now: float) -> list[RankInstruction]:
        """Time has passed: report, once, a gap that is past its deadline."""
        if self._gap_since is None or self._gap_told or now - self._gap_since <= self.gap_deadline_s:
            return []
        self._gap_told = True
        first = self._held[min(self._held)]
        reason = (
            f"request {self._next_number} was not delivered within {self.gap_deadline_s:g} s "
            f"although request {first.number} was."
        )
        return [self._refusal(first.key, reason)]

    def _told(self, kind: Literal["entered", "reset", "restored"], key: NodeKey) -> Told:
        return Told(kind=kind, rank=self.rank, key=key)

    def _refusal(self, key: NodeKey, reason: str) -> Told:
        return Told(kind="refused", rank=self.rank, key=key, reason=reason)

    # --- inside --------------------------------------------------------------------------------------

    def _stale(self, key: NodeKey) -> str | None:
        """Why a request does not belong to this rank's lease and generation; None when it does."""
        if self.lease is None:
            return (
                "nobody holds this rank: it has not been reset since its process started or its client left."
            )
        if (key.run, key.attempt) != (self.lease.run, self.lease.attempt):
            return f"this rank is held by {self.lease}."
        if key.generation != self.generation:
            return f"this rank is at generation {self.generation}."
        return None

    def _start_clearing(self) -> list[RankInstruction]:
        """Drop the queue, and clear as soon as the engine thread is free."""
        self._forget()
        if self._job is not None:
            if self.phase is not InboxPhase.DRAINING:
                self._move(InboxPhase.DRAINING)
            return [Interrupt(self._job)]
        self._move(InboxPhase.CLEARING)
        self._job = self._setup_key(RESET)
        return [Clear(self._job)]

    def _repeat_reset(self) -> list[RankInstruction]:
        """Answer a repeated reset."""
        if self.phase in (InboxPhase.DRAINING, InboxPhase.CLEARING):
            return []
        if self._failure is not None and self._failure.key.node == RESET:
            return self._repeat_failure()
        return [self._told("reset", self._setup_key(RESET))]

    def _repeat_failure(self) -> list[RankInstruction]:
        return [] if self._failure is None or self.lease is None else [Failed(failure=self._failure)]

    def _accept(self, request: NodeRequest) -> list[RankInstruction]:
        """Hold a new request; answer a repeated one."""
        if request.number >= self._next_number:
            held = self._held.setdefault(request.number, request)
            require(held == request, f"number {request.number} names {held.key} and {request.key}")
            return []
        if self._failure is not None and self._failure.key == request.key:
            return self._repeat_failure()
        stored = self._stored.get(request.number)  # None: it is running, or too old to be asked for again
        return [] if stored is None else [Done(result=stored)]

    def _advance(self, now: float) -> list[RankInstruction]:
        """Run the next number if it is here and nothing runs."""
        if self.phase is not InboxPhase.READY or self._job is not None:
            return []
        request = self._held.pop(self._next_number, None)
        if request is None:
            if not self._held:
                self._gap_since = None
            elif self._gap_since is None:
                self._gap_since = now
            return []
        self._gap_since, self._gap_told = None, False
        self._next_number += 1
        self._job = request.key
        return [self._told("entered", request.key), Run(request)]
