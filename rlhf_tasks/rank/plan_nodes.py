"""One rank of a run: joins a generation's groups, turns plan nodes into engine calls, and leaves the groups."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, singledispatchmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.evaluation import Evaluation
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch, load_functions
from prefect_rlhf.rlhf_tasks.algorithms.held_out import evaluation_of, scoring_rewards_of
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput, on_none
from prefect_rlhf.rlhf_tasks.algorithms.shared.segments import functions_of
from prefect_rlhf.rlhf_tasks.checkpoint.journals import BEFORE
from prefect_rlhf.rlhf_tasks.checkpoint.snapshots import SnapshotWriter, restore
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.reference import MovesReference
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.token_file import ROWS, TokenFile
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import heads_set, redistribute, share_batch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets, join_world, leave_world
from prefect_rlhf.rlhf_tasks.parallel.comm.reallocation import union_set
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import shares
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec, SavedPart
from prefect_rlhf.rlhf_tasks.rank.anomalies import train
from prefect_rlhf.rlhf_tasks.rank.generators import make_generator
from prefect_rlhf.rlhf_tasks.rank.role_engines import RoleEngines
from prefect_rlhf.rlhf_tasks.rank.samples import RankSamples, scored_here
from prefect_rlhf.rlhf_tasks.spec import (
    EVALUATE,
    CallNode,
    EvaluateNode,
    ExecutionPlan,
    FetchNode,
    NodeRequest,
    NodeResult,
    OffloadNode,
    OnloadNode,
    PlanNode,
    ReallocateNode,
    ReleaseNode,
    SaveNode,
    SaveSamplesNode,
    SyncNode,
    TransferNode,
)
from prefect_rlhf.rlhf_tasks.spec import ROWS as ROWS_DECISION
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach
from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError, require
from prefect_rlhf.rlhf_tasks.system.rank_process import (
    give_back,
    peak_bytes,
    reset_peak,
    take_stated_threads,
    told_when_out,
)
from prefect_rlhf.rlhf_tasks.user_code.environments import EnvironmentProcess
from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a node returns besides its effects: metadata for the ledger. The fields are as in `NodeResult`."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    bytes_sent: int = 0
    flops: float = 0.0
    digest: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


class RankRun:
    """Groups, engines, samples and data of one generation on one rank, whose tensors live on `device`.

    moved  counts the bytes of models and commits that are read and written
    """

    def __init__(
        self,
        spec: GenerationSpec,
        device: torch.device,
        on_saved: Callable[[SavedPart], None],
        moved: ByteCount,
    ) -> None:
        self.device = device
        self._moved = moved
        self._spec = spec
        self._plan = spec.plan
        self._config = make_config(spec.config)
        calls = [nodes[0].call for nodes in spec.plan.calls.values()]
        functions = load_functions(algorithm(self._config.type), spec.plan.calls)
        self._functions = functions_of(functions, calls)
        self._groups = ProcessGroups(
            [range(spec.n_ranks), *plan_device_sets(spec.plan)], spec.timeout_s, device
        )
        reach(Point.JOINED)
        self._rewards = self._reward_process(self._config, str(spec.rank))
        self._environment = EnvironmentProcess(self._config, spec.blocks)
        self._generator = make_generator(self._config, self._rows.vocabulary, spec.run_folder)
        self._evaluation: Evaluation | None = None
        self._rewards_of_evaluation = self._rewards
        views = {name: self._view(f"call {name}", nodes) for name, nodes in spec.plan.calls.items()}
        self._samples = RankSamples(spec, views, moved)
        self._engines = RoleEngines(spec.plan, self._config, self._groups, moved, self._rows.vocabulary)
        self._writer = SnapshotWriter(spec, on_saved, moved)
        self._nodes_per_iteration = len(spec.plan.on(spec.rank))
        self._performed = 0

    @cached_property
    def _rows(self) -> TokenFile:
        return TokenFile.open(Path(self._spec.run_folder, ROWS))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self._config.models.tokenizer)

    def _view(self, user: str, nodes: Iterable[PlanNode]) -> ProcessGroups:
        """The groups in which some nodes communicate."""
        return self._groups.view(user, [devices for node in nodes for devices in node_device_sets(node)])

    def _reward_process(self, config: RunConfig, writer: str) -> RewardProcess:
        spec = self._spec
        return RewardProcess(config, spec.iterations, spec.blocks, Path(spec.run_folder), writer)

    def _evaluated(self) -> Evaluation:
        """Made by the ranks that evaluate, when they do so first. Rewards of its own have a process of their own."""
        if self._evaluation is None:
            answers, folder = evaluation_of(self._config), Path(self._spec.run_folder)
            if answers is not None and answers.rewards != scoring_rewards_of(self._config):
                self._rewards_of_evaluation = self._reward_process(answers, f"{self._spec.rank}-evaluation")
            rewards, environment = self._rewards_of_evaluation, self._environment
            self._evaluation = Evaluation(
                self._config, folder, rewards, self._tokenizer, environment, self._generator
            )
        return self._evaluation

    def start(self) -> None:
        """Restore the commit that the generation starts from; without one, save the initial state as step 0."""
        step, engines = self._spec.restore_step, dict(self._engines.changing())
        self._samples.restore()
        if step is None:
            for role, engine in engines.items():
                self._writer.save(role, engine, 0)
            return
        for role, engine in engines.items():
            with self._engines.at_hand(role, engine.layout.placement):
                restore(role, engine, Path(self._spec.run_folder), step, self._moved)

    def perform(self, node: PlanNode, request: NodeRequest) -> Outcome:
        """Run one node. The rank's last node of an iteration also drops the iteration's samples."""
        outcome = self._perform(node, request)
        self._performed += 1
        if self._performed % self._nodes_per_iteration == 0:
            self._samples.end_iteration(request)
        return outcome

    def versions(self) -> dict[str, int]:
        return self._engines.versions()

    def abort(self) -> None:
        """From another thread: abort the groups. NCCL's blocked collectives raise; gloo's wait for their timeout."""
        self._generator.abort()
        self._groups.abort()

    def close(self) -> None:
        """End the processes of rewards and environments, the engines' copies and the background writer.

        Nobody waits for parts that are not written: an attempt that ends in order ends at a commit, and after a fault
        no commit can have them any more. For the same reason the groups are aborted: to close them, NCCL would wait
        for all their ranks, of which one may be lost.
        """
        self._groups.abort()
        self._rewards.close()
        self._rewards_of_evaluation.close()
        self._environment.close()
        self._generator.close()
        self._engines.close()
        self._writer.close(wait=False)

    @singledispatchmethod
    def _perform(self, node: Any, request: NodeRequest) -> Outcome:
        raise AssertionError(f"no rule for a node of type {type(node).__name__}")

    @_perform.register
    def _fetch(self, node: FetchNode, request: NodeRequest) -> Outcome:
        if self._samples.of(node.call).is_fetched and self._spec.rank in node.placement.heads:
            for _, whole in self._samples.worked_on(node, request):
                mine = shares(node.side, whole)[self._spec.rank]
                rows = fetch(self._drawn_from(request), self._config, mine)
                reach(Point.FETCH)
                self._samples.store.put(rows.to(self._groups.device))
        return Outcome()

    @_perform.register
    def _call(self, node: CallNode, request: NodeRequest) -> Outcome:
        samples = self._samples.of(node.call.name)
        engine = self._engines.get(node.call.role, node.placement)
        flops_before, of_part = engine.flops, dict[str, float]()
        for iteration, whole in self._samples.worked_on(node, request):
            output = self._run(node, engine, request, iteration, whole)
            samples.metrics.setdefault(iteration, {}).update(output.metrics)
            of_part |= output.of_part
        is_last = node.part.number == node.part.of - 1
        metrics = samples.metrics.pop(request.key.iteration, {}) if is_last else {}
        return Outcome({**metrics, **of_part}, flops=engine.flops - flops_before)

    def _drawn_from(self, request: NodeRequest) -> TokenFile:
        """The rows that an iteration draws from: the first ones, where that is decided."""
        return self._rows.first(request.decided.get(ROWS_DECISION, 1.0))

    def _run(
        self, node: CallNode, engine: Engine, request: NodeRequest, iteration: int, whole: Sequence[int]
    ) -> CallOutput:
        """Run a call on the samples of an iteration, whose ids are `whole`; or on none of them, where that is
        decided. Then a train_step leaves the weights as they are, and has a version more."""
        call, rows = node.call, self._drawn_from(request)
        runs = not call.when or request.decided[call.when] > 0
        expected = request.versions[call.role]
        require(
            engine.version == expected or not call.runs_model,
            f"call {call.name}: {call.role} has version {engine.version}, the plan says {expected}",
        )
        samples = self._samples.of(call.name)
        batch = samples.inputs(node, whole) if engine.is_head else None
        batch = share_batch(batch, node.placement, engine.groups)
        ids = node.part.ids(whole)
        context = CallContext(
            config=self._config,
            iteration=iteration,
            first_sample=ids[0],
            n_seqs=len(ids),
            micro_batches=node.assignment.micro_batches,
            tokenizer=self._tokenizer,
            rewards=self._rewards,
            environment=self._environment,
            run_folder=Path(self._spec.run_folder),
            where=lambda sample: rows.where(self._config.row_of(rows, sample)),
            columns=lambda: rows.columns,
            part=node.part,
            tally=samples.tally(node.part, iteration),
            rows=lambda sample_ids: fetch(rows, self._config, sample_ids),
            generator=self._generator,
            scored_here=scored_here(self._plan, node, whole, self._spec.rank),
        )
        function = self._functions[call.name]
        if node.trains:
            output = CallOutput()
            if runs:
                output = train(function, engine, call, batch, context, self._spec.run)
            engine.version += 1
            reach(Point.TRAINED)
        else:
            output = (function if runs else on_none(function))(engine, batch, context)
        if call.kind == "generate" and node.part.number == node.part.of - 1:
            self._generator.free()
        samples.put(node, whole, output)
        return output

    @_perform.register
    def _transfer(self, node: TransferNode, request: NodeRequest) -> Outcome:
        sent, sides, store = 0, (node.source, node.destination), self._samples.store
        token_key, hosts = self._samples.of(node.consumer).call.token_key, self._plan.devices_per_host
        groups = self._view(node.name, [node])
        for _, whole in self._samples.worked_on(node, request):
            ids = node.part.ids(whole)
            sent += redistribute(*sides, ids, node.keys, store, groups, hosts, token_key)
        return Outcome(bytes_sent=sent)

    @_perform.register
    def _reallocate(self, node: ReallocateNode, request: NodeRequest) -> Outcome:
        moved = self._engines.reallocate(node, request.versions[node.role])
        return Outcome(bytes_sent=moved.bytes_sent, digest=moved.digest)

    @_perform.register
    def _release(self, node: ReleaseNode, request: NodeRequest) -> Outcome:
        self._engines.release(node.role, node.placement)
        return Outcome()

    @_perform.register
    def _onload(self, node: OnloadNode, request: NodeRequest) -> Outcome:
        self._engines.onload(node.role, node.placement)
        return Outcome()

    @_perform.register
    def _offload(self, node: OffloadNode, request: NodeRequest) -> Outcome:
        self._engines.offload(node.role, node.placement)
        return Outcome()

    @_perform.register
    def _save(self, node: SaveNode, request: NodeRequest) -> Outcome:
        if request.in_snapshot:
            engine = self._engines.get(node.role, node.placement)
            self._writer.save(node.role, engine, request.key.iteration + 1)
        return Outcome()

    @_perform.register
    def _save_samples(self, node: SaveSamplesNode, request: NodeRequest) -> Outcome:
        if request.in_snapshot and self._spec.rank in node.writers:
            batches, metrics = (
                self._samples.for_commit(node.call, request),
                self._samples.of(node.call).metrics,
            )
            self._writer.save_samples(node.call, batches, metrics, request.key.iteration + 1)
        return Outcome()

    @_perform.register
    def _sync(self, node: SyncNode, request: NodeRequest) -> Outcome:
        config = self._config
        assert isinstance(config, MovesReference), f"the reference of {config.type} runs stays as it is"
        due = config.syncs_after(request.key.iteration)
        share = config.ref_model_mixup_alpha if due else None
        moved = self._engines.sync(node, request.versions[node.leader], share)
        return Outcome() if moved is None else Outcome(bytes_sent=moved.bytes_sent, digest=moved.digest)

    @_perform.register
    def _evaluate(self, node: EvaluateNode, request: NodeRequest) -> Outcome:
        config, iteration = self._config, request.key.iteration
        assert isinstance(config, TrainingConfig), f"{config.type} runs do not train"
        evaluation = config.evaluation
        is_due = evaluation is not None and (
            evaluation.is_due(iteration, config.total_iterations) or request.decided.get(EVALUATE, 0.0) > 0
        )
        if evaluation is None or not (iteration == 0 if node.at_start else is_due):
            return Outcome()
        # Before the first iteration offloaded weights come for it alone: their onload is later in the plan.
        with self._engines.at_hand(node.role, node.placement) as engine:
            assert engine is not None, f"{node.name} is requested of a rank of another placement"
            version, expected = engine.version, request.versions[node.role]
            message = f"{node.name}: {node.role} has version {version}, the plan says {expected}"
            require(version == expected, message)
            flops_before = engine.flops
            with engine.whole_weights():  # a generation reads all of them for each token
                metrics = self._evaluated().metrics(engine, iteration, node.at_start)
            self._generator.free()
            flops = engine.flops - flops_before
        if node.at_start:
            return Outcome(flops=flops, details={BEFORE: metrics})
        return Outcome(metrics, flops=flops)


def plan_device_sets(plan: ExecutionPlan) -> list[tuple[int, ...]]:
    """Every set of device ids that communicates under a plan, in the same order on all ranks."""
    sets = [tuple(range(plan.n_devices))]
    for role in plan.roles.values():
        for placement in role.placements:
            sets += device_sets(placement)
    for node in plan.nodes:
        sets += node_device_sets(node)
    return sorted(set(sets))


def node_device_sets(node: PlanNode) -> list[tuple[int, ...]]:
    """The sets of device ids in which a node communicates, and its view of the groups has."""
    match node:
        case CallNode() | FetchNode():
            return [*device_sets(node.placement), tuple(sorted(node.placement.heads))]
        case TransferNode():
            return [heads_set(node.source, node.destination)]
        case ReallocateNode() | SyncNode():
            return [union_set(node.source, node.destination)]
        case _:
            return []
