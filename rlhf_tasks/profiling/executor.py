"""The executor of a profile run: its nodes time parts of calls on the engine's own modules and groups."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from rlhf_tasks.parallel.comm.groups import ProcessGroups, join_world, leave_world
from rlhf_tasks.parallel.layout.shape import ModelShape
from rlhf_tasks.parallel.model.weights import load_config
from rlhf_tasks.profiling.measure import (
    Bench,
    Clock,
    exchange_sets,
    measure_exchanges,
    measure_model,
    tp_sets,
)
from rlhf_tasks.profiling.measurements import Measurements
from rlhf_tasks.profiling.spec import ProfilePart, ProfileSpec
from rlhf_tasks.protocol.messages import GenerationSpec, SavedPart
from rlhf_tasks.rank.role_engines import DTYPES
from rlhf_tasks.spec import NodeRequest, NodeResult, PlanNode
from rlhf_tasks.system.durable import ByteCount
from rlhf_tasks.system.rank_process import give_back, process_bytes, take_stated_threads


def make_executor(rank: int, on_saved: Callable[[SavedPart], None]) -> "ProfileExecutor":
    """The factory for the engine host; see docs/architecture.md."""
    take_stated_threads()
    return ProfileExecutor(rank)


class ProfileExecutor:
    """Measures on one rank. clock: see `Bench`."""

    def __init__(self, rank: int, clock: Clock = time.perf_counter) -> None:
        self.moved = ByteCount()
        self._rank, self._clock = rank, clock
        self._groups: ProcessGroups | None = None
        self._spec: ProfileSpec | None = None

    def load(self, spec: GenerationSpec) -> None:
        """Join the groups of all pieces that will be measured."""
        self._spec = ProfileSpec.model_validate(spec.config)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        server = dist.TCPStore(spec.store_host, spec.store_port, is_master=False)
        store = dist.PrefixStore(spec.store_prefix, server)
        join_world(store, spec.rank, spec.n_ranks, spec.timeout_s, device)
        tps = [piece.tp for piece in self._spec.pieces.values()]
        sets = [*tp_sets(spec.n_ranks, tps), *exchange_sets(spec.n_ranks, self._spec.devices_per_host)]
        self._groups = ProcessGroups(sets, spec.timeout_s, device)

    def execute(self, request: NodeRequest, node: PlanNode) -> NodeResult:
        """Measure one piece; the figures are in the result's details."""
        assert self._spec is not None, "a node arrived before its generation was loaded"
        started_s = time.time()
        measured = self.measure(self._spec.pieces[node.name])
        return NodeResult(
            key=request.key,
            rank=self._rank,
            started_s=started_s,
            ended_s=time.time(),
            details=measured.model_dump(mode="json"),
        )

    def measure(self, piece: ProfilePart) -> Measurements:
        """The figures of a piece, the threads, and the process's bytes of memory with the libraries then loaded."""
        assert self._groups is not None
        if piece.kind == "idle":
            return Measurements()
        measured = self._measure(piece, self._groups)
        give_back()
        held, threads = process_bytes(self._groups.device), torch.get_num_threads()
        return measured.model_copy(update={"process_bytes": held, "threads": threads})

    def _measure(self, piece: ProfilePart, groups: ProcessGroups) -> Measurements:
        assert self._spec is not None
        if piece.kind == "exchanges":
            return Measurements(
                exchanges=tuple(measure_exchanges(groups, self._spec.devices_per_host, self._clock))
            )
        assert piece.grid is not None, "a model is measured on a grid"
        shape, dtype = ModelShape.from_folder(piece.folder), DTYPES[self._spec.dtype]
        bench = Bench(load_config(piece.folder), shape, dtype, groups, self._clock, piece.budget_s)
        return measure_model(bench, piece.tp, piece.grid)

    def abort(self) -> None:
        """From another thread: make a blocked collective raise."""
        if self._groups is not None:
            self._groups.abort()

    def close(self) -> None:
        """Leave the groups."""
        self._groups = None
        leave_world()
