"""Runs an algorithm's graph on one rank, without plan, Prefect and Dask: the functions alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.order import node_order
from prefect_rlhf.rlhf_tasks.algorithms.configurations import RunConfig
from prefect_rlhf.rlhf_tasks.algorithms.examples import prepared_rows
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch, load_functions
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput, on_none
from prefect_rlhf.rlhf_tasks.algorithms.shared.segments import functions_of, nothing_left
from prefect_rlhf.rlhf_tasks.config.models import Role
from prefect_rlhf.rlhf_tasks.config.sampling import Samples
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import FolderWriter, initialise, load, load_config
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import OptimizerSettings
from prefect_rlhf.rlhf_tasks.protocol.decisions import Decisions
from prefect_rlhf.rlhf_tasks.rank.generators import make_generator
from prefect_rlhf.rlhf_tasks.rank.samples import scored_here
from prefect_rlhf.rlhf_tasks.spec import (
    WHOLE,
    CallAssignment,
    CallNode,
    ModelFunctionCall,
    NodeKey,
    NodeResult,
    Part,
)
from prefect_rlhf.rlhf_tasks.user_code.environments import EnvironmentProcess
from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess

CPU = torch.device("cpu")
PLACEMENT = Placement((0,), ParallelStrategy())


@contextmanager
def world_of_one() -> Iterator[None]:
    """A world of this process alone, where there is none yet."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def engine_of(role: Role, seed: int, dtype: torch.dtype = torch.float32, **drawn: Any) -> Engine:
    """A role's engine, its weights read from its folder or drawn. drawn: which tokens are, as `Engine` takes it"""
    layout = Layout(read_shape(role.folder), role.head, PLACEMENT)
    model = load_config(role.folder)
    stage = Stage(model, layout, PLACEMENT.coordinate(0), None, device=CPU, dtype=dtype)
    if role.random_init:
        initialise(stage, seed)
    else:
        load(stage, role.folder, seed)
    groups = ProcessGroups(device_sets(PLACEMENT), 240.0, CPU)
    o = role.optimizer
    settings = o and OptimizerSettings(o.adam_betas, o.adam_epsilon, o.weight_decay, o.max_grad_norm)
    return Engine(stage, layout, groups, settings, **drawn)


