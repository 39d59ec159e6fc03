"""The types that all layers share: model function calls, plan nodes, the plan, requests and results.

Imports no torch, Prefect or Dask. A plan is plain data: reading it does not need the planner.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement

CallKind = Literal["generate", "inference", "train_step"]


IN_FLIGHT = 2
"""Iterations that may be in flight: iteration t starts after t - 2 has ended (docs/explanation/protocol.md)."""

STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
"""An unknown field is an error. JSON has NaN or Infinity for non-finite numbers, as in the metrics of a skipped step:
pydantic would write null, which cannot be read back as a float."""


class Frozen(BaseModel):
    """Base of all specifications: immutable and STRICT."""

    model_config = STRICT | ConfigDict(frozen=True)


def _shape_of_before(saved: dict[str, Any] | ModelShape) -> dict[str, Any] | ModelShape:
    if not isinstance(saved, dict):
        return saved
    document = {**saved}
    norms, packed = document.get("qk_norm"), document.get("packed")
    if isinstance(norms, bool):
        document["qk_norm"] = "each head" if norms else None
    if isinstance(packed, bool):
        gate_up = ("gate_up",) if document.get("gated", True) else ()
        document["packed"] = ("qkv", *gate_up) if packed else ()
    return document


SavedShape = Annotated[ModelShape, BeforeValidator(_shape_of_before)]
"""A shape in a file. One of before may say with a boolean that heads have norms each, and that all that can be packed
is."""


class Part(NamedTuple):
    """Part `number`, from 0, of `of` equal parts of an iteration's samples: consecutive whole groups."""

    number: int = 0
    of: int = 1

    def ids(self, ids: Sequence[int]) -> Sequence[int]:
        """The part of an iteration's sample ids, in their order."""
        size = len(ids) // self.of
        return ids[self.number * size : (self.number + 1) * size]


WHOLE = Part()
"""All samples of an iteration."""

ENDED = "ended"
"""Of a sample in segments: whether it has ended; it may wait for the others of its group, or for its turn."""

GROUPS_BEGUN = "groups_begun"
"""In segments: the number of groups that were begun so far, on all dp ranks together."""


class Decision(Frozen):
    """A number that the controller makes of a finished call's metrics: function(before, metrics, **constants).

    It is made of nothing else, so a repeated iteration decides alike (docs/adr/0040-decisions.md). A call with `when`
    runs where the number is positive. Three names are read by others: `rows`, the share of the rows, from the first
    on, that iterations draw from; `evaluate`, where it is positive the role is evaluated; `stop`, where it is
    positive the iteration is the run's last.

    A call that leads to the deciding one reads what the iteration before has decided; any other waits for this
    iteration's.

    name       by which calls and journals name it
    function   "module:function"
    first      `before` of the first time
    constants  the function's further arguments
    each_part  made after each part of the call, about the next part, and anew in each iteration. Otherwise made when
               the call has ended, and `before` is its value in the iteration before
    """

    name: str
    function: str
    first: float = 0.0
    constants: dict[str, float] = Field(default_factory=dict)
    each_part: bool = False


ROWS, EVALUATE, STOP = "rows", "evaluate", "stop"
"""The names of decisions that others than calls read."""


