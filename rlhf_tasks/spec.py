"""The words that all layers share: model function calls, plan nodes, the plan, requests and results.

Torch-free, Prefect-free, Dask-free. A plan is data: whoever reads it needs no planner.
"""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass

from rlhf_tasks.parallel.layout.topology import Placement

CallKind = Literal["generate", "inference", "train_step"]


STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")
"""An unknown field is an error. In JSON a number that is not finite stands as NaN or Infinity: the metrics of a
skipped step have some, and pydantic's null could not be read back."""


class Frozen(BaseModel):
    """Base of all specifications: immutable and STRICT."""

    model_config = STRICT | ConfigDict(frozen=True)


class ModelFunctionCall(Frozen):
    """One node of the dataflow graph: what a role's model computes once per iteration.

    n_seqs is the number of sequences the call processes per iteration. remap renames keys between the sample
    store and the call's function: {name in the store: name in the function}. runs_model is False where only
    Python rewards run, on the heads of the role's mesh.
    """

    name: str
    role: str
    kind: CallKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    n_seqs: int = Field(gt=0)
    mini_batches: int = Field(default=1, gt=0)
    remap: dict[str, str] = Field(default_factory=dict)
    runs_model: bool = True

    @property
    def token_key(self) -> str:
        """The key whose lengths `balance="tokens"` deals samples by: the sequences that the call reads."""
        return next(key for key in self.inputs if key.endswith("_ids"))


class CallAssignment(Frozen):
    """Where, how and when one call runs: the planner's decision for it.

    micro_batches is the number of micro-batches that a dp rank's share of one (mini-)batch is cut into,
    balanced by tokens; balance says how samples are dealt to dp ranks; offload, for frozen roles, that the
    parameters lie in host memory from the role's last call on this placement to its next first one; order is the
    call's place among those of an iteration, None where the planner may choose it.
    """

    placement: Placement
    micro_batches: int = Field(default=1, gt=0)
    balance: Literal["count", "tokens"] = "count"
    offload: bool = False
    order: int | None = None


class _Node(Frozen):
    """Common to all nodes: a unique name and the names of the nodes that must have finished.

    after           predecessors in the same iteration
    after_previous  predecessors in the iteration before
    """

    name: str
    after: tuple[str, ...] = ()
    after_previous: tuple[str, ...] = ()


class FetchNode(_Node):
    """The heads of the source call read their shard of the iteration's rows and store the dataset keys.

    Rows are dealt by count: no head knows the lengths of rows that it has not read.
    """

    kind: Literal["fetch"] = "fetch"
    call: str
    placement: Placement
    keys: tuple[str, ...]
    mini_batches: int = 1

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self.placement.devices))

    @property
    def side(self) -> "DataSide":
        """How the rows lie."""
        return DataSide(placement=self.placement, mini_batches=self.mini_batches)


class CallNode(_Node):
    """A model function call on its placement. `trains` is True when it advances the role's version."""

    kind: Literal["call"] = "call"
    call: ModelFunctionCall
    assignment: CallAssignment

    @property
    def placement(self) -> Placement:
        return self.assignment.placement

    @property
    def trains(self) -> bool:
        return self.call.kind == "train_step"

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self.placement.devices))


class DataSide(Frozen):
    """One side of a redistribution: how samples lie on the heads of a placement."""

    placement: Placement
    balance: Literal["count", "tokens"] = "count"
    mini_batches: int = 1


class TransferNode(_Node):
    """Redistribution of some keys from the heads of one placement to the heads of a consumer call."""

    kind: Literal["transfer"] = "transfer"
    consumer: str
    source: DataSide
    destination: DataSide
    keys: tuple[str, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.placement.devices, *self.destination.placement.devices}))


class ReallocateNode(_Node):
    """A read-only copy of a role's parameters is built on `destination` from the training placement."""

    kind: Literal["reallocate"] = "reallocate"
    role: str
    source: Placement
    destination: Placement

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.devices, *self.destination.devices}))


