"""The executor of the engine host: joins a generation's groups, runs plan nodes, and leaves the groups."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from rlhf_tasks.parallel.comm.groups import join_world, leave_world
from rlhf_tasks.protocol.messages import GenerationSpec, SavedPart
from rlhf_tasks.rank.plan_nodes import RankRun
from rlhf_tasks.spec import NodeRequest, NodeResult, PlanNode
from rlhf_tasks.system.durable import ByteCount
from rlhf_tasks.system.failpoints import Point, reach
from rlhf_tasks.system.invariants import InvariantError
from rlhf_tasks.system.rank_process import (
    give_back,
    peak_bytes,
    reset_peak,
    take_stated_threads,
    told_when_out,
)


def make_executor(rank: int, on_saved: Callable[[SavedPart], None]) -> "NodeExecutor":
    """The `ExecutorFactory` of a run's ranks; see docs/architecture.md."""
    take_stated_threads()
    return NodeExecutor(rank, on_saved)


class NodeExecutor:
    """Runs plan nodes on one rank; holds at most one generation at a time."""

    def __init__(self, rank: int, on_saved: Callable[[SavedPart], None]) -> None:
        self.moved = ByteCount()
        self._rank = rank
        self._on_saved = on_saved
        self._run: RankRun | None = None

    def load(self, spec: GenerationSpec) -> None:
        """Join the generation's groups, build the engines, restore or initialise."""
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        server = dist.TCPStore(spec.store_host, spec.store_port, is_master=False)
        store = dist.PrefixStore(spec.store_prefix, server)
        reach(Point.JOIN)
        join_world(store, spec.rank, spec.n_ranks, spec.timeout_s, device)
        self._run = RankRun(spec, device, self._on_saved, self.moved)
        with told_when_out("loading the models", device):
            self._run.start()

    def execute(self, request: NodeRequest, node: PlanNode) -> NodeResult:
        """Run one node. Whatever it raises becomes a fault of the run."""
        if self._run is None:
            raise InvariantError(f"{request.key.node} arrived before its generation was loaded")
        reset_peak(self._run.device)
        started_s = time.time()
        with told_when_out(f"{request.key.node} of iteration {request.key.iteration}", self._run.device):
            outcome = self._run.perform(node, request)
        return NodeResult(
            key=request.key,
            rank=self._rank,
            started_s=started_s,
            ended_s=time.time(),
            metrics=dict(outcome.metrics),
            versions=self._run.versions(),
            bytes_sent=outcome.bytes_sent,
            flops=outcome.flops,
            peak_bytes=peak_bytes(self._run.device),
            digest=outcome.digest,
            details=dict(outcome.details),
        )

    def abort(self) -> None:
        """From another thread: abort the groups. NCCL's blocked collectives raise; gloo's wait for their timeout."""
        if self._run is not None:
            self._run.abort()

    def close(self) -> None:
        """End the generation: free groups, engines, copies and samples."""
        run, self._run = self._run, None
        if run is not None:
            run.close()
        leave_world()
        del run
        give_back()  # hooks make engines reference cycles, which must be collected before the next ones are built
