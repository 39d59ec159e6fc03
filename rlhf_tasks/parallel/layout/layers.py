"""The parameters of a layer: names, shapes and splits. Pure Python."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from prefect_rlhf.rlhf_tasks.parallel.layout.family import Family, Latent, Mixture, VariedLayers
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import (
    CORRECTION,
    FACTOR,
    KV_HEADS,
    FileTensor,
    ModelShape,
    ParameterSpec,
    Unit,
)


def layer_parameters(shape: ModelShape, layer: int, family: Family) -> list[ParameterSpec]:
    """Those of one layer, in the order of the forward pass."""
    prefix = f"model.layers.{layer}."
    heads, kind, varied = shape.heads(layer), shape.kind_of(layer), shape.varied
    query, kv = shape.query_heads * heads.dim, heads.kv * heads.dim
    of_kv = KV_HEADS.get(kind, "kv_head")
    of_keys = shape.of_keys(layer)
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
        units = {"query_head": shape.query_heads, of_kv: heads.kv}
        units["delta_head"] = shape.delta.heads if shape.delta else rows
        unit_size = rows // units.get(unit, rows) if unit else 1
        return ParameterSpec(prefix + name, dims, "layer", layer, shard_dim, unit, unit_size, partial)

    def linear(name: str, out: int, into: int, unit: Unit, split: int, bias: bool) -> list[ParameterSpec]:
        """A column-parallel (split=0) or row-parallel (split=1) linear module."""
        partial = unit in KV_HEADS.values()
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
        "each head": [
            spec(name, (heads.dim,), partial=True) for name in ((q_norm, k_norm) if of_keys else (q_norm,))
        ],
        "all heads": [
            spec(q_norm, (query,), 0, "query_head"),
            spec(k_norm, (kv,), 0, of_kv, partial=True),
        ],
    }[shape.qk_norm]
    into_heads = [
        *linear(f"{attention}.q_proj", query * per_head, shape.hidden, "query_head", 0, shape.qkv_bias),
        *(
            part
            for name in of_keys
            for part in linear(f"{attention}.{name}", kv, shape.hidden, of_kv, 0, shape.qkv_bias)
        ),
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
        columns = mlp(names.mlp, shape.dense_width(layer))
    elif mixture.beside is not None:
        columns = [*mlp(names.mlp, shape.dense_width(layer)), *_experts_beside(shape, layer)]
    else:
        columns = _mixture(shape, mixture, layer, names.mlp)
        if mixture.shared is not None and shape.shared_columns:
            columns += mlp(f"{names.mlp}.{mixture.shared.block}", shape.shared_columns)
    attends = [
        *into_heads,
        *head_norms,
        *([sinks] if shape.sinks else []),
        *linear(f"{attention}.{names.out}", shape.hidden, values, "query_head", 1, shape.out_bias),
    ]

    others = {"convolution": _convolution, "delta": _delta}
    return [
        *(attends if kind in KV_HEADS else others[kind](shape, spec, linear)),
        *columns,
        *(spec for name in shape.norms for spec in norm(name, shape.hidden)),
        *([] if varied is None else _further(shape, varied, spec)),
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


def _further(shape: ModelShape, varied: VariedLayers, spec: _Spec) -> list[ParameterSpec]:
    """What else a layer of Gemma 4 has. Every rank computes all of it, so each has its whole gradient."""
    specs: list[ParameterSpec] = []
    if shape.experts:
        norms = (
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        )
        specs += [spec(f"{name}.weight", (shape.hidden,)) for name in norms]
    if varied.inputs:
        specs += [
            spec("per_layer_input_gate.weight", (varied.inputs, shape.hidden)),
            spec("per_layer_projection.weight", (shape.hidden, varied.inputs)),
            spec("post_per_layer_input_norm.weight", (shape.hidden,)),
        ]
    return [*specs, spec(FACTOR, (1,))]


def _experts_beside(shape: ModelShape, layer: int) -> list[ParameterSpec]:
    """The router of Gemma 4 and its experts, whose gates and columns files hold one after the other."""
    prefix = f"model.layers.{layer}."
    experts, columns, hidden = shape.experts, shape.intermediate, shape.hidden

    def whole(name: str, *dims: int) -> ParameterSpec:
        return ParameterSpec(
            prefix + name,
            dims,
            "layer",
            layer,
            partial_gradient=True,
            packed=FileTensor(prefix + name, dims, 0),
        )

    def of_columns(name: str, dim: int, *dims: int, packed: FileTensor | None = None) -> ParameterSpec:
        return ParameterSpec(f"{prefix}experts.{name}", dims, "layer", layer, dim, "column", packed=packed)

    into = (experts, columns, hidden)
    gate = FileTensor(f"{prefix}experts.gate_up_proj", (experts, 2 * columns, hidden), 0, dim=1)
    return [
        whole("router.proj.weight", experts, hidden),
        whole("router.scale", hidden),
        whole("router.per_expert_scale", experts),
        of_columns("gate_proj", 1, *into, packed=gate),
        of_columns("up_proj", 1, *into, packed=gate._replace(start=columns)),
        of_columns("down_proj", 2, experts, hidden, columns),
    ]


def _mixture(shape: ModelShape, mixture: Mixture, layer: int, name: str) -> list[ParameterSpec]:
    """A layer's router and its experts, each of which is split as an MLP is, in the module `name`.

    Each tp rank computes a part of every expert's output, so it has a part of the gradients of the router and of what
    is added to the outputs.
    """
    prefix, stored = (f"model.layers.{layer}.{block}" for block in (name, mixture.block))
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
        router.append(whole(f"gate.{CORRECTION}", (experts,), mixture.correction))
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
