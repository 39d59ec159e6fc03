"""The inbox: what one rank may do now. One per rank; pure: stimuli in, instructions out.

It runs the requests of its generation one at a time, in the order of their numbers, which is the order in which its
controller's connection brings them. It refuses a request out of turn, and those of another run, attempt or
generation. docs/explanation/protocol.md says what holds.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from prefect_rlhf.rlhf_tasks.protocol.messages import (
    RESET,
    RESTORE,
    SETUP,
    Clear,
    Done,
    Failed,
    Interrupt,
    Load,
    RankInstruction,
    Run,
    Told,
)
from prefect_rlhf.rlhf_tasks.spec import NodeFailure, NodeKey, NodeRequest, NodeResult


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

    lease       who holds the rank
    generation  the current generation under that lease
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.phase = InboxPhase.FREE
        self.lease: Lease | None = None
        self.generation = 0
        self._job: NodeKey | None = None
        self._waiting: deque[NodeRequest] = deque()
        self._next_number = 0  # of the request that is delivered next

    def _move(self, phase: InboxPhase) -> None:
        assert phase in TRANSITIONS[self.phase], f"rank {self.rank}: {self.phase.name} -> {phase.name}"
        self.phase = phase

    def _setup_key(self, node: str) -> NodeKey:
        lease = self.lease
        run, attempt = (lease.run, lease.attempt) if lease else ("", 0)
        return NodeKey(run, attempt, self.generation, SETUP, node)

    # --- stimuli from the controller -----------------------------------------------------------------

    def reset(self, run: str, attempt: int, generation: int, client: str) -> list[RankInstruction]:
        """Take the lease and move to a generation: queued requests are dropped, the running job is interrupted."""
        wanted = Lease(run, attempt, client)
        reason = refusal(self.lease, wanted)
        if reason is None and self.lease == wanted and generation <= self.generation:
            reason = f"this rank is at generation {self.generation} already."
        if reason is not None:
            return [self._refusal(NodeKey(run, attempt, generation, SETUP, RESET), reason)]
        self.lease, self.generation = wanted, generation
        return self._start_clearing()

    def restore(self, run: str, attempt: int, generation: int, step: int | None) -> list[RankInstruction]:
        """Join the generation's groups and load a step."""
        key = NodeKey(run, attempt, generation, SETUP, RESTORE)
        reason = self._stale(key)
        if reason is None and self.phase is not InboxPhase.CLEAN:
            reason = f"this rank is not clean: {self.phase.value}."
        if reason is not None:
            return [self._refusal(key, reason)]
        self._move(InboxPhase.LOADING)
        self._job = key
        return [Load(key, step)]

    def deliver(self, requests: Sequence[NodeRequest]) -> list[RankInstruction]:
        """Requests of one iteration, in order. A rank that is broken drops them: a reset is on its way."""
        first = requests[0]
        reason = self._stale(first.key)
        if reason is None and self.phase not in (InboxPhase.READY, InboxPhase.BROKEN):
            reason = f"this rank is not ready: {self.phase.value}."
        if reason is None and first.number != self._next_number:
            reason = f"request {first.number} came in the place of request {self._next_number}."
        if reason is not None:
            return [self._refusal(first.key, reason)]
        self._waiting.extend(requests)
        self._next_number += len(requests)
        return self._advance()

    def client_lost(self, client: str) -> list[RankInstruction]:
        """A controller's connection is closed: its lease ends."""
        if self.lease is None or self.lease.client != client:
            return []
        self.lease = None
        return self._start_clearing()

    # --- stimuli from the engine thread --------------------------------------------------------------

    def cleared(self, key: NodeKey) -> list[RankInstruction]:
        """The job of a `Clear` has succeeded."""
        if not self._ends(key):
            return []
        if self.phase is InboxPhase.DRAINING:
            return self._start_clearing()
        if self.lease is None:
            self._move(InboxPhase.FREE)
            return []
        self._move(InboxPhase.CLEAN)
        return [self._told("reset", key)]

    def loaded(self, key: NodeKey) -> list[RankInstruction]:
        """The job of a `Load` has succeeded."""
        if not self._ends(key):
            return []
        if self.phase is InboxPhase.DRAINING:
            return self._start_clearing()
        self._move(InboxPhase.READY)
        return [self._told("restored", key)]

    def finished(self, result: NodeResult) -> list[RankInstruction]:
        """The job of a `Run` has succeeded."""
        if not self._ends(result.key):
            return []
        if self.phase is InboxPhase.DRAINING:
            return self._start_clearing()
        return [Done(result=result), *self._advance()]

    def failed(self, failure: NodeFailure) -> list[RankInstruction]:
        """A job has failed. The failure's key says which job (`Clear` and `Load` have keys too)."""
        if not self._ends(failure.key):
            return []
        if self.phase is InboxPhase.DRAINING:
            return self._start_clearing()
        self._move(InboxPhase.BROKEN)
        return [] if self.lease is None else [Failed(failure=failure)]

    # --- inside --------------------------------------------------------------------------------------

    def _ends(self, key: NodeKey) -> bool:
        """Whether a key is that of the running job, which has ended then."""
        if key != self._job:
            return False
        self._job = None
        return True

    def _told(self, kind: Literal["entered", "reset", "restored"], key: NodeKey) -> Told:
        return Told(kind=kind, rank=self.rank, key=key)

    def _refusal(self, key: NodeKey, reason: str) -> Told:
        return Told(kind="refused", rank=self.rank, key=key, reason=reason)

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
        self._waiting.clear()
        self._next_number = 0
        if self._job is not None:
            if self.phase is not InboxPhase.DRAINING:
                self._move(InboxPhase.DRAINING)
            return [Interrupt(self._job)]
        self._move(InboxPhase.CLEARING)
        self._job = self._setup_key(RESET)
        return [Clear(self._job)]

    def _advance(self) -> list[RankInstruction]:
        """Run the next request if it is here and nothing runs."""
        if self.phase is not InboxPhase.READY or self._job is not None or not self._waiting:
            return []
        request = self._waiting.popleft()
        self._job = request.key
        return [self._told("entered", request.key), Run(request)]
