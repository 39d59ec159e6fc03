"""A model's sizes, and the names and shapes of its parameters, read from `config.json`.

Pure Python: `transformers.AutoConfig` would import torch (1.5 s), which neither the planner nor the flow
needs. Parameter names are Hugging Face's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_tasks.parallel.layout.families import FAMILIES, LAYER_NORMS, family_of
from rlhf_tasks.parallel.layout.weight_files import has_weights, tensor_shapes
from rlhf_tasks.system.reading import ConfigError, read_json, shown

Head = Literal["lm", "scalar"]
"""The model's last layer: logits over the vocabulary, or one value per token (`score.weight`)."""

Recompute = Literal["none", "selective", "full"]
"""Which activations of a layer a backward pass computes again (model/recomputation.py)."""

Unit = Literal["query_head", "kv_head", "column", "vocab"]
"""The units that a sharded dim consists of. A unit is never divided between tp ranks."""

Place = Literal["layer", "first", "last", "ends"]
"""Which stages hold a parameter: its layer's, the first, the last, or first and last (tied embeddings)."""


MOST: Mapping[str, int] = {
    "num_hidden_layers": 4096,
    "hidden_size": 2**20,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "intermediate_size": 2**24,
    "vocab_size": 2**28,
    "max_position_embeddings": 2**31,
}
"""Upper bounds that no real model reaches. A larger figure is a mistake and could exhaust memory: each layer has a
dozen objects here."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. `context` is the length of the longest sequence in tokens."""

    family: str
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: tuple[str, ...] = LAYER_NORMS
    gated: bool = True
    packed: bool = False

    @staticmethod
    def from_folder(folder: str | Path) -> "ModelShape":
        """Read `config.json` of a Hugging Face model folder; of a family that is not tested also its weights' names.

        Raises ConfigError naming the folder when the config is not readable or not that of a decoder that can be
        split.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ConfigError(f"Model folder {str(folder)!r} has no config.json. {_remedy(Path(folder))}")
        config = read_json(path)
        tested = config.get("model_type") in list(FAMILIES)
        weights = tensor_shapes(Path(folder)) if not tested and has_weights(Path(folder)) else None
        return ModelShape.from_config(config, str(folder), weights)

    @staticmethod
    def from_config(
        config: Mapping[str, Any],
        source: str = "inline config",
        weights: Mapping[str, tuple[int, ...]] | None = None,
    ) -> "ModelShape":
        """Read a Hugging Face config that is already a mapping; `source` names it in errors (ConfigError).

        weights  as in `family_of`
        """
        if not isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]: users write it
            raise ConfigError(f"Model {source!r}: the config is not a JSON object.")
        family = family_of(config, source, weights)
        read = _Reader(config, source)
        heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
        shape = ModelShape(
            family=config["model_type"],
            hidden=hidden,
            layers=read.count("num_hidden_layers"),
            query_heads=heads,
            kv_heads=read.count("num_key_value_heads", family.kv_heads or heads),
            head_dim=read.count("head_dim", family.head_dim or max(1, hidden // heads)),
            intermediate=read.count("intermediate_size"),
            vocab=read.count("vocab_size"),
            context=read.count("max_position_embeddings"),
            tied=read.flag("tie_word_embeddings", family.tied),
            qkv_bias=read.option(family.qkv_bias),
            out_bias=read.option(family.out_bias),
            mlp_bias=read.option(family.mlp_bias),
            qk_norm=family.qk_norm,
            norms=family.norms,
            gated=family.gated,
            packed=family.packed,
        )
        if shape.query_heads % shape.kv_heads:
            raise ConfigError(
                f"Model {source!r}: {heads} query heads are not a multiple of {shape.kv_heads} KV heads."
            )
        return shape

    def difference(self, other: "ModelShape") -> dict[str, tuple[Any, Any]]:
        """The fields in which two models differ: {field: (ours, theirs)}; empty when they are equal."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _remedy(folder: Path) -> str:
    """What to do about a folder that is not a model's."""
    if (folder / "adapter_config.json").is_file():
        return (
            "It holds an adapter (LoRA). Merge it into its model with prefect-rlhf export --merged, or set "
            "lora.export: merged in the run that makes it."
        )
    return "Name a folder in Hugging Face's format."


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checked access to config keys. A key that is null counts as absent."""

    config: Mapping[str, Any]
    source: str

    def count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"Model {self.source!r}: {key}={shown(value)} in its config is not a positive whole number."
            )
        if value > MOST[key]:
            raise ConfigError(
                f"Model {self.source!r}: {key}={shown(value)} in its config is more than {MOST[key]:,}, which no "
                "model has."
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(
                f"Model {self.source!r}: {key}={shown(value)} in its config is neither true nor false."
            )
        return value

    def option(self, known: bool | str) -> bool:
        """The family's value, or the config's value where the family names a config key."""
        return self.flag(known, False) if isinstance(known, str) else known


class Packed(NamedTuple):
    """A tensor in files that holds several parameters, one behind the other on dim 0.

    shape  of the whole tensor
    start  the first row of this parameter
    """

    name: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the whole model.

    shape             global shape
    place, layer      which stages hold it; the layer's number when place is "layer"
    shard_dim         the dim that tensor parallelism splits; None: every tp rank holds all of it
    unit, unit_size   the units that this dim consists of, and rows per unit
    partial_gradient  True: the gradients of its copies inside one dp rank must be summed (KV heads on several tp
                      ranks, tied embeddings, norms inside heads). False: every copy has the whole gradient
    packed            the tensor that it is a part of in files; None: one of its own, of the same name and shape
    """

    name: str
    shape: tuple[int, ...]
    place: Place
    layer: int | None = None
    shard_dim: int | None = None
    unit: Unit | None = None
    unit_size: int = 1
    partial_gradient: bool = False
    packed: Packed | None = None

    @property
    def stored_name(self) -> str:
        """The name of the tensor in files that it is, or is a part of."""
        return self.name if self.packed is None else self.packed.name

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of that tensor."""
        return self.shape if self.packed is None else self.packed.shape

    @property
    def dim(self) -> int:
        """The dim to which intervals of rows refer: the sharded one, else the first."""
        return self.shard_dim or 0

    @property
    def length(self) -> int:
        """Number of rows, i.e. the size of that dim."""
        return self.shape[self.dim]

    @property
    def row_size(self) -> int:
        """Elements per row."""
        return math.prod(self.shape) // self.length

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a linear module in a layer, as files have it."""
        return self.place == "layer" and len(self.shape) == 2 and self.packed is None

    @property
    def module(self) -> str:
        """The last name of its module, as in `q_proj`."""
        return self.name.split(".")[-2]


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
                f"lora.targets names {shown(unknown[0])}, which is not a linear layer of {shape.family}. "
                f"Its linear layers are {', '.join(sizes)}."
            )
        name, most = min(((name, min(sizes[name])) for name in self.targets), key=lambda found: found[1])
        if self.rank > most:
            raise ConfigError(
                f"lora.rank={self.rank} is larger than a dimension of {name}, {list(sizes[name])}. "
                f"Choose a rank of at most {most}."
            )


