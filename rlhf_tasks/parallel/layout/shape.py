"""A model's sizes, and the names, shapes and splits of its parameters, read from `config.json`.

Pure Python: `transformers.AutoConfig` would import torch (1.5 s), which neither the planner nor the flow needs.
Parameter names are Hugging Face's.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from prefect_rlhf.rlhf_tasks.parallel.layout.config_keys import ConfigKeys
from prefect_rlhf.rlhf_tasks.parallel.layout.families import (
    FAMILIES,
    LAYER_NORMS,
    DeltaHeads,
    Family,
    HeadNorms,
    Latent,
    LayerKind,
    Mixture,
    Packing,
    family_of,
    kinds_of,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, shown

Unit = Literal["query_head", "kv_head", "column", "vocab", "channel", "delta_head"]
"""The units that a sharded dim consists of. A unit is never divided between tp ranks."""

StagePlace = Literal["layer", "first", "last", "ends"]
"""Which stages hold a parameter: its layer's, the first, the last, or first and last (tied embeddings)."""


class FileTensor(NamedTuple):
    """A tensor in files that holds a parameter, or several, one after the other or in turns.

    shape       of the whole tensor in files
    start       the first row of this parameter
    transposed  files have the parameters' last two dims in the opposite order (GPT-2's Conv1D)
    step        from one row of this parameter to its next: more than 1 where parameters take turns
    dim         of the parameters, whose rows these are
    """

    name: str
    shape: tuple[int, ...]
    start: int
    transposed: bool = False
    step: int = 1
    dim: int = 0


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the whole model.

    shape             global shape
    place, layer      which stages hold it; the layer's number when place is "layer"
    shard_dim         the dim that tensor parallelism splits; None: every tp rank holds all of it
    unit, unit_size   the units that this dim consists of, and rows per unit
    partial_gradient  True: the gradients of its copies inside one dp rank must be summed (KV heads on several tp
                      ranks, tied embeddings, norms inside heads, routers). False: every copy has the whole gradient
    packed            the tensor that it is a part of in files; None: one of its own, of the same name and shape
    stacked           of a parameter of experts: the names in files of its parts along dim 0, with {} for the number
    """

    name: str
    shape: tuple[int, ...]
    place: StagePlace
    layer: int | None = None
    shard_dim: int | None = None
    unit: Unit | None = None
    unit_size: int = 1
    partial_gradient: bool = False
    packed: FileTensor | None = None
    stacked: str | None = None

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of the tensors in files: the one that it is, or is a part of, or those it is made of."""
        if self.stacked is not None:
            return {self.stacked.format(number): self.shape[1:] for number in range(self.shape[0])}
        return {self.name: self.shape} if self.packed is None else {self.packed.name: self.packed.shape}

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
        """Whether it is the weight of a linear module in a layer, which files hold in a tensor of its own."""
        alone = self.packed is None or (self.packed.transposed and self.packed.shape == self.shape[::-1])
        return self.place == "layer" and len(self.shape) == 2 and self.name.endswith(".weight") and alone

    @property
    def of_experts(self) -> bool:
        """Whether its dim 0 counts the experts of a layer."""
        return ".experts." in self.name

    @property
    def module(self) -> str:
        """The last name of its module, as in `q_proj`."""
        return self.name.split(".")[-2]


Head = Literal["lm", "scalar"]
"""The model's last layer: logits over the vocabulary, or one value per token (`score.weight`)."""

Recompute = Literal["none", "selective", "full"]
"""Which activations of a layer a backward pass computes again (model/recomputation.py)."""

CORRECTION = "e_score_correction_bias"
"""What counts in the choice of an expert besides its score. It has no gradient."""

