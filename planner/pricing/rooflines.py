"""Seconds of the parts of a call: the interface `Timing`, and its implementation by a device's roofline; and how much
of a model one device holds and computes: the largest share of any tp rank, for each stage.

planner/pricing/figures.py implements it by measured profiles. planner/pricing/analytic.py writes a roofline in the
form of a measured profile. The cost model does not see the difference.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Protocol

from prefect_rlhf.planner.pricing.devices import DeviceProfile
from prefect_rlhf.rlhf_tasks.parallel.layout.family import LayerKind
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import KV_HEADS, POSITIONS, Head, ModelShape, Unit
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout, split
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.work import DELTA_CHUNK, head_flops, layer_flops
from prefect_rlhf.rlhf_tasks.profiling.measurements import Exchange, Pass

STATE_BYTES = 4  # of an element of a state of the gated delta rule: float32, as what is computed from it
STATE_PASSES = 12
"""How often a decoding step reads or writes an element of a state: taken from its slot (2), faded (2), read by the
key (1), its correction written (1) and added (3), read by the query (1), put back (2)."""
CHUNK_PASSES = 8
"""How often a chunk of a pass over sequences does so: read by the keys (1) and the queries (1), faded (2), its
corrections written (1) and added (3)."""

KINDS: tuple[LayerKind, ...] = ("convolution", "delta")
"""The kinds of layers that keep no keys and values."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements on the tp rank that has most of them. Where layers differ, those of the mean layer: of the
    model, or of a stage (`stage_sizes`).

    layer, embedding, head   parameters of one layer, of the token embedding, of what follows the last layer
    positions                parameters of the embedding of positions; each tp rank of the first stage has all
    shared                   of a layer's: those of which several tp ranks hold the same rows
    of_experts               of a layer's: those of its experts
    experts, chosen          number of a layer's experts, 0 where it has one MLP; the share that a token is given to
    query, kv, intermediate  width of the local query heads, of the local keys (values have the same), of the MLPs
                             that a token passes; without attention, of what a layer has in their place
    scored, cached           the same as query and kv, of attention alone
    in_memory                heads of which the scores of all pairs of tokens stand in memory
    state                    what a layer keeps of a sequence in place of keys and values
    mixing                   of a token: what a backward pass of the gated delta rule needs
    routed                   width of the copies of a token's hidden state that its experts get; 0: one MLP, no copies
    vocab                    local rows of the vocabulary; 1 for a scalar head
    hidden, layers           of the whole model
    message                  numbers that go from stage to stage for each token: of the largest message
    tied                     the head shares the embedding's weights: with several stages, the last one holds them too
    tp                       ranks that a layer is split over
    head_dim                 width of a KV head
    gated, norm_bias         of the layers, as in `Family`
    norms_over_ranks         norms of a layer whose sums of squares are summed over the tp group
    """

    layer: int
    shared: int
    of_experts: int
    experts: int
    chosen: float
    embedding: int
    head: int
    query: float
    kv: float
    scored: float
    cached: float
    in_memory: float
    state: float
    mixing: float
    intermediate: int
    routed: int
    vocab: int
    hidden: int
    message: int
    layers: int
    tied: bool
    tp: int
    head_dim: float
    positions: int
    gated: bool
    norm_bias: bool
    norms_over_ranks: int

    @property
    def active(self) -> float:
        """Parameters of one layer that a token is multiplied by."""
        return self.layer - self.of_experts * (1 - self.chosen)

    def busy(self, tokens: float) -> float:
        """Number of experts that get some of so many tokens, on average, if each token chooses at random."""
        return self.experts * (1 - (1 - self.chosen) ** tokens)

    def read(self, tokens: float) -> float:
        """Parameters of one layer that a pass over so many tokens reads."""
        return self.layer - self.of_experts * (1 - self.chosen) ** tokens

    def stage_layers(self, pp: int, stage: int) -> int:
        """Number of layers of a stage."""
        return _stage_layers(self.layers, pp)[stage]

    def stage_parameters(self, pp: int, stage: int) -> int:
        """Number of parameters of a stage on one device."""
        count = self.stage_layers(pp, stage) * self.layer
        if stage == 0:
            count += self.embedding + self.positions
        if stage == pp - 1:
            count += self.head + (self.embedding if self.tied and pp > 1 else 0)
        return count

    def stage_shared(self, pp: int, stage: int) -> int:
        """Number of a stage's parameters of which other ranks of a replica hold the same rows."""
        count = self.stage_layers(pp, stage) * self.shared
        if stage == 0 and self.tp > 1:
            count += self.positions
        return count + (self.embedding if self.tied and pp > 1 and stage in (0, pp - 1) else 0)