def linear_modules(shape: ModelShape) -> Mapping[str, tuple[int, ...]]:
    """The linear modules of a decoder layer: name -> [out, in]."""
    return {spec.module: spec.shape for spec in parameters(shape, "lm") if spec.layer == 0 and spec.is_linear}


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
        sharded, whole = spec, replace(spec, shard_dim=None, unit=None, unit_size=1, partial_gradient=True)
        a, b = (whole, sharded) if spec.shard_dim == 0 else (sharded, whole)
        specs.append(replace(a, name=f"{module}.lora_A.weight", shape=(lora.rank, into)))
        specs.append(replace(b, name=f"{module}.lora_B.weight", shape=(out, lora.rank)))
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
    specs = [embedding]
    for layer in range(shape.layers):
        specs += _layer(shape, layer)
    specs.append(ParameterSpec("model.norm.weight", (shape.hidden,), "last"))
    if head == "scalar":
        specs.append(ParameterSpec("score.weight", (1, shape.hidden), "last"))
    elif not tied:
        lm_head = ParameterSpec(
            "lm_head.weight", (shape.vocab, shape.hidden), "last", shard_dim=0, unit="vocab"
        )
        specs.append(lm_head)
    return tuple(specs)


def _layer(shape: ModelShape, layer: int) -> list[ParameterSpec]:
    """Parameters of one decoder layer."""
    prefix = f"model.layers.{layer}."
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def linear(name: str, out: int, into: int, unit: Unit, split: int, bias: bool) -> list[ParameterSpec]:
        """A column-parallel (split=0) or row-parallel (split=1) linear module."""
        unit_size = 1 if unit == "column" else shape.head_dim
        partial = unit == "kv_head"

        def spec(suffix: str, dims: tuple[int, ...], shard_dim: int | None) -> ParameterSpec:
            sharded = shard_dim is not None
            return ParameterSpec(
                f"{prefix}{name}.{suffix}",
                dims,
                "layer",
                layer,
                shard_dim,
                unit=unit if sharded else None,
                unit_size=unit_size if sharded else 1,
                partial_gradient=partial,
            )

        weight = spec("weight", (out, into), split)
        return [weight, spec("bias", (out,), 0 if split == 0 else None)] if bias else [weight]

    def norm(name: str, size: int, inside_heads: bool = False) -> ParameterSpec:
        return ParameterSpec(f"{prefix}{name}.weight", (size,), "layer", layer, partial_gradient=inside_heads)

    head_norms = [
        norm("self_attn.q_norm", shape.head_dim, True),
        norm("self_attn.k_norm", shape.head_dim, True),
    ]
    into_mlp = [name for name in ("gate_proj", "up_proj") if shape.gated or name != "gate_proj"]
    into_heads = [
        *linear("self_attn.q_proj", query, shape.hidden, "query_head", 0, shape.qkv_bias),
        *linear("self_attn.k_proj", kv, shape.hidden, "kv_head", 0, shape.qkv_bias),
        *linear("self_attn.v_proj", kv, shape.hidden, "kv_head", 0, shape.qkv_bias),
    ]
    into_columns = [
        spec
        for name in into_mlp
        for spec in linear(f"mlp.{name}", shape.intermediate, shape.hidden, "column", 0, shape.mlp_bias)
    ]
    if shape.packed:
        into_heads = _packed(into_heads, "qkv_proj")
        into_columns = _packed(into_columns, "gate_up_proj")
    return [
        *into_heads,
        *(head_norms if shape.qk_norm else []),
        *linear("self_attn.o_proj", shape.hidden, query, "query_head", 1, shape.out_bias),
        *into_columns,
        *linear("mlp.down_proj", shape.hidden, shape.intermediate, "column", 1, shape.mlp_bias),
        *(norm(name, shape.hidden) for name in shape.norms),
    ]


def _packed(weights: list[ParameterSpec], module: str) -> list[ParameterSpec]:
    """The weights of linear modules as parts of one module, whose weight files hold them in this order."""
    starts = [0, *accumulate(spec.length for spec in weights)]
    specs: list[ParameterSpec] = []
    for spec, start in zip(weights, starts, strict=False):
        block, name, _ = spec.name.rsplit(".", 2)
        whole = Packed(f"{block}.{module}.weight", (starts[-1], *spec.shape[1:]), start)
        specs.append(replace(spec, name=f"{block}.{module}.{name}.weight", packed=whole))
    return specs
