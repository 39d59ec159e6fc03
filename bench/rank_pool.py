"""A pool of rank processes, each pinned to a core, for benchmarks without Prefect and Dask.

Starting a rank takes seconds of imports, so one pool serves all plans of a benchmark. The ranks use the real
executor; only the runtime around it is replaced, by a loop in plan order.
"""

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rlhf_tasks.controller.rank_link import Rendezvous
from rlhf_tasks.profiling.measurements import Measurements
from rlhf_tasks.profiling.spec import ProfileSpec
from rlhf_tasks.protocol.messages import GenerationSpec
from rlhf_tasks.spec import ExecutionPlan

Store = tuple[str, int, str]
"""Host, port and prefix of a rendezvous."""

GROUP_TIMEOUT_S = 600.0
NEVER = 10**9  # iterations


class RankPool:
    """Each rank has one thread. Where there are enough cores, rank r runs on core r. A context manager."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self._rendezvous = Rendezvous("127.0.0.1")
        self._runs = 0
        context = get_context("spawn")
        self._ranks = []
        for rank in range(n_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, n_ranks, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, store, *arguments)` on all ranks at the same time. Returns the results in rank order.

        store  (host, port, prefix) of a rendezvous that no other run uses
        Raises RuntimeError with the traceback of a rank that failed; the pool cannot be used after that.
        """
        self._runs += 1
        store = (self._rendezvous.host, self._rendezvous.port, f"run-{self._runs}")
        for _, pipe in self._ranks:
            pipe.send((function, store, arguments))
        answers = [pipe.recv() for _, pipe in self._ranks]
        for rank, (done, value) in enumerate(answers):
            if not done:
                raise RuntimeError(f"rank {rank}: {value}")
        return [value for _, value in answers]

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.join(5.0)
            process.kill()
        self._rendezvous.close()


def _serve(rank: int, n_ranks: int, pipe: Connection) -> None:
    """A rank process: calls the functions that it receives until its pipe closes."""
    import torch

    cores = sorted(os.sched_getaffinity(0))
    if n_ranks <= len(cores):  # two on one core would wait for each other while another idles
        os.sched_setaffinity(0, {cores[rank]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            function, store, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, store, *arguments)))
        except BaseException:  # noqa: BLE001  sent to the parent, which raises it
            pipe.send((False, traceback.format_exc()))


class NodeTime(NamedTuple):
    """One node of one iteration on one rank; times by the host's monotonic clock.

    cpu_s    CPU seconds of all threads of the process, for comparisons on a busy machine
    metrics  that the rank reports of the node
    """

    iteration: int
    node: str
    started_s: float
    ended_s: float
    cpu_s: float
    metrics: Mapping[str, float]


class PlanRun(NamedTuple):
    """One rank's figures of a plan: the times of its nodes, and its peak memory (rlhf_tasks/system/memory.py)."""

    times: Sequence[NodeTime]
    peak_bytes: int


def run_plan(
    rank: int,
    store: Store,
    plan_json: str,
    config: Mapping[str, Any],
    folder: str,
    iterations: int,
) -> PlanRun:
    """Run a plan's iterations in the order in which the runtime delivers them: plan order, at most two in flight."""
    import torch.distributed as dist

    from rlhf_tasks.protocol.sequencer import Sequencer
    from rlhf_tasks.rank.executor import NodeExecutor
    from rlhf_tasks.system.memory import give_back
    from tests.rlhf_tasks.settings import DEADLINES

    host, port, prefix = store
    plan = ExecutionPlan.model_validate_json(plan_json)
    executor = NodeExecutor(rank, lambda part: None)
    give_back()
    executor.load(generation_spec(rank, store, plan, config, folder))
    ended = dist.PrefixStore(f"{prefix}-ended", dist.TCPStore(host, port, is_master=False))
    sequencer, times, peak = Sequencer(plan, prefix, 0, DEADLINES), [], 0
    for iteration in range(iterations):
        if iteration >= 2:
            ended.wait([f"{iteration - 2}/{other}" for other in range(plan.n_devices)])
        for request in sequencer.requests(iteration, in_snapshot=False).get(rank, ()):
            started_s, cpu_s = time.monotonic(), time.process_time()
            result = executor.execute(request, plan.node(request.key.node))
            used_s = time.process_time() - cpu_s
            peak = max(peak, result.peak_bytes)
            times.append(
                NodeTime(iteration, request.key.node, started_s, time.monotonic(), used_s, result.metrics)
            )
        ended.set(f"{iteration}/{rank}", "")
    executor.close()
    return PlanRun(times, peak)


def measure_pieces(
    rank: int, store: Store, plan_json: str, config: Mapping[str, Any], folder: str
) -> tuple[list[Measurements], float]:
    """Run a profile's plan (rlhf_tasks/profiling/spec.py).

    Returns this rank's measurements, node by node, and the seconds that a node without work takes.
    """
    from rlhf_tasks.profiling.executor import ProfileExecutor

    plan = ExecutionPlan.model_validate_json(plan_json)
    executor = ProfileExecutor(rank)
    executor.load(generation_spec(rank, store, plan, config, folder))
    pieces = ProfileSpec.model_validate(config).pieces
    measured = [executor.measure(pieces[node.name]) for node in plan.nodes]
    idle = [piece for piece in pieces.values() if piece.kind == "idle"]
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
