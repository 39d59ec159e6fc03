"""The outputs of the protocol's state machines: frozen instructions, carried out by the owner of the machine.

There are two families: what an `Inbox` asks of its rank (run a node, tell the controller), and what a `Ledger` asks
of the controller (send requests, write a commit). An instruction says what to do, never how. The owner repeats a
message until the other side has it; every receiver ignores repeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan
from rlhf_tasks.spec import ExecutionPlan, NodeFailure, NodeKey, NodeRequest, NodeResult

RESET, RESTORE = "reset", "restore"
"""Node names in the keys of the two jobs that are not nodes of the plan; their iteration is SETUP."""
SETUP = -1
"""The iteration before the first: its commit is step 0."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why iterations were aborted: which ranks, in which node of which iteration, and what happened.

    lasting  no rank is at fault, and a repeated iteration would fail again
    """

    error: str
    ranks: tuple[int, ...] = ()
    node: str | None = None
    iteration: int | None = None
    traceback: str = ""
    lasting: bool = False

    def __str__(self) -> str:
        where: list[str] = []
        if self.ranks:
            where.append(("rank " if len(self.ranks) == 1 else "ranks ") + ", ".join(map(str, self.ranks)))
        if self.node is not None:
            where.append(f"call {self.node}")
        if self.iteration is not None:
            where.append(f"iteration {self.iteration + 1}")
        return f"{', '.join(where)}: {self.error}" if where else self.error


# --- what an inbox asks of its rank -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clear:
    """On the engine thread: drop samples, copies, groups and queued writes. Then `Inbox.cleared(key)`.

    keep_state  the state of trained roles may be kept for the next generation
    """

    key: NodeKey
    keep_state: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """On the engine thread: join the generation's groups and load a step. Then `Inbox.loaded(key)`.

    step  the commit to load; None: initialise the roles from their sources and write the parts of step 0
    """

    key: NodeKey
    step: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """On the engine thread: run a node. Then `Inbox.finished(result)` or `Inbox.failed(failure)`."""

    request: NodeRequest


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End the engine thread's job, whose peers are gone, by aborting the process groups. Best effort."""

    key: NodeKey


@dataclass(frozen=True, slots=True)
class Entered:
    """Tell the controller that this rank has entered a node -> `Ledger.rank_entered`."""

    key: NodeKey


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell the controller a node's result -> `Ledger.rank_done`."""

    result: NodeResult


@dataclass(frozen=True, slots=True)
class AnswerFailure:
    """Tell the controller of an error -> `Ledger.rank_failed`."""

    failure: NodeFailure


@dataclass(frozen=True, slots=True)
class ResetDone:
    """Tell the controller that this rank is clean for a generation -> `Ledger.rank_reset`."""

    key: NodeKey


@dataclass(frozen=True, slots=True)
class RestoreDone:
    """Tell the controller that this rank has loaded its step -> `Ledger.rank_restored`."""

    key: NodeKey


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the sender that this rank refuses its request, and why -> `Ledger.rank_refused`."""

    key: NodeKey
    reason: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Tell the controller that a request is missing although later ones came -> `Ledger.rank_refused`.

    key     of the first request that is held back
    number  the missing number
    """

    key: NodeKey
    number: int
    reason: str


# --- what a ledger asks of the controller -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResetRank:
    """Move a rank to a new generation -> `Inbox.reset`.

    keep_state  the plan changes and nothing has failed: the rank may keep its trained roles' state
    """

    rank: int
    generation: int
    keep_state: bool = False


@dataclass(frozen=True, slots=True)
class RestartRank:
    """Give the rank a new process; when it is up, `Ledger.rank_started`.

    lost  True: its process is gone, and a nanny may already be starting the next; False: it is stuck, so kill it
    """

    rank: int
    lost: bool


@dataclass(frozen=True, slots=True)
class RestoreRank:
    """Have a rank join the generation's groups and load a step (None: initialise) -> `Inbox.restore`."""

    rank: int
    generation: int
    step: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """All ranks hold the state before `iteration`. From there, iterations may be entered under this generation."""

    generation: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a rank its requests of one iteration, as one message -> `Inbox.deliver`."""

    rank: int
    requests: tuple[NodeRequest, ...]


@dataclass(frozen=True, slots=True)
class RefuseEntry:
    """The iteration was not entered, for this reason."""

    iteration: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeDone:
    """Every rank of a node has answered.

    results  rank -> result
    """

    iteration: int
    node: str
    results: Mapping[int, NodeResult]


@dataclass(frozen=True, slots=True)
class IterationDone:
    """Every node of an iteration is done. Its snapshot may not be durable yet."""

    iteration: int


@dataclass(frozen=True, slots=True)
class WriteCommit:
    """Write the manifest and rename the folder; then `Ledger.commit_done(step)` or `Ledger.commit_failed(step, ...)`.

    step        number of committed iterations
    iterations  the iterations that this commit makes final: their metrics are appended now
    parts       save node -> rank -> the details of its files that the rank reported
    cursor      global id of the first sample not yet fetched
    versions    trained role -> number of its train_step calls
    plan        the plan of the last of the iterations; for step 0, of the first iteration
    """

    step: int
    iterations: tuple[int, ...]
    parts: Mapping[str, Mapping[int, Any]]
    cursor: int
    versions: Mapping[str, int]
    plan: ExecutionPlan


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Log durably which plan begins at which iteration; then `Ledger.plan_logged` or `plan_not_logged`."""

    planned: ScheduledPlan


@dataclass(frozen=True, slots=True)
class PlanChanges:
    """From an iteration on, the run follows another plan. This is final."""

    planned: ScheduledPlan


@dataclass(frozen=True, slots=True)
class RefusePlan:
    """The plan does not change, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class IterationCommitted:
    """The iteration is part of a written commit: nothing can undo it."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Fault:
    """The generation has ended by an error.

    AbortIteration follows for each lost iteration; then the rebuild's instructions, or GiveUp after a lasting cause.
    """

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class AbortIteration:
    """The iteration will not be committed under this generation. Its subflow ends Failed with the cause."""

    iteration: int
    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Held:
    """The run is paused: every delivered iteration is committed, and the ranks are idle until `Ledger.resume`."""

    step: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last iteration is committed."""

    step: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The attempt ends with an error. The next one starts at `committed_step`.

    traceback  of the user's code, if that is the cause
    """

    reason: str
    committed_step: int | None
    traceback: str = ""


RankInstruction = (
    Clear | Load | Run | Interrupt | Entered | Answer | AnswerFailure | ResetDone | RestoreDone | Refuse | Gap
)
LedgerInstruction = (
    ResetRank
    | RestartRank
    | RestoreRank
    | Ready
    | Send
    | RefuseEntry
    | NodeDone
    | IterationDone
    | WriteCommit
    | LogPlan
    | PlanChanges
    | RefusePlan
    | IterationCommitted
    | Fault
    | AbortIteration
    | Held
    | Finished
    | GiveUp
)
