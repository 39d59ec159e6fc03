"""The messages between flow, controller and ranks, and the instructions of the state machines to their owners.

A message is a pydantic model as JSON bytes. There are two kinds of connections, both Dask comms:

    flow -> controller  the lease: opened with a `RunSpec`; FLOW_MESSAGEs one way, `Event`s the other
    controller -> rank  the link: opened with the executor's name; RANK_MESSAGEs one way, NEWS the other

A connection delivers in order and loses messages only when it breaks. Each end then treats the other as dead: that
is a fault, and nothing is sent again. An inbox refuses a request out of turn.

An instruction is frozen, says what to do and never how, and stays in its process: an `Inbox` asks its rank to run a
node, a `Ledger` asks the controller to send requests or to write a commit. What they give besides are messages, which
the owner sends as they are. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from prefect_rlhf.rlhf_tasks.config.cluster import Limits
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, Frozen, NodeFailure, NodeKey, NodeRequest, NodeResult

HOST = "host"
"""Node name in the key of a failure that belongs to no node."""
RESET, RESTORE = "reset", "restore"
"""Node names in the keys of the two jobs that are not nodes of the plan; their iteration is SETUP."""
SETUP = -1
"""The iteration before the first: its commit is step 0."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why iterations were aborted: which ranks, in which node of which iteration, and what happened.

    lasting  no rank is at fault, and a repeated iteration would fail again
    missing  the ranks have not come back in time
    """

    error: str
    ranks: tuple[int, ...] = ()
    node: str | None = None
    iteration: int | None = None
    traceback: str = ""
    lasting: bool = False
    missing: bool = False

    def __str__(self) -> str:
        where: list[str] = []
        if self.ranks:
            where.append(("rank " if len(self.ranks) == 1 else "ranks ") + ", ".join(map(str, self.ranks)))
        if self.node is not None:
            where.append(f"call {self.node}")
        if self.iteration is not None:
            where.append(f"iteration {self.iteration + 1}")
        return f"{', '.join(where)}: {self.error}" if where else self.error


# --- a run ----------------------------------------------------------------------------------------------


class RunSpec(Frozen):
    """One attempt of a run, as its flow describes it to the controller.

    attempt         its number, set when it begins
    ranks           set then, too: names of the Dask workers that serve; position = global rank = device id
    run_folder      a folder that all hosts share
    config          the run's configuration, JSON-able; the executor and the snapshots parse it
    iterations      of the whole run, including those before this attempt
    limits          deadlines, waits, restarts, commits
    executor        "module:function" that makes a rank's executor
    snapshots       "module:function" that makes the controller's `Snapshots` of this spec
    predicted_s     node name -> seconds that the plan predicts
    users_s         node name -> seconds that the user's own code may take in it
    peak_flops_per_s  FLOP/s of all devices together, on which the metric `mfu` is based; None where it is unknown
    rebuilds        earlier attempts and rebuilds since the last commit, which count among those that are allowed
    blocks          name of each Prefect Secret block in the kwargs of rewards -> its value; never written to disk
    """

    run: str
    attempt: int = 0
    ranks: tuple[str, ...] = ()
    plan: ExecutionPlan
    config: dict[str, Any]
    run_folder: str
    iterations: int = Field(gt=0)
    limits: Limits
    executor: str = "prefect_rlhf.rlhf_tasks.rank.plan_nodes:make_executor"
    snapshots: str = "prefect_rlhf.rlhf_tasks.checkpoint.commits:run_snapshots"
    predicted_s: dict[str, float] = Field(default_factory=dict)
    users_s: dict[str, float] = Field(default_factory=dict)
    peak_flops_per_s: float | None = Field(default=None, gt=0)
    rebuilds: int = Field(default=0, ge=0)
    blocks: dict[str, str] = Field(default_factory=dict, repr=False)


class GenerationSpec(Frozen):
    """One generation of process groups, for one rank: all that its executor needs to join them and to load.

    rank, n_ranks  this rank's global rank (= device id) and how many ranks join
    config         the run's configuration, JSON-able; the executor parses it
    run_folder     a folder that all hosts share
    restore_step   the commit to restore from; None: initialise, and save every trained role as step 0
    iterations     of the whole run
    store_host, store_port, store_prefix   the controller's TCPStore and this generation's PrefixStore
    timeout_s      timeout of every process group, in seconds: longer than any wait that node deadlines allow
    blocks         as in the run's `RunSpec`
    """

    run: str
    attempt: int
    generation: int
    rank: int
    n_ranks: int
    plan: ExecutionPlan
    config: dict[str, Any]
    run_folder: str
    restore_step: int | None
    iterations: int
    store_host: str
    store_port: int
    store_prefix: str
    timeout_s: float
    blocks: dict[str, str] = Field(default_factory=dict, repr=False)


# --- controller -> rank ---------------------------------------------------------------------------------


class Reset(Frozen):
    """Take the lease and move to a generation."""

    kind: Literal["reset"] = "reset"
    run: str
    attempt: int
    generation: int
    rank: int


class Restore(Frozen):
    """Join the groups and load the commit."""

    kind: Literal["restore"] = "restore"
    spec: GenerationSpec


class Deliver(Frozen):
    """The requests of one iteration for one rank."""

    kind: Literal["deliver"] = "deliver"
    requests: tuple[NodeRequest, ...]


# --- rank -> controller ---------------------------------------------------------------------------------


class Told(Frozen):
    """News from a rank about a node, its reset or its restore. Only a refusal has a `reason`."""

    kind: Literal["entered", "reset", "restored", "refused"]
    rank: int
    key: NodeKey
    reason: str = ""


class Done(Frozen):
    """A node's result on one rank."""

    kind: Literal["done"] = "done"
    result: NodeResult


