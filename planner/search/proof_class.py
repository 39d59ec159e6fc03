"""The class of plans for which bounds and proofs hold, in words."""

from planner.plan.call_order import MOST_ORDERS, has_more_orders
from planner.plan.graph import DataflowGraph
from planner.plan.mesh import Cluster
from planner.pricing.options import ALL_CUTS, cut_points, few_hosts
from planner.pricing.problem import Problem


def proof_class(problem: Problem) -> str:
    """The plans for which bounds and proofs hold, in one sentence."""
    mixed = "a mesh of several device classes priced by its slowest, "
    return (
        f"Plans on {problem.cluster} whose calls have {_meshes(problem.cluster)}, strategies "
        f"(tp up to {problem.tp_limit}) and micro-batch counts as planner/pricing/options.py lists them, "
        "contiguous stages, "
        f"{mixed if len(problem.model.classes.profiles) > 1 else ''}calls on a device in {_orders(problem.graph)}, "
        "the same in every iteration, inserted nodes placed by rule beside them, "
        f"{_offloads(problem)}, and at most two iterations in flight; with times and memory as the "
        "cost model gives them."
    )


def _offloads(problem: Problem) -> str:
    """What may be offloaded, in words."""
    if any(device.is_on_host for device in problem.model.classes.profiles):
        return "all models resident"
    return "frozen models with one call and optimizers resident or offloaded, others resident"


def _meshes(cluster: Cluster) -> str:
    """The meshes of the class, in words (planner/pricing/options.py `candidate_meshes`)."""
    if cluster.n_hosts <= ALL_CUTS:
        return "all meshes"
    cuts = cut_points(cluster.n_hosts)
    step = cuts[1]
    even = all(cut == i * step for i, cut in enumerate(cuts))
    ends = f"multiples of {step} hosts" if even else f"hosts {', '.join(map(str, cuts))}"
    few = [str(n) for n in few_hosts(cluster.n_hosts)]
    small = f"the first {' or '.join(few)} hosts or the same number after them, " if few else ""
    return f"meshes that begin and end at {ends}, {small}the first host and its aligned parts"


def _orders(graph: DataflowGraph) -> str:
    """The orders of calls of the class, in words (`call_orders`)."""
    which = f"of the first {MOST_ORDERS} orders" if has_more_orders(graph) else "order"
    parts = f", all {graph.chunks} parts of a call under its one option" if graph.chunks > 1 else ""
    return f"one {which} of the graph{parts}"
