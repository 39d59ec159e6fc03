"""The problem of a plan search: dataflow graph, cluster with its devices, models of the roles; and a deadline."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import NamedTuple

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.pools import Pool
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, ModelFunctionCall
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError


def never() -> bool:
    """The default `called_off` of a Deadline: the search is never called off."""
    return False


class Deadline(NamedTuple):
    """A search ends at a given time, or earlier when it is called off.

    at_s        the time, in seconds of time.monotonic()
    called_off  returns True once the best plan found so far is to be used
    """

    at_s: float
    called_off: Callable[[], bool] = never

    def is_past(self) -> bool:
        """Whether the search must end now."""
        return self.called_off() or monotonic() > self.at_s


NO_DEADLINE = Deadline(inf)
"""A deadline that never passes."""


class ProblemError(ConfigError):
    """The search has no answer; the message gives the reason in one sentence."""


class OptionsTakeTooLongError(ProblemError):
    """The options of all calls could not be priced before a deadline."""


@dataclass(frozen=True)
class Problem:
    """The calls to place and their cost model. Equal problems have equal results.

    graph     the calls of an iteration
    model     what calls and transfers cost: cluster, devices, the roles' models, workload
    max_tp    the largest tensor-parallel degree of a plan that is searched or made by rule; one by hand may have a
              larger one. Default: the number of devices of a host
    pools     call -> the only devices that it may have
    warnings  a sentence for each file of kept figures that was put aside, and for a GPU whose figures are estimates
    Raises ProblemError when a role has no model or max_tp is not a positive whole number.
    """

    graph: DataflowGraph
    model: CostModel
    max_tp: int | None = None
    warnings: tuple[str, ...] = ()
    pools: Mapping[str, Pool] = field(default_factory=dict[str, Pool])

    def __post_init__(self) -> None:
        missing = [role for role in self.graph.roles if role not in self.model.models]
        if missing:
            raise ProblemError(
                f"No model is given for {', '.join(missing)}; {self.graph.name} has the roles "
                f"{', '.join(self.graph.roles)}."
            )
        if self.max_tp is not None and (isinstance(self.max_tp, bool) or self.max_tp < 1):
            raise ProblemError(f"max_tp={self.max_tp!r} is not a positive whole number.")

    def frozen_weights(self, role: str) -> Hashable:
        """The key of a role's frozen weights: roles with equal keys share them where placements are equal."""
        return self.model.frozen_weights(role, self.graph.changes(role))

    def allows(self, call: str, devices: Collection[int]) -> bool:
        """Whether a call may have these devices: all devices, unless it is in a pool."""
        return call not in self.pools or self.pools[call].devices.issuperset(devices)

    def draws(self, call: ModelFunctionCall, placement: Placement) -> bool:
        """Whether what draws a call's responses can be divided as a placement says."""
        other = self.model.workload.of_role(call.role).other
        if call.kind != "generate" or other is None:
            return True
        ranks = placement.strategy.tp * placement.strategy.pp
        divides = other.divides(self.model.models[call.role].shape, ranks)
        return divides and other.draws_on(placement, self.cluster.devices_per_host)

    def refuse(self, plan: ExecutionPlan) -> None:
        """Raises ProblemError where a call of a plan has a device outside its pool, or another engine cannot draw
        as a generation is placed."""
        for name, (node, *_) in plan.calls.items():
            if not self.allows(name, node.devices):
                outside = min(set(node.devices) - self.pools[name].devices)
                raise ProblemError(
                    f"Call {name!r} is on device {outside}, which is not in its {self.pools[name]}. Search for a "
                    "plan (plan: auto), or place it there by hand."
                )
            if not self.draws(node.call, node.placement):
                s, shape = node.placement.strategy, self.model.models[node.call.role].shape
                other, heads = (
                    self.model.workload.other,
                    f"{shape.query_heads} heads, {shape.kv_heads} of keys",
                )
                does, has = "the weights that a server loads are written by", ""
                if other is not None and other.kv_bytes is not None:
                    does = "vLLM divides the model over"
                    has = f", and it has {heads} and values, and {shape.intermediate} columns"
                raise ProblemError(
                    f"Call {name!r}: {does} the tp x pp = {s.tp * s.pp} devices of a replica, which must be of one "
                    f"host of {self.cluster.devices_per_host}{has}. Choose a plan with a larger dp."
                )

    @property
    def cluster(self) -> Cluster:
        return self.model.cluster

    @property
    def tp_limit(self) -> int:
        """The largest tensor-parallel degree."""
        return self.max_tp or self.cluster.devices_per_host
