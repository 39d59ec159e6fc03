"""Plans by rule: Megatron's advice (tensor parallelism inside a host, pipeline stages across hosts, data
parallelism
for the rest; arXiv:2104.04473), and the symmetric plan in which all calls are alike."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.plan.build import PlanError
from planner.plan.graph import DataflowGraph
from planner.plan.mesh import Cluster, meshes_from_start
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.spec import CallAssignment, ModelFunctionCall


@dataclass(frozen=True, slots=True)
class Limits:
    """What a role's model demands of a strategy.

    replica_devices  the fewest devices whose memory holds one whole copy with all that belongs to it
    max_tp, max_pp   the model's query heads and layers; None: no limit
    """

    replica_devices: int = 1
    max_tp: int | None = None
    max_pp: int | None = None

    def allow(self, strategy: ParallelStrategy) -> bool:
        """Whether a strategy keeps to the limits."""
        return (
            strategy.tp * strategy.pp >= self.replica_devices
            and (self.max_tp is None or strategy.tp <= self.max_tp)
            and (self.max_pp is None or strategy.pp <= self.max_pp)
        )


NO_LIMITS = Limits()


def heuristic(
    graph: DataflowGraph, cluster: Cluster, limits: Mapping[str, Limits] | None = None
) -> dict[str, CallAssignment]:
    """Every call on the whole cluster, with the smallest replica that the limits of its role allow.

    limits  role -> Limits
    Raises PlanError when no strategy keeps to the limits.
    """
    limits = limits or {}
    return {call.name: _assign(call, cluster, [limits.get(call.role, NO_LIMITS)]) for call in graph.calls}


def symmetric(
    graph: DataflowGraph, cluster: Cluster, limits: Mapping[str, Limits] | None = None
) -> dict[str, CallAssignment]:
    """All calls on the whole cluster under one strategy, which suits the most demanding role.

    Raises PlanError when no strategy keeps to all limits.
    """
    widest = max(graph.calls, key=lambda call: call.mini_batches)
    assignment = _assign(widest, cluster, list((limits or {}).values()))
    return {call.name: assignment for call in graph.calls}


def _assign(call: ModelFunctionCall, cluster: Cluster, limits: list[Limits]) -> CallAssignment:
    """The largest mesh from the first device on that some strategy fits, and that strategy."""
    most_dp = call.n_seqs // call.mini_batches
    for mesh in meshes_from_start(cluster):
        for strategy in _strategies(mesh.size, cluster.devices_per_host):
            if strategy.dp <= most_dp and all(limit.allow(strategy) for limit in limits):
                share = call.n_seqs // (call.mini_batches * strategy.dp)
                micro_batches = 1 if strategy.pp == 1 else max(1, min(2 * strategy.pp, share))
                return CallAssignment(
                    placement=Placement(mesh.devices, strategy), micro_batches=micro_batches
                )
    raise PlanError(
        f"Call {call.name!r}: no strategy on a cluster of {cluster} suits {', '.join(map(str, limits))} "
        f"and {call.n_seqs} sequences in {call.mini_batches} mini-batches. Enlarge the cluster or the batch."
    )


def _strategies(size: int, devices_per_host: int) -> Iterator[ParallelStrategy]:
    """Strategies on a mesh, smallest replica first: tp grows to the host, then pp over hosts."""
    host = min(size, devices_per_host)
    for tp in range(1, host + 1):
        if host % tp == 0:
            yield ParallelStrategy(size // tp, tp, 1)
    hosts = size // host
    for pp in range(2, hosts + 1):
        if hosts % pp == 0:
            yield ParallelStrategy(hosts // pp, host, pp)