class OneRank:
    """A run's engines and samples on this process; all of a role's calls share one engine."""

    def __init__(self, config: RunConfig, run_folder: Path) -> None:
        self.config, self.run_folder = config, run_folder
        self.rows, self.tokenizer = prepared_rows(config), Tokenizer.from_folder(config.models.tokenizer)
        dtype = getattr(torch, config.dtype)
        drawn = {"tokens": self.rows.vocabulary, "counts_drawn": isinstance(config, Samples)}
        self.engines = {
            name: engine_of(role, config.seed, dtype, **drawn) for name, role in config.roles().items()
        }
        self.generator = make_generator(config, self.rows.vocabulary)
        self.rewards, self.environment = RewardProcess(config), EnvironmentProcess(config)
        self.tallies: dict[str, list[Any]] = {}
        self.algorithm = algorithm(config.type)
        self.calls = self.algorithm.calls(config)
        loaded = load_functions(self.algorithm, [call.name for call in self.calls])
        self.functions = functions_of(loaded, self.calls)
        self.graph = DataflowGraph(self.calls, self.algorithm.dataset_keys)
        everywhere = {call.name: CallAssignment(placement=PLACEMENT) for call in self.calls}
        self.plan = build_plan(self.graph, everywhere, Cluster(1, 1))
        self.decisions = Decisions(self.plan)
        self.asks_early = True
        self.left: dict[str, SampleBatch] = {}  # by the calls that generate in segments
        self.micro_batches = {call.name: 1 if call.kind == "generate" else 4 for call in self.calls}

    def iterate(self, iteration: int) -> tuple[dict[str, float], SampleStore]:
        """All calls of one iteration in the graph's order, as decided; their metrics, and the samples they left."""
        graph = self.graph
        ids = range(iteration * graph.n_seqs, (iteration + 1) * graph.n_seqs)
        store, metrics, self.tallies = SampleStore(), {}, {}
        store.put(fetch(self.rows, self.config, ids))
        for name in node_order(graph, [call.name for call in self.calls]):
            call = next(call for call in self.calls if name in call.nodes)
            runs = self.decisions.runs(iteration, name)
            made = self.call(call, iteration, store, ids, Part(call.nodes.index(name), call.chunks), runs)
            if name in self.decisions.made_after:
                key = NodeKey("", 0, 0, iteration, name)
                result = NodeResult(key=key, rank=0, started_s=0.0, ended_s=0.0, metrics=made)
                self.decisions.make(iteration, name, result)
            metrics |= made
        return metrics, store

    def call(
        self,
        call: ModelFunctionCall,
        iteration: int,
        store: SampleStore,
        every: range,
        part: Part = WHOLE,
        runs: bool = True,
    ) -> dict[str, float]:
        own = part.ids(every)
        ids = range(own[0], own[-1] + 1)
        if call.segment_tokens:
            batch = self.left.get(call.name, nothing_left(call, range(call.n_places), ids.start))
        else:
            batch = _renamed(store.get(list(ids), call.inputs), call.remap)
        output = self.output(call, self.engines[call.role], batch, iteration, ids, part, runs)
        if output.left is not None:
            self.left[call.name] = output.left
        if output.batch is not None:
            renamed = _renamed(output.batch, {ours: theirs for theirs, ours in call.remap.items()})
            store.put(SampleBatch(renamed.ids, {key: renamed[key] for key in call.outputs}))
        return {**output.metrics, **output.of_part}

    def output(
        self,
        call: ModelFunctionCall,
        engine: Engine,
        batch: SampleBatch,
        iteration: int,
        ids: range,
        part: Part = WHOLE,
        runs: bool = True,
    ) -> CallOutput:
        """What a call's function makes of a batch, whichever engine it is given; or of none of it."""
        context = CallContext(
            config=self.config,
            iteration=iteration,
            first_sample=ids.start,
            n_seqs=len(ids),
            micro_batches=self.micro_batches[call.name],
            tokenizer=self.tokenizer,
            rewards=self.rewards,
            environment=self.environment,
            run_folder=self.run_folder,
            where=str,
            columns=lambda: self.rows.columns,
            part=part,
            tally=self.tallies.setdefault(call.name, []),
            rows=lambda samples: fetch(self.rows, self.config, samples),
            generator=self.generator,
            scored_here=self.scored_here(call, part, iteration),
        )
        function = self.functions[call.name]
        return (function if runs else on_none(function))(engine, batch, context)

    def scored_here(self, call: ModelFunctionCall, part: Part, iteration: int) -> Mapping[int, int]:
        """As a rank has it: this one scores all samples."""
        node = self.plan.node(call.nodes[part.number])
        every = range(iteration * self.graph.n_seqs, (iteration + 1) * self.graph.n_seqs)
        return (
            scored_here(self.plan, node, every, 0) if self.asks_early and isinstance(node, CallNode) else {}
        )

    def save(self, role: str, folder: Path) -> None:
        """The role's weights as a Hugging Face folder."""
        stage = self.engines[role].stage
        writer = FolderWriter(folder, Path(self.config.roles()[role].folder), stage.layout, stage.dtype)
        for spec in stage.layout.parameters:
            writer.add(spec.name, stage.named_slices()[spec.name])
        writer.close()

    def close(self) -> None:
        self.generator.close()
        self.rewards.close()
        self.environment.close()


@contextmanager
def runs_of_one(
    config_of: Callable[..., RunConfig], folder: Path, run_folder: Path
) -> Iterator[Callable[..., OneRank]]:
    """Begins runs on this process, each of `config_of(folder, ...)` as asked. They end with the block."""
    torch.set_num_threads(1)
    begun: list[OneRank] = []

    def begin(*given: Any, **changes: Any) -> OneRank:
        begun.append(OneRank(config_of(folder, *given, **changes), run_folder))
        return begun[-1]

    with world_of_one():
        yield begin
        for each in begun:
            each.close()


def _renamed(batch: SampleBatch, names: dict[str, Any]) -> SampleBatch:
    return SampleBatch(batch.ids, {names.get(key, key): packed for key, packed in batch.data.items()})
