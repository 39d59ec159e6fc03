"""Times the operations of a profile on real ranks: layers, ends (embedding and head), optimizer steps, collectives.

A layer's time is the difference between models of two depths, divided by the difference in layers. It is measured
with the engine's own calls (`inference`, `train_step`, `generate`), so that the fixed cost of a call is measured too;
it counts as part of the ends. All ranks call these functions together. The tensor parallel groups measure at the same
time, as they work at the same time in a run.

All works of a model are timed in rounds, in each of which every work has one turn. A slow phase of the machine, of
some seconds, then affects few works in one round, not one work in all rounds. A work whose times agree has no further
turn, and when a piece has used its time, its rounds end.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedConfig

from prefect_rlhf.rlhf_tasks.config.models import OptimizerConfig
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import redistribute, share_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import (
    Blank,
    ProcessGroups,
    all_gather,
    all_reduce,
    exchange,
    join_world,
    leave_world,
)
from prefect_rlhf.rlhf_tasks.parallel.comm.reallocation import reallocate
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import Segments, generate
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head, ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import initialise, load_config
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms
from prefect_rlhf.rlhf_tasks.parallel.train.gradients import reduce_scatter
from prefect_rlhf.rlhf_tasks.profiling.measurements import (
    LEAST_S,
    Exchange,
    Grid,
    Measurements,
    ProfilePart,
    ProfileSpec,
    Timed,
    TimedExchange,
)
from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec, SavedPart
from prefect_rlhf.rlhf_tasks.rank.role_engines import DTYPES, optimizer_settings
from prefect_rlhf.rlhf_tasks.spec import DataSide, NodeRequest, NodeResult, PlanNode
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount
from prefect_rlhf.rlhf_tasks.system.rank_process import give_back, process_bytes, take_stated_threads

Clock = Callable[[], float]
Measurable = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)

SHALLOW, DEEP = 1, 4  # layers of the two models whose difference gives a layer's time
DRAWING, DRAWING_BYTES = {"cpu": DEEP, "cuda": 16}, 8e9
"""Layers of the deeper model that draws tokens, and most bytes of its layers. To launch a step of decoding takes a
GPU's host as long as some small layers take the GPU: the steps of few layers would take equally long."""
FEW_STEPS, MORE_STEPS = 1, 33
"""Decoding steps of the two generations whose difference gives a step's time. What the shorter one takes besides is
the prefill. So it has a single step: the first steps read a shorter cache than steps do in the mean."""
FEWEST_ROUNDS, ROUNDS = 3, 6
SETTLED = 0.05  # relative; a work whose times differ by less on every rank has no further turn
LEARNING_RATE = 1e-6
SAMPLES = 32  # samples of a measured redistribution
MANY_SAMPLES, KEYS = 256, ("a", "b", "c", "d")  # of a measured transfer: as many as plans send


@dataclass(frozen=True)
class Bench:
    """The common arguments of the measuring functions.

    config, shape  of the whole model
    clock          returns seconds; process CPU time on a machine too busy for wall-clock time
    budget_s       seconds of a piece's works after which no further round begins
    """

    config: PreTrainedConfig
    shape: ModelShape
    dtype: torch.dtype
    groups: ProcessGroups
    clock: Clock
    budget_s: float

    def engine(self, layers: int, head: Head, tp: int, trains: bool = True) -> Engine:
        """A model of this shape with `layers` layers, on this rank and its tp - 1 neighbours."""
        first = self.groups.rank // tp * tp
        placement = Placement(tuple(range(first, first + tp)), ParallelStrategy(tp=tp))
        config = deepcopy(self.config)
        config.num_hidden_layers = layers
        kinds = getattr(config, "layer_types", None)
        if kinds is not None:
            config.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
        stage = Stage(
            config,
            Layout(replace(self.shape, layers=layers), head, placement),
            placement.coordinate(self.groups.rank),
            self.groups[placement.devices],
            device=self.groups.device,
            dtype=self.dtype,
        )
        initialise(stage, seed=0)
        settings = optimizer_settings(OptimizerConfig()) if trains else None
        return Engine(stage, stage.layout, self.groups, settings)


