"""Plans on ranks, in plan order: what each rank does.

The ranks use the real executor; only the runtime around it is replaced.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from bench.harness import Store
from prefect_rlhf.rlhf_tasks.profiling.measure import ProfileExecutor
from prefect_rlhf.rlhf_tasks.profiling.measurements import Measurements, ProfileSpec
from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import NodeExecutor
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from prefect_rlhf.rlhf_tasks.system.rank_process import give_back
from tests.rlhf_tasks.settings import DEADLINES

GROUP_TIMEOUT_S = 600.0
NEVER = 10**9  # iterations


class NodeTime(NamedTuple):
    """One node of one iteration on one rank; times by the host's monotonic clock."""

    iteration: int
    node: str
    started_s: float
    ended_s: float


class PlanRun(NamedTuple):
    """One rank's figures of a plan: the times of its nodes, and its peak memory."""

    times: Sequence[NodeTime]
    peak_bytes: int


def run_plan(
    rank: int, store: Store, plan: ExecutionPlan, config: Mapping[str, Any], folder: str, iterations: int
) -> PlanRun:
    """Run a plan's iterations in the order in which the runtime delivers them: plan order, at most two in flight."""
    host, port, prefix = store
    executor = NodeExecutor(rank, lambda part: None)
    give_back()
    executor.load(generation_spec(rank, store, plan, config, folder))
    ended = dist.PrefixStore(f"{prefix}-ended", dist.TCPStore(host, port, is_master=False))
    sequencer, times, peak = Sequencer(plan, prefix, 0, DEADLINES), [], 0
    for iteration in range(iterations):
        if iteration >= 2:
            ended.wait([f"{iteration - 2}/{other}" for other in range(plan.n_devices)])
        for request in sequencer.requests(iteration, in_snapshot=False).get(rank, ()):
            started_s = time.monotonic()
            result = executor.execute(request, plan.node(request.key.node))
            peak = max(peak, result.peak_bytes)
            times.append(NodeTime(iteration, request.key.node, started_s, time.monotonic()))
        ended.set(f"{iteration}/{rank}", "")
    executor.close()
    return PlanRun(times, peak)


def measure_pieces(
    rank: int, store: Store, plan: ExecutionPlan, spec: ProfileSpec, folder: str
) -> tuple[list[Measurements], float]:
    """Run a profile's plan (rlhf_tasks/profiling/measurements.py).

    Returns this rank's measurements, node by node, and the seconds that a node without work takes.
    """
    executor = ProfileExecutor(rank)
    executor.load(generation_spec(rank, store, plan, spec.model_dump(mode="json"), folder))
    measured = [executor.measure(spec.pieces[node.name]) for node in plan.nodes]
    idle = [piece for piece in spec.pieces.values() if piece.kind == "idle"]
    started_s = time.monotonic()
    for piece in idle:
        executor.measure(piece)
    dispatch_s = (time.monotonic() - started_s) / len(idle)
    executor.close()
    return measured, dispatch_s


def generation_spec(
    rank: int, store: Store, plan: ExecutionPlan, config: Mapping[str, Any], folder: str
) -> GenerationSpec:
    """The specification that a controller would send to a rank: of a new run whose save nodes never write."""
    host, port, prefix = store
    return GenerationSpec(
        run=prefix,
        attempt=0,
        generation=0,
        rank=rank,
        n_ranks=plan.n_devices,
        plan=plan,
        config=dict(config),
        run_folder=folder,
        restore_step=None,
        iterations=NEVER,
        store_host=host,
        store_port=port,
        store_prefix=prefix,
        timeout_s=GROUP_TIMEOUT_S,
    )