class ModelFunctionCall(Frozen):
    """One node of the dataflow graph: what a role's model computes once per iteration.

    n_seqs      sequences that the call processes per iteration
    chunks      parts into which it is cut: each is a node of the plan, so that other calls may begin with the first
                one. All parts run on the call's one placement, one after the other
    decides     what the controller decides by its metrics
    when        name of the decision by which it runs; "": it always runs. Where it does not, its samples have 0 rows
                under its keys, and a train_step leaves the weights as they are
    rounds      of a train_step whose samples come in rounds, one part each: the number of rounds. It gets the samples
                of all, and learns from `n_seqs` of them at most
    group_size  consecutive sequences that stay together, on one dp rank and in one mini-batch: samples of a prompt
    remap       {key in the sample store: its name in the call's function}, where the two differ
    lead        iterations by which it runs ahead: in iteration t it works on the samples of iteration t + lead
                (docs/adr/0017-staleness-is-a-lag.md)
    segment_tokens  of a generate call: it draws so many tokens of each sequence, again and again, until a batch has
                ended. The others continue in the next iteration (docs/adr/0020-segments.md); None: each sequence
                is drawn to its end
    runs_model  False where the call runs only Python rewards, on the heads of the role's mesh
    """

    name: str
    role: str
    kind: CallKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    n_seqs: int = Field(gt=0)
    group_size: int = Field(default=1, gt=0)
    mini_batches: int = Field(default=1, gt=0)
    chunks: int = Field(default=1, gt=0)
    decides: tuple[Decision, ...] = ()
    when: str = ""
    rounds: int = Field(default=1, gt=0)
    remap: dict[str, str] = Field(default_factory=dict)
    lead: int = Field(default=0, ge=0)
    segment_tokens: int | None = Field(default=None, gt=0)
    runs_model: bool = True

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, saved: Any) -> object:
        """A call in a plan of before may have an empty list of keys of earlier parts."""
        if isinstance(saved, dict) and cast(dict[str, Any], saved).get("earlier") == []:
            return {key: value for key, value in cast(dict[str, Any], saved).items() if key != "earlier"}
        return cast(object, saved)

    @property
    def n_groups(self) -> int:
        return self.n_seqs // self.group_size

    @property
    def n_places(self) -> int:
        """Sequences that the call draws at most at a time; in segments, those of two batches."""
        return self.n_seqs if self.segment_tokens is None else 2 * self.n_seqs

    @property
    def outlasts(self) -> bool:
        """Whether it makes something for later iterations, which commits have."""
        return bool(self.lead or self.segment_tokens)

    @property
    def left(self) -> dict[str, str]:
        """In segments: key of what it leaves in its places for the next iteration -> the key's name in a commit."""
        keys = (*self.outputs, ENDED, GROUPS_BEGUN) if self.segment_tokens else ()
        return {key: f"left_{key}" for key in keys}

    @property
    def blocks(self) -> int:
        """Blocks of consecutive groups that are dealt to dp ranks one by one: mini-batches, or parts."""
        return self.mini_batches * self.chunks

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of its nodes in a plan: its own name, or one name for each part."""
        return (self.name,) if self.chunks == 1 else tuple(f"{self.name}_{k}" for k in range(self.chunks))

    @property
    def token_key(self) -> str:
        """The input whose sequence lengths `balance="tokens"` balances: the first one named `..._ids`."""
        return next(key for key in self.inputs if key.endswith("_ids"))


class CallAssignment(Frozen):
    """Where, how and when one call runs: the planner's decision for it.

    micro_batches  micro-batches, balanced by tokens, into which a dp rank's share of one (mini-)batch is split
    balance        what dp ranks get equal shares of: groups of samples ("count") or tokens
    offload        the parameters stay in host memory from the role's last call on this placement to its first one in
                   the next iteration. Of a train_step also the optimizer's state is kept there, and passes through
                   the devices in every step; the parameters only if another call may run there while none needs them
    order          the call's position in an iteration; None where the planner may choose it
    """

    placement: Placement
    micro_batches: int = Field(default=1, gt=0)
    balance: Literal["count", "tokens"] = "count"
    offload: bool = False
    order: int | None = None


class Held(NamedTuple):
    """A role's parameters on the devices of a placement. A copy has the version of its last reallocation."""

    role: str
    placement: Placement
    is_copy: bool = False


class _Node(Frozen):
    """Common to all nodes: a unique name, the nodes that must have finished, and what the node does, from which
    versions, memory and files follow.

    after           predecessors in the same iteration
    after_previous  predecessors in the iteration before
    lead            in iteration t the node serves the samples of iteration t + lead
    """

    name: str
    after: tuple[str, ...] = ()
    after_previous: tuple[str, ...] = ()
    lead: int = Field(default=0, ge=0)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Where the node runs: one placement, or the source and the destination of what it moves."""
        return ()

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that take part, in ascending order."""
        return tuple(sorted({device for placement in self.placements for device in placement.devices}))

    @property
    def reads(self) -> Held | None:
        """The parameters that the node reads: a rank asserts their version."""
        return None

    @property
    def changes(self) -> str | None:
        """The role whose parameters have another version after the node."""
        return None

    @property
    def brings(self) -> Held | None:
        """The parameters that are on devices from this node on."""
        return None

    @property
    def frees(self) -> Held | None:
        """The parameters that are no longer on devices after this node."""
        return None

    @property
    def writers(self) -> tuple[int, ...]:
        """The devices that write a part of a commit."""
        return ()

    @property
    def decided_by(self) -> tuple[str, ...]:
        """The names of the decisions that the node reads, where the plan has them."""
        return ()