def _means_s(
    works: Mapping[Name, Measurable],
    devices: Sequence[int],
    groups: ProcessGroups,
    clock: Clock,
    budget_s: float = math.inf,
) -> dict[Name, float]:
    """Mean seconds of each work over rounds in which each has one turn.

    A work whose two least times agree on every rank (SETTLED) has no further turn. There are at most ROUNDS rounds;
    after budget_s seconds of all works there are no more than FEWEST_ROUNDS.
    Of three times and more the fastest and the slowest, mostly the first, are left out. The mean of the others
    includes a share of slow phases, which real runs have too; a median would not.
    All devices start each work together, so that waiting for a slower rank does not count in the next work's time.
    """
    together = groups[tuple(devices)] if len(devices) > 1 else None
    one = torch.zeros(1, device=groups.device)
    seconds: dict[Name, list[float]] = {name: [] for name in works}
    turns, spent_s = list(works), 0.0
    for number in range(1, ROUNDS + 1):
        for name in turns:
            all_reduce(one, together)
            _finish(groups)
            started = clock()
            works[name]()
            _finish(groups)
            seconds[name].append(clock() - started)
        spent_s += sum(seconds[name][-1] for name in turns)
        if number == 1:
            continue
        least = [sorted(seconds[name])[:2] for name in turns]
        differ = [second / max(first, LEAST_S) - 1 for first, second in least]
        # What any rank has found counts on all of them, since they work together.
        told = torch.tensor([spent_s, *differ], dtype=torch.float64, device=groups.device)
        spent, *differ = all_reduce(told, together, dist.ReduceOp.MAX).tolist()
        turns = [name for name, by in zip(turns, differ, strict=True) if by > SETTLED]
        if not turns or (number >= FEWEST_ROUNDS and spent >= budget_s):
            break
    return {name: fmean(sorted(found)[1:-1] or found) for name, found in seconds.items()}


def _finish(groups: ProcessGroups) -> None:
    """Wait until the device has finished: CUDA kernels run asynchronously."""
    if groups.device.type == "cuda":
        torch.cuda.synchronize()


def tp_sets(n_ranks: int, tps: Sequence[int]) -> list[tuple[int, ...]]:
    """The device sets in which the measured models communicate. `ProcessGroups` must be built with them."""
    return [tuple(range(first, first + tp)) for tp in tps for first in range(0, n_ranks, tp)]


def measure_model(bench: Bench, tp: int, grid: Grid) -> Measurements:
    """Seconds of every operation of a model under tensor parallelism of degree tp, a divisor of the ranks."""
    models = {
        "shallow": bench.engine(SHALLOW, "lm", tp),
        "deep": bench.engine(DEEP, "lm", tp),
        "scalar": bench.engine(SHALLOW, "scalar", tp),
    }
    layers = _drawing_layers(models["shallow"])
    drawing = models["deep"] if layers == DEEP else bench.engine(layers, "lm", tp, trains=False)
    works = _works(models, bench.shape.vocab, grid) | _drawing_works(models["shallow"], drawing, grid)
    if tp == 1 and dist.get_world_size() > 1:
        works |= {("reallocate", name): partial(_reallocate, models[name]) for name in ("shallow", "deep")}
        works["transfer",] = partial(_transfer, _held_samples(bench.groups), bench.groups)
    found = _means_s(works, tuple(range(dist.get_world_size())), bench.groups, bench.clock, bench.budget_s)
    rows = [
        *_forward_and_backward(found, tp, grid),
        *_embedding(found, tp, grid),
        *_generation(found, tp, grid, layers),
        *_optimizer(found, tp, models),
        *_moves(found, models),
    ]
    return Measurements(operations=tuple(rows))


def _works(models: Mapping[str, Engine], vocab: int, grid: Grid) -> dict[tuple, Measurable]:
    """The works that are timed for a model: (kind, model where there are several, sizes) -> work."""
    works: dict[tuple, Measurable] = {}
    for name, engine in models.items():
        works["update", name] = partial(_update, engine)
        for length in grid.lengths:
            for tokens in grid.tokens:
                batch = _sequences(tokens, length, vocab, engine.device)
                works["forward", name, length, tokens] = partial(_infer, engine, batch)
                works["step", name, length, tokens] = partial(_train, engine, batch)
    shallow = models["shallow"]
    for tokens in grid.tokens:
        ids = _sequences(tokens, tokens, vocab, shallow.device)["input_ids"].values
        works["embed", tokens] = partial(_embed, shallow.stage.model.embed_tokens, ids)
        works["embed and back", tokens] = partial(_embed_and_back, shallow.stage.model.embed_tokens, ids)
    return works


def _drawing_layers(shallow: Engine) -> int:
    """Layers of the deeper model that draws tokens."""
    layout = shallow.layout
    whole = sum(spec.size for spec in layout.parameters if spec.place == "layer") / SHALLOW
    # The mean over tp ranks, not this rank's own part: all must build equally many.
    of_layer = whole * shallow.stage.dtype.itemsize / layout.placement.strategy.tp
    return max(DEEP, min(DRAWING[shallow.device.type], int(DRAWING_BYTES / of_layer)))


