"""How much of a model one device holds and computes: the largest share of any tp rank, for each stage."""

from dataclasses import dataclass
from functools import lru_cache

from rlhf_tasks.parallel.layout.shape import Head, Lora, ModelShape
from rlhf_tasks.parallel.layout.slices import Layout, split
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements on the tp rank that has most of them.

    layer, embedding, head   parameters of one layer, of the token embedding, of what follows the last layer
    shared                   of a layer's: those of which several tp ranks hold the same rows
    query, kv, intermediate  width of the local query heads, of the local keys (values have the same), of the MLP
    vocab                    local rows of the vocabulary; 1 for a scalar head
    hidden, layers           of the whole model
    tied                     the head shares the embedding's weights: with several stages, the last one holds them too
    """

    layer: int
    shared: int
    embedding: int
    head: int
    query: int
    kv: int
    intermediate: int
    vocab: int
    hidden: int
    layers: int
    tied: bool

    def stage_layers(self, pp: int, stage: int) -> int:
        """Number of layers of a stage."""
        return _stage_layers(self.layers, pp)[stage]

    def stage_parameters(self, pp: int, stage: int) -> int:
        """Number of parameters of a stage on one device."""
        count = self.stage_layers(pp, stage) * self.layer
        if stage == 0:
            count += self.embedding
        if stage == pp - 1:
            count += self.head + (self.embedding if self.tied and pp > 1 else 0)
        return count

    def stage_shared(self, pp: int, stage: int) -> int:
        """Number of a stage's parameters of which other ranks of a replica hold the same rows."""
        count = self.stage_layers(pp, stage) * self.shared
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

    def local(tp_rank: int, *, layer: int | None, place: tuple[str, ...]) -> int:
        return sum(
            layout.interval(spec, tp_rank).size * spec.row_size
            for spec in layout.parameters
            if spec.place in place and spec.layer == layer
        )

    def shared(tp_rank: int) -> int:
        return sum(
            layout.interval(spec, tp_rank).size * spec.row_size
            for spec in layout.parameters
            if spec.layer == 0 and any(tp_rank in rows.devices for rows in layout.shared(spec.name, 0))
        )

    ranks = range(tp)
    tied = any(spec.place == "ends" for spec in layout.parameters)
    return Sizes(
        layer=max(local(rank, layer=0, place=("layer",)) for rank in ranks),
        shared=max(map(shared, ranks)),
        embedding=max(local(rank, layer=None, place=("first", "ends")) for rank in ranks),
        head=max(local(rank, layer=None, place=("last",)) for rank in ranks),
        query=max(layout.units("query_head", rank).size for rank in ranks) * shape.head_dim,
        kv=max(layout.units("kv_head", rank).size for rank in ranks) * shape.head_dim,
        intermediate=max(layout.units("column", rank).size for rank in ranks),
        vocab=1 if head == "scalar" else max(layout.units("vocab", rank).size for rank in ranks),
        hidden=shape.hidden,
        layers=shape.layers,
        tied=tied,
    )