class _OnePlace(_Node):
    """A node on one placement."""

    placement: Placement

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (self.placement,)


class _Saves(_OnePlace):
    """A node that saves where the iteration ends in a snapshot, as one does that turns out to be the run's last."""

    @property
    def decided_by(self) -> tuple[str, ...]:
        return (STOP,)


class _OfRole(_OnePlace):
    """A node about a role's parameters on one placement."""

    role: str


class _BetweenPlaces(_Node):
    """A node that brings a role's parameters from one placement to another."""

    role: str
    source: Placement
    destination: Placement

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.source, self.destination


class FetchNode(_OnePlace):
    """The heads of the source call read their shard of the iteration's rows and store the dataset keys.

    Every head gets the same number of rows; they cannot be balanced by tokens, because no head knows the lengths of
    rows that it has not read.
    """

    kind: Literal["fetch"] = "fetch"
    call: str
    keys: tuple[str, ...]
    mini_batches: int = 1
    group_size: int = 1

    @property
    def decided_by(self) -> tuple[str, ...]:
        return (ROWS,)

    @property
    def side(self) -> "DataSide":
        """How the rows are distributed over the heads."""
        return DataSide(placement=self.placement, mini_batches=self.mini_batches, group_size=self.group_size)


class CallNode(_Node):
    """A model function call, or a part of one, on its placement.

    `trains` is True when the call increments the role's version.
    """

    kind: Literal["call"] = "call"
    call: ModelFunctionCall
    assignment: CallAssignment
    part: Part = WHOLE

    @property
    def placement(self) -> Placement:
        return self.assignment.placement

    @property
    def side(self) -> "DataSide":
        """How the node's samples are distributed over its heads."""
        return side_of(self.call, self.assignment, self.part)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (self.placement,)

    @property
    def decided_by(self) -> tuple[str, ...]:
        return (ROWS, *([self.call.when] if self.call.when else []))

    @property
    def trains(self) -> bool:
        return self.call.kind == "train_step"

    @property
    def reads(self) -> Held | None:
        return Held(self.call.role, self.placement)

    @property
    def changes(self) -> str | None:
        return self.call.role if self.trains else None


class DataSide(Frozen):
    """One side of a redistribution: how samples are distributed over the heads of a placement.

    mini_batches  blocks of consecutive groups that are dealt one by one: mini-batches, or parts of a call
    """

    placement: Placement
    balance: Literal["count", "tokens"] = "count"
    mini_batches: int = 1
    group_size: int = 1


def side_of(call: ModelFunctionCall, assignment: CallAssignment, part: Part = WHOLE) -> DataSide:
    """How a call's samples, or those of a part of it, are dealt."""
    return DataSide(
        placement=assignment.placement,
        balance=assignment.balance,
        mini_batches=call.blocks if part == WHOLE else call.mini_batches,
        group_size=call.group_size,
    )


class TransferNode(_Node):
    """Redistribution of some keys from the heads of one placement to the heads of a consumer.

    consumer  the call that takes them
    part      whose samples move
    """

    kind: Literal["transfer"] = "transfer"
    consumer: str
    source: DataSide
    destination: DataSide
    keys: tuple[str, ...]
    part: Part = WHOLE

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.source.placement, self.destination.placement


class ReallocateNode(_BetweenPlaces):
    """Builds a read-only copy of a role's parameters on `destination`, from the training placement."""

    kind: Literal["reallocate"] = "reallocate"

    @property
    def reads(self) -> Held | None:
        return Held(self.role, self.source)

    @property
    def brings(self) -> Held | None:
        return Held(self.role, self.destination, is_copy=True)


