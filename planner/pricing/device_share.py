"""How much of a model one device holds and computes: the largest share of any tp rank, for each stage."""

from dataclasses import dataclass
from functools import lru_cache

from rlhf_tasks.parallel.layout.shape import POSITIONS, Head, Lora, ModelShape
from rlhf_tasks.parallel.layout.slices import Layout, split
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements on the tp rank that has most of them.

    layer, embedding, head   parameters of one layer, of the token embedding, of what follows the last layer
    positions                parameters of the embedding of positions; each tp rank of the first stage has all
    shared                   of a layer's: those of which several tp ranks hold the same rows
    of_experts               of a layer's: those of its experts
    experts, chosen          number of a layer's experts, 0 where it has one MLP; the share that a token is given to
    query, kv, intermediate  width of the local query heads, of the local keys (values have the same), of the MLPs
                             that a token passes
    routed                   width of the copies of a token's hidden state that its experts get; 0: one MLP, no copies
    vocab                    local rows of the vocabulary; 1 for a scalar head
    hidden, layers           of the whole model
    tied                     the head shares the embedding's weights: with several stages, the last one holds them too
    tp                       ranks that a layer is split over
    gated, norm_bias         of the layers, as in `Family`
    """

    layer: int
    shared: int
    of_experts: int
    experts: int
    chosen: float
    embedding: int
    head: int
    query: int
    kv: int
    intermediate: int
    routed: int
    vocab: int
    hidden: int
    layers: int
    tied: bool
    tp: int
    positions: int
    gated: bool
    norm_bias: bool

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

    def parameters_by_stage(self, pp: int) -> tuple[int, ...]:
        """[stages] numbers of parameters on one device."""
        firsts, kinds = stage_kinds(self.layers, pp)
        found = [self.stage_parameters(pp, stage) for stage in firsts]
        return tuple(found[kind] for kind in kinds)


@lru_cache(maxsize=4096)
def _stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    return tuple(split(layers, pp, stage).size for stage in range(pp))


@lru_cache(maxsize=4096)
def stage_kinds(layers: int, pp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Groups stages that are alike: (first stage of each kind, [stages] number of each stage's kind).

    Two stages are alike if they have equally many layers, and neither is the first or the last stage.
    """
    number: dict[tuple[int, bool, bool], int] = {}
    firsts: list[int] = []
    kinds: list[int] = []
    for stage in range(pp):
        kind = number.setdefault((split(layers, pp, stage).size, stage == 0, stage == pp - 1), len(number))
        kinds.append(kind)
        if kind == len(firsts):
            firsts.append(stage)
    return tuple(firsts), tuple(kinds)


@lru_cache(maxsize=1024)
def sizes(shape: ModelShape, head: Head, tp: int, lora: Lora | None = None) -> Sizes:
    """The sizes at tensor-parallel degree tp; with `lora`, its parameters are only those that it trains.

    Raises ValueError when a tp rank would be empty.
    """
    layout = Layout(shape, head, Placement(tuple(range(tp)), ParallelStrategy(tp=tp)), lora)

    def local(tp_rank: int, *, layer: int | None, place: tuple[str, ...], stacked: bool = False) -> int:
        return sum(
            layout.interval(spec, tp_rank).size * spec.row_size
            for spec in layout.parameters
            if spec.place in place and spec.layer == layer and (spec.stacked is not None or not stacked)
        )

    def shared(tp_rank: int) -> int:
        return sum(
            layout.interval(spec, tp_rank).size * spec.row_size
            for spec in layout.parameters
            if spec.layer == 0 and any(tp_rank in rows.devices for rows in layout.shared(spec.name, 0))
        )

    ranks, per_token = range(tp), shape.experts_per_token
    positions = next((spec.size for spec in layout.parameters if spec.name == POSITIONS), 0)
    tied = any(spec.place == "ends" for spec in layout.parameters)
    return Sizes(
        layer=max(local(rank, layer=0, place=("layer",)) for rank in ranks),
        shared=max(map(shared, ranks)),
        of_experts=max(local(rank, layer=0, place=("layer",), stacked=True) for rank in ranks),
        experts=shape.experts,
        chosen=per_token / shape.experts if shape.experts else 1.0,
        embedding=max(local(rank, layer=None, place=("first", "ends")) for rank in ranks) - positions,
        head=max(local(rank, layer=None, place=("last",)) for rank in ranks),
        query=max(layout.units("query_head", rank).size for rank in ranks) * shape.head_dim,
        kv=max(layout.units("kv_head", rank).size for rank in ranks) * shape.head_dim,
        intermediate=max(layout.units("column", rank).size for rank in ranks) * max(1, per_token),
        routed=per_token * shape.hidden,
        vocab=1 if head == "scalar" else max(layout.units("vocab", rank).size for rank in ranks),
        hidden=shape.hidden,
        layers=shape.layers,
        tied=tied,
        tp=tp,
        positions=positions,
        gated=shape.gated,
        norm_bias=shape.norm_bias,
    )
