"""One generation of a run on one rank: turns plan nodes into engine calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, singledispatchmethod
from pathlib import Path
from typing import Any

import torch

from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.algorithms.evaluation import Evaluation
from rlhf_tasks.algorithms.fetch import fetch
from rlhf_tasks.algorithms.functions import load_functions
from rlhf_tasks.algorithms.held_out import evaluation_of
from rlhf_tasks.algorithms.registry import algorithm
from rlhf_tasks.algorithms.shared.context import CallContext
from rlhf_tasks.algorithms.shared.sampling.segments import functions_of, nothing_left
from rlhf_tasks.checkpoint.drawn_samples import DrawnSamples
from rlhf_tasks.checkpoint.journals import BEFORE
from rlhf_tasks.checkpoint.snapshots import SnapshotWriter, restore
from rlhf_tasks.config.base import MovesReference, TrainingConfig
from rlhf_tasks.data.token_file import ROWS, TokenFile
from rlhf_tasks.data.tokenizer import Tokenizer
from rlhf_tasks.parallel.batch.redistribution import heads_set, redistribute, survey
from rlhf_tasks.parallel.batch.samples import SampleBatch, SampleStore
from rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from rlhf_tasks.parallel.layout.transfers import shares
from rlhf_tasks.parallel.state.reallocation import union_set
from rlhf_tasks.parallel.train.engine import Engine, share_batch
from rlhf_tasks.protocol.messages import GenerationSpec, SavedPart
from rlhf_tasks.rank.role_engines import RoleEngines
from rlhf_tasks.spec import (
    CallNode,
    DataSide,
    EvaluateNode,
    ExecutionPlan,
    FetchNode,
    NodeRequest,
    OffloadNode,
    OnloadNode,
    Part,
    PlanNode,
    ReallocateNode,
    ReleaseNode,
    SaveNode,
    SaveSamplesNode,
    SyncNode,
    TransferNode,
)
from rlhf_tasks.system.byte_count import ByteCount
from rlhf_tasks.system.failpoints import Point, reach
from rlhf_tasks.system.invariants import require
from rlhf_tasks.user_code.environments import EnvironmentProcess
from rlhf_tasks.user_code.rewards import KEPT_VALUES, RewardProcess


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
        self._moved = moved
        self._spec, self._plan, self.device = spec, spec.plan, device
        self._config = make_config(spec.config)
        self._algorithm = algorithm(self._config.type)
        calls = [nodes[0].call for nodes in spec.plan.calls.values()]
        self._functions = functions_of(load_functions(self._algorithm, spec.plan.calls), calls)
        self._groups = ProcessGroups(
            [range(spec.n_ranks), *plan_device_sets(spec.plan)], spec.timeout_s, device
        )
        reach(Point.JOINED)
        kept = Path(spec.run_folder) / KEPT_VALUES
        self._rewards = RewardProcess(self._config, spec.iterations, spec.blocks, kept, spec.rank)
        self._environment = EnvironmentProcess(self._config, spec.blocks)
        self._evaluation: Evaluation | None = None
        self._rewards_of_evaluation = self._rewards
        self._samples = SampleStore()
        self._left: dict[str, SampleBatch] = {}  # call in segments -> what it has left in this head's places
        # (call, iteration of its samples) -> what its parts have left for their metrics
        self._tallies: dict[tuple[str, int], list[Any]] = {}
        # call -> iteration -> metrics of its samples, until its last part of that iteration tells them
        self._untold: dict[str, dict[int, dict[str, float]]] = {}
        self._engines = RoleEngines(spec.plan, self._config, self._groups, moved, self._rows.vocabulary)
        self._writer = SnapshotWriter(spec, on_saved, moved)
        self._nodes_per_iteration = len(spec.plan.on(spec.rank))
        self._performed = 0
        self._first_iteration = spec.restore_step or 0
        self._drawn = DrawnSamples(
            Path(spec.run_folder), spec.restore_step, [node.call for node in self._ahead], moved
        )

    @cached_property
    def _rows(self) -> TokenFile:
        return TokenFile.open(Path(self._spec.run_folder, ROWS))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self._config.models.tokenizer)

    def _evaluated(self) -> Evaluation:
        """Made by the ranks that evaluate, when they do so first. Rewards of its own have a process of their own."""
        if self._evaluation is None:
            answers, folder = evaluation_of(self._config), Path(self._spec.run_folder)
            if answers is not None and answers.rewards != getattr(self._config, "rewards", ()):
                self._rewards_of_evaluation = RewardProcess(answers, self._spec.iterations, self._spec.blocks)
            rewards, environment = self._rewards_of_evaluation, self._environment
            self._evaluation = Evaluation(self._config, folder, rewards, self._tokenizer, environment)
        return self._evaluation

    def start(self) -> None:
        """Restore the commit that the generation starts from; without one, save the initial state as step 0."""
        step, engines = self._spec.restore_step, dict(self._engines.changing())
        self._take_drawn()
        if step is None:
            for role, engine in engines.items():
                self._writer.save(role, engine, 0)
            return
        for role, engine in engines.items():
            with self._engines.at_hand(role, engine.layout.placement):
                restore(role, engine, Path(self._spec.run_folder), step, self._moved)

    @cached_property
    def _ahead(self) -> list[SaveSamplesNode]:
        """The nodes that save what is drawn ahead: one for each call that runs ahead."""
        return [node for node in self._plan.nodes if isinstance(node, SaveSamplesNode)]

    def perform(self, node: PlanNode, request: NodeRequest) -> Outcome:
        """Run one node. The rank's last node of an iteration also drops the iteration's samples."""
        outcome = self._perform(node, request)
        self._performed += 1
        if self._performed % self._nodes_per_iteration == 0:
            self._samples.drop(self._ids(request))
            self._tallies.clear()
        return outcome

    def versions(self) -> dict[str, int]:
        return self._engines.versions()

    def abort(self) -> None:
        """From another thread: abort the groups. NCCL's blocked collectives raise; gloo's wait for their timeout."""
        self._groups.abort()

    def close(self) -> None:
        """End the processes of rewards and environments, the engines' copies and the background writer.

        Nobody waits for parts that are not written: an attempt that ends in order ends at a commit, and after a fault
        no commit can have them any more.
        """
        self._rewards.close()
        self._rewards_of_evaluation.close()
        self._environment.close()
        self._engines.close()
        self._writer.close(wait=False)

    @singledispatchmethod
    def _perform(self, node: Any, request: NodeRequest) -> Outcome:
        raise AssertionError(f"no rule for a node of type {type(node).__name__}")

    @_perform.register
    def _fetch(self, node: FetchNode, request: NodeRequest) -> Outcome:
        (call, *_) = self._plan.calls[node.call]
        reads = not call.call.segment_tokens  # in segments the call itself finds out which prompts are next
        if reads and self._spec.rank in node.placement.heads:
            for iteration in self._served(node, request):
                mine = shares(node.side, self._ids(request, iteration))[self._spec.rank]
                fetched = fetch(self._rows, self._config, mine)
                reach(Point.FETCH)
                self._samples.put(fetched.to(self._groups.device))
        return Outcome()

    @_perform.register
    def _call(self, node: CallNode, request: NodeRequest) -> Outcome:
        engine = self._engines.get(node.call.role, node.placement)
        flops_before = engine.flops
        untold = self._untold.setdefault(node.call.name, {})
        for iteration in self._served(node, request):
            metrics = self._run(node, request, engine, iteration)
            untold.setdefault(iteration, {}).update(metrics)
        is_last = node.part.number == node.part.of - 1
        told = untold.pop(request.key.iteration, {}) if is_last else {}
        return Outcome(told, flops=engine.flops - flops_before)

    def _run(
        self, node: CallNode, request: NodeRequest, engine: Engine, iteration: int
    ) -> Mapping[str, float]:
        """Run a call on the samples of an iteration. Returns its metrics."""
        call = node.call
        expected = request.versions[call.role]
        require(
            engine.version == expected or not call.runs_model,
            f"call {call.name}: {call.role} has version {engine.version}, the plan says {expected}",
        )
        whole = self._ids(request, iteration)
        batch = self._inputs(node, whole) if engine.is_head else None
        batch = share_batch(batch, node.placement, self._groups, self._spec.rank)
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
            where=lambda sample: self._rows.where(self._config.row_of(self._rows, sample)),
            columns=lambda: self._rows.columns,
            part=node.part,
            earlier=self._earlier(node, whole) if engine.is_head else None,
            tally=self._tallies.setdefault((call.name, iteration), []),
            rows=lambda samples: fetch(self._rows, self._config, samples),
        )
        output = self._functions[call.name](engine, batch, context)
        if node.trains:
            engine.version += 1
            reach(Point.TRAINED)
        if engine.is_head and output.batch is not None:
            to_store = {inside: outside for outside, inside in call.remap.items()}
            self._samples.put(_only(_renamed(output.batch, to_store), call.outputs))
        if output.left is not None:
            self._left[call.name] = output.left
        if call.segment_tokens:
            self._deal(node, whole)
        return output.metrics

    def _deal(self, node: CallNode, whole: Sequence[int]) -> None:
        """Move the finished samples of a call in segments from the heads where they ended to the heads to which they
        are dealt."""
        keys = node.call.outputs
        self._redistribute(node.side, node.side, whole, keys, node.call.token_key)
        mine = set(shares(node.side, whole).get(self._spec.rank, ()))
        self._samples.drop([sample for sample in whole if sample not in mine], keys)

    @_perform.register
    def _transfer(self, node: TransferNode, request: NodeRequest) -> Outcome:
        consumer = self._plan.calls[node.consumer][0].call
        sent = sum(
            self._redistribute(
                node.source,
                node.destination,
                node.part.ids(self._ids(request, iteration)),
                node.keys,
                consumer.token_key,
            )
            for iteration in self._served(node, request)
        )
        return Outcome(bytes_sent=sent)

    def _redistribute(
        self, source: DataSide, destination: DataSide, ids: Sequence[int], keys: Sequence[str], token_key: str
    ) -> int:
        """As `redistribute`, with this rank's samples."""
        hosts = self._plan.devices_per_host
        return redistribute(source, destination, ids, keys, self._samples, self._groups, hosts, token_key)

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
            step = request.key.iteration + 1
            ids = [sample for i in self._drawn_after(node, step) for sample in self._ids(request, i)]
            (call, *_), held = self._plan.calls[node.call], self._samples.held(ids)
            if node.call in self._left:
                held.append(_renamed(self._left[node.call], call.call.left))
            self._writer.save_samples(node.call, held, self._untold.get(node.call, {}), step)
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
        asked = config.evaluation
        if asked is None:
            return Outcome()
        due = iteration == 0 if node.at_start else asked.is_due(iteration, config.total_iterations)
        if not due:
            return Outcome()
        # Before the first iteration offloaded weights come for it alone: their onload is later in the plan.
        with self._engines.at_hand(node.role, node.placement) as engine:
            assert engine is not None, f"{node.name} is requested of a rank of another placement"
            held, expected = engine.version, request.versions[node.role]
            require(
                held == expected, f"{node.name}: {node.role} has version {held}, the plan says {expected}"
            )
            flops_before = engine.flops
            metrics = self._evaluated().metrics(engine, iteration, node.at_start)
            flops = engine.flops - flops_before
        return (
            Outcome(flops=flops, details={BEFORE: metrics})
            if node.at_start
            else Outcome(metrics, flops=flops)
        )

    def _take_drawn(self) -> None:
        """Load this rank's samples from the commit, in this plan's layout.

        Afterwards the rank holds what the fetch, and the calls that run ahead or generate in segments, would have
        left. Every rank also gets the metrics of these calls.
        """
        rank, n_seqs = self._spec.rank, self._plan.n_seqs
        for save in self._ahead if self._drawn.ready else ():
            self._untold[save.call] = self._drawn.metrics(save.call)
            if rank not in save.writers:
                continue
            stored = self._drawn.of(save.call)
            call = self._plan.calls[save.call][0]
            if call.call.segment_tokens:
                self._left[save.call] = self._in_places(call, stored)
            for number in range(len(self._drawn_after(save, self._first_iteration))):
                first = self._drawn.first_sample + number * n_seqs
                ids = range(first, first + n_seqs)
                for node in self._plan.nodes:
                    if isinstance(node, FetchNode) and node.call == save.call:
                        if call.call.segment_tokens:
                            continue
                        mine, keys = shares(node.side, ids)[rank], node.keys
                    elif isinstance(node, CallNode) and node.call.name == save.call:
                        key = node.call.token_key if node.side.balance == "tokens" else None
                        lengths = None if key is None else {i: stored.length(i, key) for i in ids}
                        mine = shares(node.side, node.part.ids(ids), lengths)[rank]
                        read = () if call.call.segment_tokens else node.call.inputs
                        keys = (*read, *node.call.outputs)
                    else:
                        continue
                    self._samples.put(stored.get(mine, keys).to(self._groups.device))

    def _in_places(self, node: CallNode, stored: SampleStore) -> SampleBatch:
        """What a commit has of this rank's places of a call in segments."""
        inside = {outside: key for key, outside in node.call.left.items()}
        return _renamed(stored.get(self._places(node), inside), inside)

    def _places(self, node: CallNode) -> list[int]:
        """This dp rank's places of a call in segments."""
        return shares(node.side, range(node.call.n_places))[self._spec.rank]

    def _drawn_after(self, node: SaveSamplesNode, step: int) -> range:
        """The iterations that have been drawn ahead when a commit of `step` is written."""
        return range(step, min(step + node.lead, self._spec.iterations))

    def _served(self, node: PlanNode, request: NodeRequest) -> range:
        """The iterations on whose samples a node works: the one that is `node.lead` ahead, where the run has it.

        If no samples are drawn yet, it also works on all iterations before that one, in a generation's first.
        """
        now = request.key.iteration
        last = min(now + node.lead, self._spec.iterations - 1)
        if now == self._first_iteration and not self._drawn.ready:
            return range(now, last + 1)
        return range(now + node.lead, last + 1)

    def _ids(self, request: NodeRequest, iteration: int | None = None) -> tuple[int, ...]:
        """The ids of an iteration's samples; default: of the one that the request belongs to."""
        ahead = 0 if iteration is None else iteration - request.key.iteration
        first = request.first_sample + ahead * self._plan.n_seqs
        return tuple(range(first, first + self._plan.n_seqs))

    def _inputs(self, node: CallNode, whole: Sequence[int]) -> SampleBatch:
        """On a head: this dp rank's samples, with the call's input keys under the names its function uses; or what a
        call in segments has left in its places.

        whole  ids of the iteration's samples
        """
        if node.call.segment_tokens:
            left = self._left.get(node.call.name)
            return left or nothing_left(node.call, self._places(node), whole[0])
        mine = self._share(node, node.part.ids(whole))
        return _renamed(self._samples.get(mine, node.call.inputs), node.call.remap)

    def _earlier(self, node: CallNode, whole: Sequence[int]) -> SampleBatch | None:
        """On a head: this dp rank's samples of the parts before this one, with the keys that the call asks for."""
        if not node.call.earlier or not node.part.number:
            return None
        before = [Part(number, node.part.of).ids(whole) for number in range(node.part.number)]
        mine = [sample for ids in before for sample in self._share(node, ids)]
        return self._samples.get(mine, node.call.earlier)

    def _share(self, node: CallNode, ids: Sequence[int]) -> list[int]:
        """This dp rank's samples of a part, or of all."""
        side, lengths = node.side, None
        if side.balance == "tokens":
            key = node.call.token_key
            lengths = survey(self._samples, ids, [key], side.placement.heads, self._groups)[key].rows
        return shares(side, ids, lengths)[self._spec.rank]


def plan_device_sets(plan: ExecutionPlan) -> list[tuple[int, ...]]:
    """Every set of device ids that communicates under a plan, in the same order on all ranks."""
    sets = [tuple(range(plan.n_devices))]
    for role in plan.roles.values():
        for placement in role.placements:
            sets += device_sets(placement)
    for node in plan.nodes:
        match node:
            case CallNode() | FetchNode():
                sets += [*device_sets(node.placement), tuple(sorted(node.placement.heads))]
            case TransferNode():
                sets.append(heads_set(node.source, node.destination))
            case ReallocateNode() | SyncNode():
                sets.append(union_set(node.source, node.destination))
            case _:
                pass
    return sorted(set(sets))


def _renamed(batch: SampleBatch, names: Mapping[str, str]) -> SampleBatch:
    return SampleBatch(batch.ids, {names.get(key, key): packed for key, packed in batch.data.items()})


def _only(batch: SampleBatch, keys: tuple[str, ...]) -> SampleBatch:
    return SampleBatch(batch.ids, {key: batch.data[key] for key in keys})