class Failed(Frozen):
    """An error on one rank."""

    kind: Literal["failed"] = "failed"
    failure: NodeFailure


class SavedPart(Frozen):
    """One rank's part of a role is durable on disk (every file written and synced), or could not be written.

    step     the step that the part belongs to: a save node of iteration t makes step t + 1
    details  file names, sizes and digests for the manifest, JSON-able
    error    empty, or what went wrong (`no space left: PATH needs N bytes, M are free`)
    lasting  a retry would fail again: the disk is full or read-only
    """

    kind: Literal["saved"] = "saved"
    run: str
    attempt: int
    generation: int
    step: int
    role: str
    rank: int
    details: dict[str, Any] = Field(default_factory=dict)
    error: str = ""
    lasting: bool = False


class Moved(Frozen):
    """What one rank has moved to and from the disk: told about twice a second while that grows.

    total_bytes  of models and commits that its process has read, written and checked since it began
    """

    kind: Literal["moved"] = "moved"
    run: str
    attempt: int
    generation: int
    rank: int
    total_bytes: int


# --- flow <-> controller --------------------------------------------------------------------------------


class Enter(Frozen):
    """Deliver the requests of an iteration."""

    kind: Literal["enter"] = "enter"
    iteration: int
    generation: int


class Pause(Frozen):
    """Deliver no more iterations. `Held` follows when all delivered ones are committed."""

    kind: Literal["pause"] = "pause"


class Resume(Frozen):
    """End a pause."""

    kind: Literal["resume"] = "resume"


class StopAfter(Frozen):
    """Make an iteration the last one. Those already delivered are still completed and committed. Ends a pause."""

    kind: Literal["stop_after"] = "stop_after"
    iteration: int


class Enterable(Frozen):
    """The iteration may be entered under this generation."""

    kind: Literal["enterable"] = "enterable"
    iteration: int
    generation: int


class NotEntered(Frozen):
    """The iteration was not entered: a fault, a pause or the end of the run came first."""

    kind: Literal["not_entered"] = "not_entered"
    iteration: int
    generation: int
    reason: str


class NodeBegun(Frozen):
    """The first rank has entered a node.

    started_s  time.time() of the controller
    """

    kind: Literal["node_begun"] = "node_begun"
    iteration: int
    generation: int
    node: str
    started_s: float


class NodeEnded(Frozen):
    """The last rank has left a node.

    started_s, ended_s  time.time() of the ranks: when the first entered, when the last left
    """

    kind: Literal["node_ended"] = "node_ended"
    iteration: int
    generation: int
    node: str
    started_s: float
    ended_s: float


class IterationRan(Frozen):
    """Every node of the iteration has ended on every rank. It is not committed yet.

    metrics  as in the journal
    """

    kind: Literal["iteration_ran"] = "iteration_ran"
    iteration: int
    generation: int
    metrics: dict[str, float | None]


class Committed(Frozen):
    """The iteration is part of a written commit: nothing can undo it.

    results  node -> one result per rank
    """

    kind: Literal["committed"] = "committed"
    iteration: int
    results: dict[str, tuple[NodeResult, ...]]

    def by_rank(self) -> dict[str, dict[int, NodeResult]]:
        """Node -> rank -> result, as the journals have it."""
        return {node: {result.rank: result for result in ranks} for node, ranks in self.results.items()}


class Aborted(Frozen):
    """The iteration will not be committed under this generation."""

    kind: Literal["aborted"] = "aborted"
    iteration: int
    generation: int
    cause: Cause


class Faulted(Frozen):
    """A generation has ended by an error.

    `Aborted` follows for each lost iteration. Then the ranks are rebuilt, or `GaveUp` follows after a lasting cause.
    """

    kind: Literal["faulted"] = "faulted"
    generation: int
    cause: Cause


class Held(Frozen):
    """The run is paused: every delivered iteration is committed, and the ranks are idle."""

    kind: Literal["held"] = "held"
    step: int


class Finished(Frozen):
    """The last iteration is committed."""

    kind: Literal["finished"] = "finished"
    step: int


class GaveUp(Frozen):
    """The attempt has ended or was refused. The next one starts at `committed_step`.

    traceback  of the user's code, if that is the cause
    missing    ranks that were not there in time, if that is the cause
    """

    kind: Literal["gave_up"] = "gave_up"
    reason: str
    committed_step: int | None = None
    traceback: str = ""
    missing: tuple[int, ...] = ()


Event = (
    Enterable
    | NotEntered
    | NodeBegun
    | NodeEnded
    | IterationRan
    | Committed
    | Aborted
    | Faulted
    | Held
    | Finished
    | GaveUp
)
RANK_MESSAGE: TypeAdapter[Any] = TypeAdapter(
    Annotated[Reset | Restore | Deliver, Field(discriminator="kind")]
)
NEWS: TypeAdapter[Any] = TypeAdapter(
    Annotated[Told | Done | Failed | SavedPart | Moved, Field(discriminator="kind")]
)
FLOW_MESSAGE: TypeAdapter[Any] = TypeAdapter(
    Annotated[Enter | Pause | Resume | StopAfter, Field(discriminator="kind")]
)
EVENT: TypeAdapter[Any] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


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
LedgerInstruction = ResetRank | RestartRank | RestoreRank | Ready | Send | IterationDone | WriteCommit | Event