class ReleaseNode(_OfRole):
    """Frees the read-only copy of a role on a placement."""

    kind: Literal["release"] = "release"

    @property
    def reads(self) -> Held | None:
        return Held(self.role, self.placement)

    @property
    def frees(self) -> Held | None:
        return Held(self.role, self.placement, is_copy=True)


class OnloadNode(_OfRole):
    """Starts copying an offloaded role's parameters from host memory to the devices of a placement.

    The node ends at once; the first reader of the parameters waits for the copy. The copies on one device run one
    after another, in the order of their nodes.
    """

    kind: Literal["onload"] = "onload"

    @property
    def brings(self) -> Held | None:
        return Held(self.role, self.placement)


class OffloadNode(_OfRole):
    """Frees a role's parameters on the devices of a placement. Host memory keeps them; those of a trained role are
    copied back there first, and the node ends after the copy."""

    kind: Literal["offload"] = "offload"

    @property
    def frees(self) -> Held | None:
        return Held(self.role, self.placement)


class SaveNode(_OfRole, _Saves):
    """Copies the role's parameter slices, optimizer and state, and writes the copy in the background."""

    kind: Literal["save"] = "save"

    @property
    def reads(self) -> Held | None:
        return Held(self.role, self.placement)

    @property
    def writers(self) -> tuple[int, ...]:
        return self.devices


class SaveSamplesNode(_Saves):
    """Copies what a call has made for the iterations to come, and writes the copy in the background: samples that are
    drawn ahead, and those that have not ended.

    call       the call that runs ahead, or generates in segments; its heads have the samples
    placement  of the call
    """

    kind: Literal["save_samples"] = "save_samples"
    call: str

    @property
    def role(self) -> str:
        """The name under which a commit has the samples."""
        return self.call

    @property
    def writers(self) -> tuple[int, ...]:
        return tuple(sorted(self.placement.heads))


class SyncNode(_BetweenPlaces):
    """Brings a trained role's parameters onto the placement of a role that follows it, and blends them into that
    role's: a reallocation with a blend.

    The node does so in the iterations that the configuration names, and nothing in the others.

    role    the role that follows; `destination` is where its model runs
    leader  the trained role; `source` is its training placement
    """

    kind: Literal["sync"] = "sync"
    leader: str

    @property
    def reads(self) -> Held | None:
        return Held(self.role, self.destination)

    @property
    def changes(self) -> str | None:
        return self.role


class EvaluateNode(_OfRole):
    """Answers held-out rows with the parameters that the train_step has just left, and scores the answers.

    The node does so in the iterations that the configuration's `evaluation` names, and nothing in the others.

    at_start  the node stands at the beginning of an iteration, and does so in the first one alone
    """

    kind: Literal["evaluate"] = "evaluate"
    at_start: bool = False

    @property
    def decided_by(self) -> tuple[str, ...]:
        return () if self.at_start else (EVALUATE,)

    @property
    def reads(self) -> Held | None:
        return Held(self.role, self.placement)


PlanNode = Annotated[
    FetchNode
    | CallNode
    | TransferNode
    | ReallocateNode
    | ReleaseNode
    | OnloadNode
    | OffloadNode
    | SaveNode
    | SaveSamplesNode
    | SyncNode
    | EvaluateNode,
    Field(discriminator="kind"),
]


NODE_KINDS: dict[str, Callable[..., PlanNode]] = {
    node.model_fields["kind"].default: node for node in get_args(get_args(PlanNode)[0])
}
"""Kind -> its class."""


class RolePlacements(Frozen):
    """Where a role's parameters live.

    The first placement of a trained role is its training placement, which owns parameters, gradients and optimizer.
    A role that is not trained is resident on every placement. On those that are also in `offloaded`, the devices hold
    its parameters only between an onload and the next offload. A training placement is in `offloaded` where host
    memory keeps the optimizer's state, and the parameters too if the plan has an onload (`ExecutionPlan.onloaded`).

    follows  the trained role that this one is blended with, on its first placement; "": it is trained, or frozen
    """

    trained: bool
    placements: tuple[Placement, ...]
    offloaded: tuple[Placement, ...] = ()
    follows: str = ""

    @property
    def changes(self) -> bool:
        """Whether its parameters change during a run: they have versions and are committed."""
        return self.trained or bool(self.follows)


