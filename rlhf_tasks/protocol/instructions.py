"""The outputs of the protocol's state machines: frozen instructions, carried out by the owner of the machine.

There are two families: what an `Inbox` asks of its rank (run a node), and what a `Ledger` asks of the controller
(send requests, write a commit). An instruction says what to do, never how. News for the other side is a message
already (rlhf_tasks/protocol/messages.py): an `Inbox` gives `News` for the controller, a `Ledger` gives `Event`s for
the flow, and the owner sends them as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_tasks.protocol.messages import (
    Aborted,
    Committed,
    Done,
    Failed,
    Faulted,
    Finished,
    GaveUp,
    Held,
    NodeEnded,
    NotEntered,
    Told,
)
from rlhf_tasks.spec import ExecutionPlan, NodeKey, NodeRequest

RESET, RESTORE = "reset", "restore"
"""Node names in the keys of the two jobs that are not nodes of the plan; their iteration is SETUP."""
SETUP = -1
"""The iteration before the first: its commit is step 0."""


# --- what an inbox asks of its rank -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clear:
    """On the engine thread: drop samples, copies, groups and queued writes. Then `Inbox.cleared(key)`."""

    key: NodeKey


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


# --- what a ledger asks of the controller -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResetRank:
    """Move a rank to a new generation -> `Inbox.reset`."""

    rank: int
    generation: int


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
class IterationDone:
    """Every node of an iteration is done. Its snapshot may not be durable yet."""

    iteration: int


@dataclass(frozen=True, slots=True)
class WriteCommit:
    """Write the manifest and rename the folder; then `Ledger.commit_done(step)` or `Ledger.commit_failed(step, ...)`.

    step        number of committed iterations
    iterations  the iterations that this commit makes final: their metrics are appended now
    parts       save node -> rank -> the details of its files that the rank reported
    cursor      global id of the first sample of the next iteration
    versions    trained role -> number of its train_step calls
    plan        the attempt's
    """

    step: int
    iterations: tuple[int, ...]
    parts: Mapping[str, Mapping[int, Any]]
    cursor: int
    versions: Mapping[str, int]
    plan: ExecutionPlan


RankInstruction = Clear | Load | Run | Interrupt | Told | Done | Failed
LedgerInstruction = (
    ResetRank
    | RestartRank
    | RestoreRank
    | Ready
    | Send
    | IterationDone
    | WriteCommit
    | NotEntered
    | NodeEnded
    | Committed
    | Faulted
    | Aborted
    | Held
    | Finished
    | GaveUp
)