def _drawing_works(shallow: Engine, drawing: Engine, grid: Grid) -> dict[tuple, Measurable]:
    """The generations that are timed: ("generate", model, tokens of a prompt, sequences, steps) -> work."""
    works: dict[tuple, Measurable] = {}
    for name, engine in (("shallow", shallow), ("drawing", drawing)):
        for prompt in grid.contexts:
            for rows in grid.rows:
                for steps in (FEW_STEPS, MORE_STEPS):
                    works["generate", name, prompt, rows, steps] = partial(
                        _generate, engine, rows, prompt, steps
                    )
    return works


Means = Mapping[tuple, float]
"""Seconds of the works."""


def _forward_and_backward(found: Means, tp: int, grid: Grid) -> Iterator[Timed]:
    """layer, lm and scalar: forward; and backward, which is a training step without forward pass and update."""
    models = ("shallow", "deep", "scalar")
    for length in grid.lengths:
        for tokens in grid.tokens:
            forward = {name: found["forward", name, length, tokens] for name in models}
            backward = {
                name: found["step", name, length, tokens] - found["update", name] - forward[name]
                for name in models
            }
            for kind, seconds in (("forward", forward), ("backward", backward)):
                layer = max((seconds["deep"] - seconds["shallow"]) / (DEEP - SHALLOW), 0.0)
                for part, whole in (("lm", "shallow"), ("scalar", "scalar")):
                    rest = max(seconds[whole] - SHALLOW * layer, 0.0)
                    yield _timed(f"{part}/{kind}", tp, tokens, length, rest)
                yield _timed(f"layer/{kind}", tp, tokens, length, layer)


def _embedding(found: Means, tp: int, grid: Grid) -> Iterator[Timed]:
    """The vocabulary-parallel embedding alone. The heads' figures include it; the cost model subtracts it."""
    for tokens in grid.tokens:
        forward_s, both_s = found["embed", tokens], found["embed and back", tokens]
        yield _timed("embedding/forward", tp, tokens, 0, forward_s)
        yield _timed("embedding/backward", tp, tokens, 0, max(both_s - forward_s, 0.0))


def _generation(found: Means, tp: int, grid: Grid, layers: int) -> Iterator[Timed]:
    """layer and lm: prefill (by tokens of the prompts), and a decoding step (by sequences and KV cache length).

    layers  of the deeper model
    """
    for prompt in grid.contexts:
        for rows in grid.rows:
            few, more = (
                [found["generate", name, prompt, rows, steps] for name in ("shallow", "drawing")]
                for steps in (FEW_STEPS, MORE_STEPS)
            )
            step = [(b - a) / (MORE_STEPS - FEW_STEPS) for a, b in zip(few, more, strict=True)]
            prefill = [whole - FEW_STEPS * each for whole, each in zip(few, step, strict=True)]
            context = prompt + (FEW_STEPS + MORE_STEPS) // 2
            for kind, (shallow, deep), tokens, length in (
                ("decode", step, rows, context),
                ("prefill", prefill, rows * prompt, prompt),
            ):
                layer = max((deep - shallow) / (layers - SHALLOW), 0.0)
                yield _timed(f"layer/{kind}", tp, tokens, length, layer)
                yield _timed(f"lm/{kind}", tp, tokens, length, max(shallow - SHALLOW * layer, 0.0))


def _optimizer(found: Means, tp: int, models: Mapping[str, Engine]) -> Iterator[Timed]:
    """The optimizer update alone, for models of two sizes."""
    for name in ("shallow", "deep"):
        parameters = sum(p.numel() for p in models[name].stage.parameters())
        yield _timed("optimizer", tp, parameters, 0, found["update", name])


def _moves(found: Means, models: Mapping[str, Engine]) -> Iterator[Timed]:
    """Whole models, and samples of many keys, from one rank to another; nothing on a rank without partner."""
    if ("transfer",) not in found or _partners(dist.get_rank()) is None:
        return
    for name in ("shallow", "deep"):
        layout = models[name].layout
        moved = sum(spec.size for spec in layout.parameters)
        yield _timed("reallocation", 1, moved, layout.shape.layers, found["reallocate", name])
    yield _timed("transfer", 1, MANY_SAMPLES * len(KEYS), 0, found["transfer",])