class ReleaseNode(_Node):
    """The read-only copy of a role on a placement is freed."""

    kind: Literal["release"] = "release"
    role: str
    placement: Placement

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self.placement.devices))


class OnloadNode(_Node):
    """The copy of an offloaded role's parameters from host memory to the devices of a placement is started.

    The node ends at once; whoever reads the parameters waits for the copy. On each device copies follow one another,
    in the order of their nodes.
    """

    kind: Literal["onload"] = "onload"
    role: str
    placement: Placement

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self.placement.devices))


class OffloadNode(_Node):
    """The parameters of a frozen role are freed on the devices of a placement: host memory has them too."""

    kind: Literal["offload"] = "offload"
    role: str
    placement: Placement

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self.placement.devices))


class SaveNode(_Node):
    """The role's slices, optimizer and state are copied aside and written in the background."""

    kind: Literal["save"] = "save"
    role: str
    placement: Placement

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted(self.placement.devices))


PlanNode = Annotated[
    FetchNode | CallNode | TransferNode | ReallocateNode | ReleaseNode | OnloadNode | OffloadNode | SaveNode,
    Field(discriminator="kind"),
]


class RolePlacements(Frozen):
    """Where a role's parameters live. The first placement of a trained role is its training placement and
    owns parameters, gradients and optimizer; a frozen role is resident on every placement listed, but for those
    in `offloaded`, where its parameters are from an onload to the next offload only."""

    trained: bool
    placements: tuple[Placement, ...]
    offloaded: tuple[Placement, ...] = ()


class ExecutionPlan(Frozen):
    """The augmented graph as one serialisable object. `nodes` stands in the total order of docs/protocol.md.

    algorithm  the graph's name, e.g. "ppo"
    n_devices  devices 0 .. n_devices - 1 take part; devices_per_host says how they fall on hosts
    n_seqs     sequences fetched per iteration
    """

    algorithm: str
    n_devices: int = Field(gt=0)
    devices_per_host: int = Field(gt=0)
    n_seqs: int = Field(gt=0)
    roles: dict[str, RolePlacements]
    nodes: tuple[PlanNode, ...]

    def node(self, name: str) -> PlanNode:
        """The node of that name. Raises KeyError."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def on(self, device: int) -> tuple[PlanNode, ...]:
        """The subsequence of nodes whose meshes hold a device: that rank's work, in its order."""
        return tuple(node for node in self.nodes if device in node.devices)


class NodeKey(NamedTuple):
    """Names one execution of one plan node: every mutating request carries it (docs/protocol.md)."""

    run: str
    attempt: int
    generation: int
    iteration: int
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """What one rank is asked to run: a plan node of one iteration, at a dense place in the rank's order.

    number        0, 1, 2, ... on each rank in each generation
    first_sample  global id of the iteration's first sample (the data cursor before this iteration's fetch)
    versions      role -> parameter version that must be found, asserted by the engine
    deadline_s    seconds from the moment the node's last rank has entered it
    in_snapshot   the iteration ends in a snapshot: its save nodes save

    Like a result it is no pydantic model, but a dataclass: there is one for each rank and node of an iteration, and
    a model is three objects for the garbage collector to visit.
    """

    __pydantic_config__ = STRICT

    key: NodeKey
    number: int
    first_sample: int
    versions: dict[str, int]
    deadline_s: float
    in_snapshot: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class NodeResult:
    """What a rank answers: metadata only.

    started_s, ended_s  time.time() of the rank
    metrics             global values, equal on all ranks of the mesh
    bytes_sent          bytes this rank sent to others for a transfer or reallocation
    flops               work of the model that this rank's replica did for a call; on its head, else 0
    peak_bytes          the most memory that this rank held while the node ran
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

    lasting  the rank is sound, and repeating would fail again: a `UserCodeError` was raised, or the disk is full
    """

    key: NodeKey
    rank: int
    error: str
    traceback: str = ""
    lasting: bool = False