@lru_cache(maxsize=4096)
def _stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    return tuple(split(layers, pp, stage).size for stage in range(pp))


@lru_cache(maxsize=4096)
def stage_kinds(layers: int, pp: int, mean: tuple[int, ...] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Groups stages that are alike: (first stage of each kind, [stages] number of each stage's kind).

    mean  [stages] a number for what a stage's mean layer is; empty: all are alike
    Two stages are alike if they have equally many layers, alike on the mean, and neither is the first or the last
    stage.
    """
    number: dict[tuple[int, int, bool, bool], int] = {}
    firsts: list[int] = []
    kinds: list[int] = []
    for stage in range(pp):
        its = (split(layers, pp, stage).size, mean[stage] if mean else 0, stage == 0, stage == pp - 1)
        kind = number.setdefault(its, len(number))
        kinds.append(kind)
        if kind == len(firsts):
            firsts.append(stage)
    return tuple(firsts), tuple(kinds)


@lru_cache(maxsize=1024)
def sizes(
    shape: ModelShape, head: Head, tp: int, lora: Lora | None = None, layers: range | None = None
) -> Sizes:
    """The sizes at tensor-parallel degree tp; with `lora`, its parameters are only those that it trains.

    layers  those of which the mean layer is taken; default: all
    Raises ValueError when a tp rank would be empty.
    """
    layers = range(shape.layers) if layers is None else layers
    layout = Layout(shape, head, Placement(tuple(range(tp)), ParallelStrategy(tp=tp)), lora)

    def local(tp_rank: int, place: tuple[str, ...], experts: bool = False) -> int:
        return sum(
            layout.interval(spec, tp_rank).size * spec.row_size
            for spec in layout.parameters
            if spec.place in place
            and (spec.of_experts or not experts)
            and (spec.layer is None or spec.layer in layers)
        )

    def of_layer(tp_rank: int, experts: bool = False) -> int:
        return ceil(local(tp_rank, ("layer",), experts) / len(layers))

    def shared(tp_rank: int) -> int:
        alike = [
            layout.interval(spec, tp_rank).size * spec.row_size
            for spec in layout.parameters
            if spec.layer in layers and any(tp_rank in rows.devices for rows in layout.shared(spec.name, 0))
        ]
        return ceil(sum(alike) / len(layers))

    def most(columns: int) -> int:
        return ceil(columns / tp)

    ranks, per_token = range(tp), shape.experts_per_token
    positions = next((spec.size for spec in layout.parameters if spec.name == POSITIONS), 0)
    tied = any(spec.place == "ends" for spec in layout.parameters)
    passed = most(shape.intermediate) * max(1, per_token) + most(shape.shared_columns)
    if shape.varied is not None:
        widths = sum(map(shape.dense_width, layers)) / len(layers)
        passed = most(ceil(widths)) + most(shape.intermediate) * per_token
    of_mixture = sum(map(shape.has_experts, layers)) / len(layers) if shape.experts else 1.0
    return Sizes(
        layer=max(of_layer(rank) for rank in ranks),
        shared=max(map(shared, ranks)),
        of_experts=max(of_layer(rank, experts=True) for rank in ranks),
        experts=shape.experts if of_mixture else 0,
        chosen=per_token / shape.experts if shape.experts else 1.0,
        embedding=max(local(rank, ("first", "ends")) for rank in ranks) - positions,
        head=max(local(rank, ("last",)) for rank in ranks),
        **_mixers(layout, layers),
        intermediate=ceil(of_mixture * passed + (1 - of_mixture) * most(shape.dense_columns)),
        routed=ceil(of_mixture * per_token * shape.hidden),
        vocab=1 if head == "scalar" else max(layout.units("vocab", rank).size for rank in ranks),
        hidden=shape.hidden,
        message=_message(layout),
        layers=shape.layers,
        tied=tied,
        tp=tp,
        head_dim=shape.mean_head_dim,
        positions=positions,
        gated=shape.gated,
        norm_bias=shape.norm_bias,
        norms_over_ranks=2 if shape.qk_norm == "all heads" else 0,
    )


@lru_cache(maxsize=1024)
def stage_sizes(
    shape: ModelShape, head: Head, tp: int, pp: int, lora: Lora | None = None
) -> tuple[Sizes, ...]:
    """[stages] the sizes, as `sizes` gives them, where the mean layer is that of a stage. Equal ones are one object:
    all, where the model's layers are alike."""
    whole = sizes(shape, head, tp, lora)
    if pp == 1 or not (shape.kinds or shape.varied or shape.dense_layers):
        return (whole,) * pp
    known: dict[Sizes, Sizes] = {}
    stages = (range(*split(shape.layers, pp, stage)) for stage in range(pp))
    return tuple(
        known.setdefault(its, its) for its in (sizes(shape, head, tp, lora, layers) for layers in stages)
    )


def parameters_by_stage(stages: Sequence[Sizes]) -> tuple[int, ...]:
    """[stages] numbers of parameters on one device."""
    return tuple(its.stage_parameters(len(stages), stage) for stage, its in enumerate(stages))


def _message(layout: Layout) -> int:
    """The hidden state and what goes with it, between the stages of the pipeline where that is most: with a stage for
    each layer, every place is one."""
    deep = replace(layout.placement.strategy, pp=layout.shape.layers)
    cut = replace(layout, placement=Placement(tuple(range(deep.size)), deep))
    return max((cut.message(pp, 0).columns for pp in range(deep.pp - 1)), default=layout.shape.hidden)


def _mixers(layout: Layout, layers: range) -> dict[str, float]:
    """Of `Sizes`, what depends on the kinds of layers: sums over kinds, each by its share of these layers."""
    shape, ranks = layout.shape, range(layout.placement.strategy.tp)

    def most(unit: Unit) -> int:
        return max(layout.units(unit, rank).size for rank in ranks)

    def width(layer: int) -> int:
        return shape.mean_head_dim if shape.latent else shape.heads(layer).dim

    kinds = Counter(map(shape.kind_of, layers))
    convolves, corrects = (kinds[kind] / len(layers) for kind in KINDS)
    attending = [layer for layer in layers if shape.kind_of(layer) in KV_HEADS]
    scored = most("query_head") * sum(map(width, attending)) / len(layers)
    keeping = [layer for layer in attending if shape.of_keys(layer)]
    cached = sum(most(KV_HEADS[shape.kind_of(layer)]) * width(layer) for layer in keeping) / len(layers)
    widths = {"query": scored, "kv": cached, "scored": scored, "cached": cached, "state": 0.0, "mixing": 0.0}
    widths["in_memory"] = most("query_head") * len(attending) / len(layers) if shape.sinks else 0.0
    if shape.gated_attention:
        widths["query"] += scored
    if convolves:
        channels = most("channel") * convolves
        widths["query"] += channels
        widths["kv"] += channels
        widths["state"] += channels * (shape.kernel - 1)
    if shape.delta is not None:
        heads, delta = most("delta_head") * corrects, shape.delta
        keys, values = heads * delta.key_dim, heads * delta.group * delta.value_dim
        matrices = delta.group * (delta.key_dim * delta.value_dim / DELTA_CHUNK + 4 * DELTA_CHUNK)
        widths["query"] += 2 * values
        widths["kv"] += keys
        widths["state"] += values * delta.key_dim + (2 * keys + values) * (shape.kernel - 1)
        widths["mixing"] += 7 * delta.group * keys + 5 * values + heads * matrices
    return widths


GRADIENT_BYTES = 4  # float32 (gradients.py)
NORM_BYTES = 4  # a token's sum of squares, float32 (rlhf_tasks/parallel/model/norms.py)
UPDATE_TRAFFIC_BYTES = (
    30  # per parameter: gradient, master and moments read; master, moments and weight written
)

ROUTING = 0.7
"""Host time of routing tokens to experts, in that of a dense layer: measured on one CPU thread, hidden size 24."""


class Timing(Protocol):
    """One model under one degree of tensor parallelism on devices of one class or several.

    tokens   tokens of a micro-batch on one dp rank; while decoding, number of sequences
    context  length of its sequences in tokens; while decoding, of their KV cache
    All results are in seconds and include the sums over the tp group.
    """

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of one layer over `tokens` tokens. `backward` is what training adds to `forward`."""
        ...

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        """Seconds of the first stage besides its layers, over `tokens` tokens."""
        ...

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of the last stage besides its layers: head, loss or next token, and the engine's overhead."""
        ...

    def update_s(self, parameters: float, dp: int) -> float:
        """Seconds of the optimizer on a device that holds `parameters` parameters, without its collectives."""
        ...

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        """Seconds of a collective or message of size_bytes bytes in all; 0 for one rank."""
        ...


class Roofline:
    """Timing from a device's peaks, efficiencies and overheads.

    local     sizes of the model on a device
    head      the head on the last stage
    crosses   whether the tp group spans hosts
    itemsize  bytes of a parameter or activation
    """

    def __init__(
        self, device: DeviceProfile, local: Sizes, head: Head, tp: int, crosses: bool, itemsize: int
    ) -> None:
        self._device, self._local, self._head = device, local, head
        self._tp, self._crosses, self._itemsize = tp, crosses, itemsize

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of one layer over `tokens` tokens: roofline, two sums over the tp group, and overhead.

        A backward pass does twice the forward pass's work.
        """
        decoding = kind == "decode"
        attended = context if decoding else context / 2
        passes = 2 if kind == "backward" else 1
        overhead = self._overhead_s(tokens, decoding)
        reductions = 2 * self._reduce_s(tokens)
        if self._local.norms_over_ranks:
            squares = tokens * NORM_BYTES
            one = self._device.all_reduce_s(squares, self._tp, self._crosses)
            reductions += self._local.norms_over_ranks * one
        return self._work_s(tokens, attended, passes, decoding) + reductions + overhead

    def _overhead_s(self, tokens: float, decoding: bool) -> float:
        """Host time of a layer. Mixtures of experts decode without CUDA graphs."""
        device, local = self._device, self._local
        if not local.experts:
            return device.decode_overhead_s if decoding else device.layer_overhead_s
        return device.layer_overhead_s * (1 + ROUTING) + device.expert_overhead_s * local.busy(tokens)

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        """Seconds to sum the vocabulary-parallel embedding of `tokens` tokens; what it reads is negligible."""
        return 0.0 if kind == "backward" else self._reduce_s(tokens)

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        """Seconds of computing and reading the logits. A prefill needs only those of each prompt's last token."""
        if kind == "prefill":
            tokens = tokens / context
        passes = 2 if kind == "backward" else 1
        local = self._local
        traffic = (local.vocab * local.hidden + 2 * tokens * local.vocab) * self._itemsize
        flops = passes * head_flops(tokens, local.hidden, local.vocab)
        return self._device.compute_s(flops, passes * traffic)

    def update_s(self, parameters: float, dp: int) -> float:
        """Seconds: each dp rank updates its share of the parameters, and clears their gradients."""
        traffic = parameters * (UPDATE_TRAFFIC_BYTES + GRADIENT_BYTES) / dp
        return self._device.compute_s(0, traffic) + self._device.optimizer_overhead_s

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        """Seconds of a ring collective or a message of size_bytes bytes in all; 0 for one rank.

        Sharing a batch costs one more latency, for its description.
        """
        if ranks == 1:
            return 0.0
        device = self._device
        match kind:
            case "all_reduce":
                return device.all_reduce_s(size_bytes, ranks, crosses_hosts)
            case "all_gather" | "reduce_scatter":
                return device.gather_s(size_bytes, ranks, crosses_hosts)
            case "share":
                return device.send_s(size_bytes, crosses_hosts) + device.link(crosses_hosts).latency_s
            case "send" | "redistribute":
                return device.send_s(size_bytes, crosses_hosts)

    def _reduce_s(self, tokens: float) -> float:
        """Seconds of summing the hidden states of `tokens` tokens over the tp group."""
        size_bytes = tokens * self._local.hidden * self._itemsize
        return self._device.all_reduce_s(size_bytes, self._tp, self._crosses)

    def _work_s(self, tokens: float, attended: float, passes: int, cached: bool) -> float:
        """Roofline seconds of a layer for `tokens` tokens, each attending to `attended` others on average.

        passes  multiple of the forward pass's work
        cached  keys and values of the others are read from the KV cache
        """
        local = self._local
        flops = layer_flops(tokens, attended, local.active, local.scored, local.state)
        # Read and written: hidden states; query, key and value; the MLP's branches and their product.
        of_mlp = (6 if local.gated else 4) * local.intermediate
        elements = tokens * (8 * local.hidden + 2 * local.query + 4 * local.kv + of_mlp)
        if local.routed:
            # Copies for experts: written, read by both branches; their outputs: written, joined, sorted, summed. The
            # product of the branches is weighed.
            elements += tokens * (9 * local.routed + 2 * local.intermediate)
        if cached:
            elements += 2 * tokens * attended * local.cached
        traffic = passes * (elements + local.read(tokens)) * self._itemsize
        of_state = STATE_PASSES if cached else passes * CHUNK_PASSES / DELTA_CHUNK
        traffic += tokens * local.state * STATE_BYTES * of_state
        return self._device.compute_s(passes * flops, traffic)


class Slowest:
    """Timing of a mesh with several device classes: each time is that of the slowest class.

    timings  [classes] of operations
    links    [classes] of exchanges, which may be between devices of different classes
    """

    def __init__(self, timings: Sequence[Timing], links: Sequence[Timing]) -> None:
        self._timings, self._links = timings, links

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        return max(timing.layer_s(kind, tokens, context) for timing in self._timings)

    def embedding_s(self, kind: Pass, tokens: float) -> float:
        return max(timing.embedding_s(kind, tokens) for timing in self._timings)

    def head_s(self, kind: Pass, tokens: float, context: float) -> float:
        return max(timing.head_s(kind, tokens, context) for timing in self._timings)

    def update_s(self, parameters: float, dp: int) -> float:
        return max(timing.update_s(parameters, dp) for timing in self._timings)

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses_hosts: bool) -> float:
        return max(timing.exchange_s(kind, ranks, size_bytes, crosses_hosts) for timing in self._links)


class OfStage(Slowest):
    """Timing of a stage whose layers are other ones than the model's on the mean: a layer takes as much longer as it
    does by the devices' rooflines.

    timing      of the model's mean layer
    mean, here  rooflines of that layer, and of the stage's
    """

    def __init__(self, timing: Timing, mean: Timing, here: Timing) -> None:
        super().__init__([timing], [timing])
        self._timing, self._mean, self._here = timing, mean, here

    def layer_s(self, kind: Pass, tokens: float, context: float) -> float:
        there, here = (its.layer_s(kind, tokens, context) for its in (self._mean, self._here))
        return self._timing.layer_s(kind, tokens, context) * here / there