def _reallocate(engine: Engine) -> None:
    """Send a copy of the model to this rank's partner, or receive one."""
    partners = _partners(engine.groups.rank)
    if partners is None:
        return
    source, destination = (
        replace(engine.layout, placement=Placement((device,), ParallelStrategy())) for device in partners
    )
    slices = engine.stage.named_slices() if engine.groups.rank == partners[0] else None
    reallocate(source, destination, slices, engine.stage.dtype, engine.groups, dist.get_world_size())


def _held_samples(groups: ProcessGroups) -> SampleStore:
    """A store that has the samples of a measured transfer on the first rank of each pair."""
    store, partners = SampleStore(), _partners(groups.rank)
    if partners is not None and groups.rank == partners[0]:
        values = _cut(torch.zeros(MANY_SAMPLES, device=groups.device), MANY_SAMPLES)
        store.put(SampleBatch(tuple(range(MANY_SAMPLES)), dict.fromkeys(KEYS, values)))
    return store


def _transfer(store: SampleStore, groups: ProcessGroups) -> None:
    """Send this rank's samples to its partner, or receive them."""
    partners = _partners(groups.rank)
    if partners is not None:
        _redistribute(store, partners, range(MANY_SAMPLES), KEYS, groups)


def _partners(rank: int) -> tuple[int, int] | None:
    """The pair of neighbours that a rank belongs to; None for the last one of an odd number of ranks."""
    first = rank // 2 * 2
    return (first, first + 1) if first + 1 < dist.get_world_size() else None


def _infer(engine: Engine, batch: SampleBatch) -> None:
    def output(y: Tensor, micro: MicroBatch) -> Tensor:
        return y if engine.layout.head == "scalar" else engine.logprobs(y, micro)

    engine.inference(batch, output, micro_batches=1)


def _train(engine: Engine, batch: SampleBatch) -> None:
    def loss(y: Tensor, micro: MicroBatch) -> LossTerms:
        if engine.layout.head == "scalar":
            return LossTerms(y.square().sum(), {})
        logprobs, entropy = engine.logprobs_and_entropy(y, micro)
        ratio = logprobs.clamp(-1, 1).exp()
        return LossTerms(-ratio.sum(), {"entropy": entropy.detach().sum(), "ratio": ratio.detach().sum()})

    metrics = () if engine.layout.head == "scalar" else ("entropy", "ratio")
    engine.train_step(batch, loss, float(len(batch)), 1, LEARNING_RATE, metrics)


