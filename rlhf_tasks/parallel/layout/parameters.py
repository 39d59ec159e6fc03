"""The parameters of a whole model, and those that its adapters (LoRA) have. Pure Python."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from prefect_rlhf.rlhf_tasks.parallel.layout.families import FAMILIES
from prefect_rlhf.rlhf_tasks.parallel.layout.family import Family, VariedLayers
from prefect_rlhf.rlhf_tasks.parallel.layout.layers import layer_parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import (
    POSITIONS,
    FileTensor,
    Head,
    ModelShape,
    ParameterSpec,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters of linear modules (LoRA, arXiv:2106.09685): W x becomes W x + alpha / rank * B (A x).

    A [rank, in] and B [out, rank] train, W is frozen.

    targets  names of the modules in a layer, as in `q_proj`
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __str__(self) -> str:
        return f"adapters of rank {self.rank}, alpha {self.alpha:g} on {', '.join(self.targets)}"

    @property
    def scaling(self) -> float:
        """The factor of B (A x)."""
        return self.alpha / self.rank

    def check(self, shape: ModelShape) -> None:
        """Raises ConfigError, with the possible values, for targets that a model lacks and for too large a rank."""
        sizes = linear_modules(shape)
        unknown = [name for name in self.targets if name not in sizes]
        if unknown:
            raise ConfigError(
                f"lora.targets names {shown(unknown[0])}, which is not a linear layer of {shape.family}"
                f"{' (its experts have no adapters)' if shape.experts else ''}. "
                f"Its linear layers are {', '.join(sizes)}."
            )
        name, most = min(((name, min(sizes[name])) for name in self.targets), key=lambda least: least[1])
        if self.rank > most:
            raise ConfigError(
                f"lora.rank={self.rank} is larger than a dimension of {name}, {list(sizes[name])}. "
                f"Choose a rank of at most {most}."
            )


def linear_modules(shape: ModelShape) -> Mapping[str, tuple[int, ...]]:
    """The linear modules of a decoder layer: name -> [out, in]; of several of a name, that with the least dim."""
    modules: dict[str, tuple[int, ...]] = {}
    for spec in parameters(shape, "lm"):
        if spec.is_linear:
            modules[spec.module] = min(modules.get(spec.module, spec.shape), spec.shape, key=min)
    return modules


@lru_cache(maxsize=64)
def trained_parameters(shape: ModelShape, head: Head, lora: Lora) -> tuple[ParameterSpec, ...]:
    """The parameters that training changes under LoRA: A and B of every target, and a scalar head as a whole.

    They are split as their linear module is. Column-parallel: every tp rank holds A, and the rows of B. Row-parallel:
    every tp rank holds the columns of A, and B. What all hold gets only a part of its gradient on each rank.
    """
    specs: list[ParameterSpec] = []
    for spec in parameters(shape, head):
        if spec.name == "score.weight":
            specs.append(spec)
        if not (spec.is_linear and spec.module in lora.targets):
            continue
        (out, into), module = spec.shape, spec.name.removesuffix(".weight")
        partial = spec.partial_gradient or spec.shard_dim is not None
        sharded, whole = spec, replace(spec, shard_dim=None, unit=None, unit_size=1, partial_gradient=partial)
        a, b = (whole, sharded) if spec.shard_dim == 0 else (sharded, whole)
        for part, holder, dims in (("lora_A", a, (lora.rank, into)), ("lora_B", b, (out, lora.rank))):
            stored = spec.packed and FileTensor(
                spec.packed.name.replace(".weight", f".{part}.weight"), dims, 0
            )
            specs.append(replace(holder, name=f"{module}.{part}.weight", shape=dims, packed=stored))
    return tuple(specs)


@lru_cache(maxsize=64)
def parameters(shape: ModelShape, head: Head) -> tuple[ParameterSpec, ...]:
    """Every parameter of a model, layer by layer. Tied embeddings are listed once."""
    tied = shape.tied and head == "lm"
    embedding = ParameterSpec(
        "model.embed_tokens.weight",
        (shape.vocab, shape.hidden),
        "ends" if tied else "first",
        shard_dim=0,
        unit="vocab",
        partial_gradient=tied,
    )
    family = FAMILIES.get(shape.family, Family())
    specs = [embedding]
    if shape.learned_positions:
        specs.append(ParameterSpec(POSITIONS, (shape.context, shape.hidden), "first"))
    if shape.varied is not None and shape.varied.inputs:
        specs += _inputs_of_layers(shape, shape.varied)
    for layer in range(shape.layers):
        specs += layer_parameters(shape, layer, family)
    norm = ("weight", "bias") if shape.norm_bias else ("weight",)
    specs += [ParameterSpec(f"model.norm.{part}", (shape.hidden,), "last") for part in norm]
    if head == "scalar":
        specs.append(ParameterSpec("score.weight", (1, shape.hidden), "last"))
    elif not tied:
        dims = (shape.vocab, shape.hidden)
        specs.append(ParameterSpec("lm_head.weight", dims, "last", shard_dim=0, unit="vocab"))
    return tuple(_in_files(spec, family) for spec in specs)


def _inputs_of_layers(shape: ModelShape, varied: VariedLayers) -> list[ParameterSpec]:
    """What the first stage computes the further inputs of all layers from."""
    columns = shape.layers * varied.inputs
    embedding = "model.embed_tokens_per_layer.weight"
    return [
        ParameterSpec(embedding, (varied.vocab, columns), "first", shard_dim=0, unit="vocab"),
        ParameterSpec("model.per_layer_model_projection.weight", (columns, shape.hidden), "first"),
        ParameterSpec("model.per_layer_projection_norm.weight", (varied.inputs,), "first"),
    ]


def _in_files(spec: ParameterSpec, family: Family) -> ParameterSpec:
    """The parameter with the tensor that files of its family hold it in."""
    prefix = next((prefix for prefix in family.files if spec.name.startswith(prefix)), None)
    if prefix is None:
        return spec
    place = spec.packed or FileTensor(spec.name, spec.shape, 0)
    transposed = family.transposed and spec.place == "layer" and len(place.shape) == 2
    shape = place.shape[::-1] if transposed else place.shape
    name = family.files[prefix] + place.name.removeprefix(prefix)
    return replace(spec, packed=place._replace(name=name, shape=shape, transposed=transposed))