POSITIONS = "model.embed_positions.weight"
"""The embedding of positions, of models that have one."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder.

    context            length of the longest sequence in tokens
    intermediate       columns of the MLP; of each expert
    experts            experts of a layer; 0: one MLP, which all tokens pass
    experts_per_token  those of them that a token is given to
    shared_columns     columns of the experts that every token passes besides
    dense_layers       numbers of the layers that have one MLP in place of experts
    dense_columns      its columns
    kinds              of the layers, over and over again (`kind_of`); none: all have attention
    kernel             tokens that a layer's causal convolution reads, the current one included; 0: no layer has one
    convolution_bias   the convolutions, and the linear modules around them, have biases
    delta              heads of the layers with the gated delta rule; None: there are no such layers
    latent             sizes of latent attention; a query rank of 0: queries are computed from the hidden state
    Further fields are as in `Family`.
    """

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
    qk_norm: HeadNorms | None = None
    sinks: bool = False
    norms: tuple[str, ...] = LAYER_NORMS
    gated: bool = True
    packed: tuple[Packing, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    shared_columns: int = 0
    dense_layers: tuple[int, ...] = ()
    dense_columns: int = 0
    latent: Latent | None = None
    norm_bias: bool = False
    learned_positions: bool = False
    kinds: tuple[LayerKind, ...] = ()
    kernel: int = 0
    convolution_bias: bool = False
    delta: DeltaHeads | None = None
    gated_attention: bool = False
    sorted_by_heads: bool = False

    def kind_of(self, layer: int) -> LayerKind:
        """What mixes tokens in a layer."""
        return self.kinds[layer % len(self.kinds)] if self.kinds else "attention"

    def share(self, kind: LayerKind) -> float:
        """The share of layers of a kind."""
        return sum(self.kind_of(layer) == kind for layer in range(self.layers)) / self.layers

    @property
    def most_tp(self) -> int:
        """The most tp ranks of which none is empty."""
        heads = self.query_heads if self.delta is None else min(self.query_heads, self.delta.heads)
        return min(heads, self.least_columns, self.vocab)

    @property
    def keeps_states(self) -> bool:
        """Whether generation keeps more of a sequence than the keys and values of its tokens."""
        return any(kind != "attention" for kind in self.kinds)

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
        read = ConfigKeys(config, source, family.keys)
        heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
        mixture = family.mixture
        experts, per_token = (0, 0) if mixture is None else read.experts(mixture)
        columns = None if family.columns_per_hidden is None else family.columns_per_hidden * hidden
        layers = read.count("num_hidden_layers")
        dense = () if mixture is None else read.dense_layers(mixture, layers)
        columns = read.count("intermediate_size" if mixture is None else mixture.width, columns)
        try:
            kinds = kinds_of(config, family, layers)
            columns = columns if family.columns is None else family.columns(config, columns)
        except ValueError as fault:
            raise ConfigError(f"Model {source!r}: {fault}.") from None
        latent = None if family.latent is None else read.latent(family.latent)
        head_dim = None if latent is None else latent.plain + latent.rotated
        shape = ModelShape(
            family=config["model_type"],
            hidden=hidden,
            layers=layers,
            query_heads=heads,
            kv_heads=heads if latent else read.count("num_key_value_heads", family.kv_heads or heads),
            head_dim=head_dim or read.count("head_dim", family.head_dim or max(1, hidden // heads)),
            intermediate=columns,
            vocab=read.count("vocab_size"),
            context=read.count("max_position_embeddings"),
            tied=read.flag("tie_word_embeddings", family.tied),
            qkv_bias=read.option(family.qkv_bias),
            out_bias=read.option(family.out_bias),
            mlp_bias=read.option(family.mlp_bias),
            qk_norm=read.head_norms(family.qk_norm),
            sinks=family.sinks,
            norms=family.norms,
            gated=family.gated,
            packed=family.packed,
            experts=experts,
            experts_per_token=per_token,
            shared_columns=0 if mixture is None else read.shared_columns(mixture),
            dense_layers=dense,
            dense_columns=read.count("intermediate_size") if dense else 0,
            latent=latent,
            norm_bias=family.norm_bias,
            learned_positions=family.learned_positions,
            kinds=kinds,
            kernel=read.kernel(kinds),
            convolution_bias="convolution" in kinds and read.flag("conv_bias", False),
            delta=read.delta_heads() if "delta" in kinds else None,
            gated_attention=family.gated_attention,
            sorted_by_heads=family.sorted_by_heads,
        )
        if not family.keys.get("head_dim", ("head_dim",)) and hidden % heads:
            raise ConfigError(
                f"Model {source!r}: its hidden size {hidden} is not a multiple of {heads} heads."
            )
        if shape.query_heads % shape.kv_heads:
            raise ConfigError(
                f"Model {source!r}: {heads} query heads are not a multiple of {shape.kv_heads} KV heads."
            )
        return shape

    @property
    def mean_head_dim(self) -> int:
        """Columns of a head: of query and key, and of value, on average."""
        value = self.head_dim if self.latent is None else self.latent.value
        return math.ceil((self.head_dim + value) / 2)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of one MLP."""
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def mixtures(self) -> float:
        """The share of layers that have experts."""
        return sum(map(self.has_experts, range(self.layers))) / self.layers

    @property
    def least_columns(self) -> int:
        """Columns of the narrowest MLP."""
        return min(filter(None, (self.intermediate, self.shared_columns, self.dense_columns)))

    def difference(self, other: "ModelShape") -> dict[str, tuple[Any, Any]]:
        """The fields in which two models differ: {field: (ours, theirs)}; empty when they are equal."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


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
        sharded, whole = spec, replace(spec, shard_dim=None, unit=None, unit_size=1, partial_gradient=True)
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
    for layer in range(shape.layers):
        specs += _layer(shape, layer, family)
    norm = ("weight", "bias") if shape.norm_bias else ("weight",)
    specs += [ParameterSpec(f"model.norm.{part}", (shape.hidden,), "last") for part in norm]
    if head == "scalar":
        specs.append(ParameterSpec("score.weight", (1, shape.hidden), "last"))
    elif not tied:
        dims = (shape.vocab, shape.hidden)
        specs.append(ParameterSpec("lm_head.weight", dims, "last", shard_dim=0, unit="vocab"))
    return tuple(_in_files(spec, family) for spec in specs)


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


def _layer(shape: ModelShape, layer: int, family: Family) -> list[ParameterSpec]:
    prefix = f"model.layers.{layer}."
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    names, attention = family.names, family.names.attention
    per_head = 2 if shape.gated_attention else 1  # queries, and gates

    def spec(
        name: str,
        dims: tuple[int, ...],
        shard_dim: int | None = None,
        unit: Unit | None = None,
        partial: bool = False,
    ) -> ParameterSpec:
        rows = 0 if shard_dim is None else dims[shard_dim]
        units = {"query_head": shape.query_heads, "kv_head": shape.kv_heads}
        units["delta_head"] = shape.delta.heads if shape.delta else rows
        unit_size = rows // units.get(unit, rows) if unit else 1
        return ParameterSpec(prefix + name, dims, "layer", layer, shard_dim, unit, unit_size, partial)

    def linear(name: str, out: int, into: int, unit: Unit, split: int, bias: bool) -> list[ParameterSpec]:
        """A column-parallel (split=0) or row-parallel (split=1) linear module."""
        partial = unit == "kv_head"
        specs = [spec(f"{name}.weight", (out, into), split, unit, partial)]
        if bias:  # of a row-parallel one, every rank holds all of it
            how = (0, unit) if split == 0 else (None, None)
            specs.append(spec(f"{name}.bias", (out,), *how, partial))
        return specs

    def norm(name: str, size: int) -> list[ParameterSpec]:
        parts = ("weight", "bias") if shape.norm_bias else ("weight",)
        return [spec(f"{name}.{part}", (size,)) for part in parts]

    q_norm, k_norm = (f"{attention}.{name}.weight" for name in (names.q_norm, names.k_norm))
    head_norms = {
        None: [],
        "each head": [spec(name, (shape.head_dim,), partial=True) for name in (q_norm, k_norm)],
        "all heads": [
            spec(q_norm, (query,), 0, "query_head"),
            spec(k_norm, (kv,), 0, "kv_head", partial=True),
        ],
    }[shape.qk_norm]
    into_heads = [
        *linear(f"{attention}.q_proj", query * per_head, shape.hidden, "query_head", 0, shape.qkv_bias),
        *linear(f"{attention}.k_proj", kv, shape.hidden, "kv_head", 0, shape.qkv_bias),
        *linear(f"{attention}.v_proj", kv, shape.hidden, "kv_head", 0, shape.qkv_bias),
    ]
    if "qkv" in shape.packed:
        into_heads = _packed(into_heads, names.qkv)
    values = query
    if shape.latent is not None:
        values, into_heads = (
            shape.query_heads * shape.latent.value,
            _latent(shape, shape.latent, f"{attention}.", spec, linear),
        )

    def mlp(block: str, columns: int) -> list[ParameterSpec]:
        into = [names.gate, names.up] if shape.gated else [names.up]
        first = [
            spec
            for name in into
            for spec in linear(f"{block}.{name}", columns, shape.hidden, "column", 0, shape.mlp_bias)
        ]
        if "gate_up" in shape.packed:
            first = _packed(first, names.gate_up)
        last = linear(f"{block}.{names.down}", shape.hidden, columns, "column", 1, shape.mlp_bias)
        if shape.experts:  # No adapters: peft takes the names of these modules for those of experts.
            return [replace(s, packed=FileTensor(s.name, s.shape, 0)) for s in (*first, *last)]
        return [*first, *last]

    sinks = spec(f"{attention}.sinks", (shape.query_heads,), 0, "query_head")
    mixture = family.mixture if shape.has_experts(layer) else None
    if mixture is None:
        columns = mlp(names.mlp, shape.dense_columns if shape.experts else shape.intermediate)
    else:
        columns = _mixture(shape, mixture, layer)
        if mixture.shared is not None and shape.shared_columns:
            columns += mlp(f"{names.mlp}.{mixture.shared.block}", shape.shared_columns)
    attends = [
        *into_heads,
        *head_norms,
        *([sinks] if shape.sinks else []),
        *linear(f"{attention}.{names.out}", shape.hidden, values, "query_head", 1, shape.out_bias),
    ]

    others = {"convolution": _convolution, "delta": _delta}
    kind = shape.kind_of(layer)
    return [
        *(attends if kind == "attention" else others[kind](shape, spec, linear)),
        *columns,
        *(spec for name in shape.norms for spec in norm(name, shape.hidden)),
    ]


_Spec = Callable[..., ParameterSpec]
_Linear = Callable[[str, int, int, Unit, int, bool], list[ParameterSpec]]


def _latent(
    shape: ModelShape,
    sizes: Latent,
    prefix: str,
    spec: _Spec,
    linear: _Linear,
) -> list[ParameterSpec]:
    """Latent attention before its last module. What all heads share is whole on every rank, which has a part of its
    gradient: that of its heads."""
    rank, heads = sizes.query_rank, shape.query_heads

    def narrow(name: str, of_norm: str, out: int, size: int) -> list[ParameterSpec]:
        weight = spec(f"{prefix}{name}.weight", (out, shape.hidden), partial=True)
        bias = [spec(f"{prefix}{name}.bias", (out,), partial=True)] if shape.qkv_bias else []
        return [weight, *bias, spec(f"{prefix}{of_norm}.weight", (size,), partial=True)]

    def wide(name: str, columns: int, into: int) -> list[ParameterSpec]:
        return linear(f"{prefix}{name}", heads * columns, into, "query_head", 0, False)

    return [
        *(narrow("q_a_proj", "q_a_layernorm", rank, rank) if rank else []),
        *(wide("q_b_proj", shape.head_dim, rank) if rank else wide("q_proj", shape.head_dim, shape.hidden)),
        *narrow("kv_a_proj_with_mqa", "kv_a_layernorm", sizes.rank + sizes.rotated, sizes.rank),
        *wide("kv_b_proj", sizes.plain + sizes.value, sizes.rank),
    ]


def _convolution(shape: ModelShape, spec: _Spec, linear: _Linear) -> list[ParameterSpec]:
    """A short convolution: a gated input, a causal convolution of each of its channels, and a gated output."""
    hidden, bias = shape.hidden, shape.convolution_bias
    parts = [linear(f"conv.{part}", hidden, hidden, "channel", 0, bias) for part in ("b", "c", "x")]
    kernel = [spec("conv.conv.weight", (hidden, 1, shape.kernel), 0, "channel")]
    kernel += [spec("conv.conv.bias", (hidden,), 0, "channel")] * bias
    out = linear("conv.out_proj", hidden, hidden, "channel", 1, bias)
    return [*_packed([each for part in parts for each in part], "in_proj"), *kernel, *out]


def _delta(shape: ModelShape, spec: _Spec, linear: _Linear) -> list[ParameterSpec]:
    """The gated delta rule: projections, a convolution, the decay of each head, a norm inside heads."""
    delta, hidden, block = shape.delta, shape.hidden, "linear_attn"
    assert delta is not None
    values = delta.heads * delta.group
    widths = {
        "query": delta.heads * delta.key_dim,
        "key": delta.heads * delta.key_dim,
        "value": values * delta.value_dim,
    }
    projections = {"in_proj_z": widths["value"], "in_proj_b": values, "in_proj_a": values}
    if shape.sorted_by_heads:
        projections = {"in_proj_qkvz": sum(widths.values()) + widths["value"], "in_proj_ba": 2 * values}

    def each(width: int, name: str) -> list[ParameterSpec]:
        return linear(f"{block}.{name}", width, hidden, "delta_head", 0, False)

    qkv = [] if shape.sorted_by_heads else [s for name, width in widths.items() for s in each(width, name)]
    kernels = [
        spec(f"{block}.{name}.weight", (width, 1, shape.kernel), 0, "delta_head")
        for name, width in widths.items()
    ]
    return [
        *_packed(qkv, "in_proj_qkv"),
        *(spec for name, width in projections.items() for spec in each(width, name)),
        *_packed(kernels, "conv1d"),
        spec(f"{block}.dt_bias", (values,), 0, "delta_head"),
        spec(f"{block}.A_log", (values,), 0, "delta_head"),
        spec(f"{block}.norm.weight", (delta.value_dim,), partial=True),
        *linear(f"{block}.out_proj", hidden, widths["value"], "delta_head", 1, False),
    ]


def _mixture(shape: ModelShape, mixture: Mixture, layer: int) -> list[ParameterSpec]:
    """A layer's router and its experts, each of which is split as an MLP is.

    Each tp rank computes a part of every expert's output, so it has a part of the gradients of the router and of what
    is added to the outputs.
    """
    prefix, stored = (f"model.layers.{layer}.{block}" for block in ("mlp", mixture.block))
    experts, columns, hidden = shape.experts, shape.intermediate, shape.hidden

    def whole(name: str, dims: tuple[int, ...], theirs: str) -> ParameterSpec:
        place = FileTensor(f"{stored}.{theirs}", dims, 0)
        return ParameterSpec(f"{prefix}.{name}", dims, "layer", layer, partial_gradient=True, packed=place)

    def of_columns(name: str, dims: tuple[int, ...], dim: int, place: FileTensor | str) -> ParameterSpec:
        packed, stacked = (place, None) if isinstance(place, FileTensor) else (None, place)
        named = f"{prefix}.experts.{name}"
        return ParameterSpec(named, dims, "layer", layer, dim, "column", packed=packed, stacked=stacked)

    router = [whole("gate.weight", (experts, hidden), f"{mixture.router}.weight")]
    if mixture.biased:
        router.append(whole("gate.bias", (experts,), f"{mixture.router}.bias"))
    if mixture.grouped:
        router.append(whole(f"gate.{CORRECTION}", (experts,), f"{mixture.router}.{CORRECTION}"))
    if mixture.shared is not None and mixture.shared.gate is not None:
        gate = f"{mixture.shared.gate}.weight"
        router.append(whole(gate, (1, hidden), gate))
    into, out = (experts, columns, hidden), (experts, hidden, columns)
    if not mixture.alternating:
        names = [f"{stored}.experts.{{}}.{theirs}.weight" for theirs in mixture.projections]
        specs = zip(("gate_proj", "up_proj", "down_proj"), (into, into, out), (1, 1, 2), names, strict=True)
        return router + [of_columns(*spec) for spec in specs]
    gate, up, down = (f"{stored}.experts.{theirs}" for theirs in mixture.projections)
    weights, biases = (experts, hidden, 2 * columns), (experts, 2 * columns)
    return [
        *router,
        of_columns("gate_proj", into, 1, FileTensor(gate, weights, 0, True, 2, 1)),
        of_columns("up_proj", into, 1, FileTensor(up, weights, 1, True, 2, 1)),
        of_columns("gate_proj_bias", into[:2], 1, FileTensor(f"{gate}_bias", biases, 0, False, 2, 1)),
        of_columns("up_proj_bias", into[:2], 1, FileTensor(f"{up}_bias", biases, 1, False, 2, 1)),
        of_columns("down_proj", out, 2, FileTensor(down, (experts, columns, hidden), 0, True)),
        whole("experts.down_proj_bias", out[:2], f"experts.{mixture.projections[2]}_bias"),
    ]


def _packed(parts: list[ParameterSpec], module: str) -> list[ParameterSpec]:
    """The weights and biases of linear modules as parts of one module, whose tensors files hold in this order."""
    specs: list[ParameterSpec] = []
    for kind in ("weight", "bias"):
        of_kind = [spec for spec in parts if spec.name.endswith(f".{kind}")]
        starts = [0, *accumulate(spec.length for spec in of_kind)]
        for spec, start in zip(of_kind, starts, strict=False):
            block, name, _ = spec.name.rsplit(".", 2)
            whole = FileTensor(f"{block}.{module}.{kind}", (starts[-1], *spec.shape[1:]), start)
            specs.append(replace(spec, name=f"{block}.{module}.{name}.{kind}", packed=whole))
    return specs