def _update(engine: Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.apply(LEARNING_RATE)


def _embed(embed: Module, ids: Tensor) -> None:
    with torch.no_grad():
        embed(ids)


def _embed_and_back(embed: Module, ids: Tensor) -> None:
    embed(ids).sum().backward()


def _generate(engine: Engine, rows: int, prompt: int, steps: int) -> None:
    vocab = engine.layout.shape.vocab
    prompt += (
        engine.device.type == "cuda"
    )  # else its second step would begin the next columns, and capture a graph
    tokens = _sequences(rows * prompt, prompt, vocab, engine.device)["input_ids"]
    batch = SampleBatch(tuple(range(rows)), {"prompt_ids": tokens})
    # A segment of a longer response: for few tokens, generation would not pack its weights (generation.py).
    segment = Segments(steps, lambda _: True)
    generate(
        engine, batch, SamplingParams(max_new_tokens=MORE_STEPS + 1), seed=0, iteration=0, segments=segment
    )


def _sequences(tokens: int, length: int, vocab: int, device: torch.device) -> SampleBatch:
    """A batch of `tokens` random tokens in sequences of `length` tokens; the last one may be shorter."""
    lengths = [length] * (tokens // length) + ([tokens % length] if tokens % length else [])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (tokens,), generator=generator).to(device)
    return SampleBatch(tuple(range(len(lengths))), {"input_ids": Packed(ids, tuple(lengths))})


def _timed(operation: str, tp: int, tokens: int, context: int, seconds: float) -> Timed:
    return Timed.model_validate(
        {"operation": operation, "tp": tp, "tokens": tokens, "context": context, "seconds": seconds}
    )


# Collectives and messages


def exchange_sets(n_ranks: int, devices_per_host: int) -> list[tuple[int, ...]]:
    """The sets in which exchanges are measured: 2, 4, ... neighbours; all ranks; one rank each of 2, 4, ... hosts."""
    sets = [tuple(range(n_ranks))] if n_ranks > 1 else []
    size = 2
    while size <= n_ranks:
        sets += [tuple(range(first, first + size)) for first in range(0, n_ranks - size + 1, size)]
        across = tuple(range(0, size * devices_per_host, devices_per_host))
        if across[-1] < n_ranks and devices_per_host > 1:
            sets.append(across)
        size *= 2
    return sorted(set(sets))


def measure_exchanges(groups: ProcessGroups, devices_per_host: int, clock: Clock) -> Iterator[TimedExchange]:
    """Time every exchange in every set that contains this rank; sets of one size work at the same time."""
    n_ranks = dist.get_world_size()
    for devices in exchange_sets(n_ranks, devices_per_host):
        if groups.rank not in devices:
            continue
        crosses = len({device // devices_per_host for device in devices}) > 1
        works: dict[tuple[Exchange, int], Measurable] = {
            (kind, size_bytes): work for kind, size_bytes, work in _exchanges(groups, devices)
        }
        for (kind, size_bytes), seconds in _means_s(works, devices, groups, clock).items():
            yield TimedExchange(
                kind=kind,
                ranks=len(devices),
                crosses_hosts=crosses,
                size_bytes=size_bytes,
                seconds=seconds / (2 if kind == "send" else 1),
            )


EXCHANGE_BYTES = tuple(2**power for power in range(10, 23, 3))  # 1 KiB to 4 MiB; above, only bandwidth counts


def _exchanges(
    groups: ProcessGroups, devices: tuple[int, ...]
) -> Iterator[tuple[Exchange, int, Callable[[], object]]]:
    """(kind, bytes, work) for every exchange among some devices."""
    group, n, device = groups[devices], len(devices), groups.device
    for size_bytes in EXCHANGE_BYTES:
        whole = torch.zeros(size_bytes // 4 // n * n, device=device)
        part = torch.zeros(whole.numel() // n, device=device)
        yield "all_reduce", size_bytes, lambda x=whole: all_reduce(x, group)
        yield "all_gather", size_bytes, lambda x=whole, y=part: all_gather(x, y, group=group)
        yield "reduce_scatter", size_bytes, lambda x=whole, y=part: reduce_scatter(y, x, group=group)
        placement = Placement(devices, ParallelStrategy(tp=n))
        batch = SampleBatch((0,), {"x": Packed(whole, (whole.numel(),))})
        yield "share", size_bytes, lambda p=placement, b=batch: _share(b, p, groups)
        if n == 2:
            yield "send", size_bytes, lambda x=whole: _pass_round(x, devices, groups)
            store = SampleStore()
            if groups.rank == devices[0]:
                store.put(SampleBatch(tuple(range(SAMPLES)), {"x": _cut(whole, SAMPLES)}))
            yield (
                "redistribute",
                size_bytes,
                lambda s=store: _redistribute(s, devices, range(SAMPLES), ["x"], groups),
            )


def _cut(values: Tensor, n: int) -> Packed:
    """Values [rows, ...] cut into n samples of similar size."""
    parts = values.tensor_split(n)
    return Packed.of(parts)


def _redistribute(
    store: SampleStore,
    devices: tuple[int, ...],
    ids: Sequence[int],
    keys: Sequence[str],
    groups: ProcessGroups,
) -> None:
    """Send samples from the first device to the second, which forgets them again."""
    source, destination = (DataSide(placement=Placement((device,), ParallelStrategy())) for device in devices)
    redistribute(source, destination, ids, keys, store, groups, devices_per_host=max(devices) + 1)
    if groups.rank == devices[1]:
        store.clear()


def _share(batch: SampleBatch, placement: Placement, groups: ProcessGroups) -> None:
    mine = batch if groups.rank == placement.head(0) else None
    share_batch(mine, placement, groups)


def _pass_round(x: Tensor, devices: tuple[int, ...], groups: ProcessGroups) -> None:
    """Send to the second device and back: two messages."""
    first, second = devices
    blank = Blank(x.dtype, tuple(x.shape))
    group = groups[devices]
    if groups.rank == first:
        exchange({second: [x]}, {}, group, groups.device)
        exchange({}, {second: [blank]}, group, groups.device)
    else:
        exchange({}, {first: [blank]}, group, groups.device)
        exchange({first: [x]}, {}, group, groups.device)


# The executor of a profile run


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
        shape, dtype = read_shape(piece.folder), DTYPES[self._spec.dtype]
        bench = Bench(load_config(piece.folder), shape, dtype, groups, self._clock, piece.budget_s)
        return measure_model(bench, piece.tp, piece.grid)

    def abort(self) -> None:
        """From another thread: make a blocked collective raise."""
        if self._groups is not None:
            self._groups.abort()

    def close(self) -> None:
        """Leave the groups."""
        self.abort()
        self._groups = None
        leave_world()