class ExecutionPlan(Frozen):
    """The dataflow graph with placements and inserted nodes, as one serialisable object.

    algorithm         the graph's name, e.g. "ppo"
    n_devices         devices 0 .. n_devices - 1 take part
    devices_per_host  each host has this many consecutive devices
    n_seqs            sequences fetched per iteration
    nodes             in the total order that docs/explanation/protocol.md defines
    """

    algorithm: str
    n_devices: int = Field(gt=0)
    devices_per_host: int = Field(gt=0)
    n_seqs: int = Field(gt=0)
    roles: dict[str, RolePlacements]
    nodes: tuple[PlanNode, ...]

    @property
    def lead(self) -> int:
        """Iterations by which samples are drawn ahead of their training."""
        return max((node.lead for node in self.nodes), default=0)

    @property
    def group_size(self) -> int:
        """Consecutive samples that are made from one row."""
        return next((fetch.group_size for fetch in self.fetches.values()), 1)

    @property
    def fetches(self) -> dict[str, FetchNode]:
        """Call -> the node that reads the rows for it."""
        return {node.call: node for node in self.nodes if isinstance(node, FetchNode)}

    def node(self, name: str) -> PlanNode:
        """The node of that name. Raises KeyError."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def onloaded(self) -> frozenset[tuple[str, Placement]]:
        """(role, placement) where the devices hold the role's parameters only from an onload to the next offload."""
        return frozenset((node.role, node.placement) for node in self.nodes if isinstance(node, OnloadNode))

    @property
    def calls(self) -> dict[str, list[CallNode]]:
        """Call -> its nodes: one, or one for each part."""
        calls: dict[str, list[CallNode]] = {}
        for node in self.nodes:
            if isinstance(node, CallNode):
                calls.setdefault(node.call.name, []).append(node)
        return calls

    def on(self, device: int) -> tuple[PlanNode, ...]:
        """The nodes that involve a device, in plan order: that rank's work."""
        return tuple(node for node in self.nodes if device in node.devices)


class NodeKey(NamedTuple):
    """Identifies one execution of one plan node. Every request that changes state carries it
    (docs/explanation/protocol.md)."""

    run: str
    attempt: int
    generation: int
    iteration: int
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """A request to one rank: run this plan node of this iteration.

    number        position in the rank's order: 0, 1, 2, ... without gaps, per rank and generation
    first_sample  global id of the iteration's first sample (the data cursor before this iteration's fetch)
    versions      role -> parameter version that the engine asserts
    deadline_s    seconds, counted from when the node's last rank has entered it
    in_snapshot   the iteration ends in a snapshot, so its save nodes save
    decided       name of each decision that the node reads -> its value

    A dataclass, like `NodeResult`, and not a pydantic model: there is one for each rank and node of an iteration, and
    a pydantic model costs the garbage collector three objects.
    """

    __pydantic_config__ = STRICT

    key: NodeKey
    number: int
    first_sample: int
    versions: dict[str, int]
    deadline_s: float
    in_snapshot: bool = True
    decided: dict[str, float] = dataclasses.field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class NodeResult:
    """A rank's answer to a request: metadata only.

    started_s, ended_s  time.time() of the rank
    metrics             global values, equal on all ranks of the mesh
    bytes_sent          bytes that this rank sent to others for a transfer or reallocation
    flops               model FLOPs of this rank's replica for a call; reported by the replica's head, 0 elsewhere
    peak_bytes          this rank's peak memory while the node ran
    """

    key: NodeKey
    rank: int
    started_s: float
    ended_s: float
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    versions: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    bytes_sent: int = 0
    flops: float = 0.0
    peak_bytes: int = 0
    digest: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


class NodeFailure(Frozen):
    """An error on one rank: what happened, where, and the traceback for the log.

    lasting  a retry would fail again, and the rank itself is sound: a `UserCodeError` was raised, or the disk is full
    """

    key: NodeKey
    rank: int
    error: str
    traceback: str = ""
    lasting: bool = False
