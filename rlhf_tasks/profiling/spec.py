"""The work of a profile run: a run like any other, but the nodes of its plan measure. Torch-free."""

from typing import Literal

from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.profiling.measurements import Grid
from rlhf_tasks.protocol.messages import RunSpec
from rlhf_tasks.spec import CallAssignment, CallNode, ExecutionPlan, Frozen, ModelFunctionCall, RolePlacements
from rlhf_tasks.system.durable import ByteCount

IDLE_NODES = 8
"""Nodes without work at the plan's end: the gaps between them are the cost of dispatching a node."""


BUDGET_S = 150.0  # seconds of the works of all models under all tp degrees; few points may take longer


class ProfilePart(Frozen):
    """One node's work: a model under one tp degree, all exchanges, or nothing (to measure dispatch).

    budget_s  seconds after which it is measured no further
    """

    kind: Literal["model", "exchanges", "idle"]
    folder: str = ""
    tp: int = 1
    grid: Grid | None = None
    budget_s: float = BUDGET_S


class ProfileSpec(Frozen):
    """The configuration of a profile run's executor.

    dtype   of the parameters, as in run configurations
    pieces  node -> its work
    """

    dtype: str
    devices_per_host: int
    pieces: dict[str, ProfilePart]


def pieces_of(folders: dict[str, Grid], n_devices: int, devices_per_host: int) -> dict[str, ProfilePart]:
    """The pieces of a profile: every model folder under each tp degree that divides a host, then exchanges.

    The exchanges come last, so that the process's memory after them includes every library that it loads.
    """
    pieces = {}
    tps = [tp for tp in range(1, devices_per_host + 1) if devices_per_host % tp == 0 and n_devices % tp == 0]
    budget_s = BUDGET_S / max(1, len(folders) * len(tps))
    for number, (folder, grid) in enumerate(folders.items()):
        for tp in tps:
            name = f"model_{number}_tp{tp}"
            pieces[name] = ProfilePart(kind="model", folder=folder, tp=tp, grid=grid, budget_s=budget_s)
    pieces["exchanges"] = ProfilePart(kind="exchanges")
    return pieces | {f"idle_{number}": ProfilePart(kind="idle") for number in range(IDLE_NODES)}


def profile_plan(pieces: dict[str, ProfilePart], n_devices: int, devices_per_host: int) -> ExecutionPlan:
    """The plan of a profile run, of one iteration: the pieces one after the other, each on all devices."""
    placement = Placement(tuple(range(n_devices)), ParallelStrategy(dp=n_devices))
    names = list(pieces)
    nodes = tuple(
        CallNode(
            name=name,
            call=ModelFunctionCall(name=name, role="profiled", kind="inference", inputs=(), n_seqs=1),
            assignment=CallAssignment(placement=placement),
            after=(names[i - 1],) if i else (),
        )
        for i, name in enumerate(names)
    )
    return ExecutionPlan(
        algorithm="profile",
        n_devices=n_devices,
        devices_per_host=devices_per_host,
        n_seqs=1,
        roles={"profiled": RolePlacements(trained=False, placements=(placement,))},
        nodes=nodes,
    )


class NoSnapshots:
    """A profile run commits nothing."""

    def __init__(self, spec: RunSpec) -> None:
        self.moved = ByteCount()

    def latest(self) -> None:
        """None: there is never a commit to resume from."""

    def commit(self, order: object, results: object) -> None:
        """Write nothing: the figures are in the results of the nodes."""

    def prune(self) -> None:
        """Remove nothing."""
