"""A model's sizes, read from `config.json`, and what is known of each of its parameters.

Pure Python: `transformers.AutoConfig` would import torch (1.5 s), which neither the planner nor the flow needs.
Parameter names are Hugging Face's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from prefect_rlhf.rlhf_tasks.parallel.layout.below_images import language_config
from prefect_rlhf.rlhf_tasks.parallel.layout.config_keys import ConfigKeys
from prefect_rlhf.rlhf_tasks.parallel.layout.family import (
    LAYER_NORMS,
    DeltaHeads,
    HeadNorms,
    Latent,
    LayerKind,
    Packing,
    VariedLayers,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.recognition import family_of, kinds_of
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

Unit = Literal["query_head", "kv_head", "global_kv_head", "column", "vocab", "channel", "delta_head"]
"""The units that a sharded dim consists of. A unit is never divided between tp ranks. KV heads of layers of the kind
"global" may be other ones than those of the rest."""

KV_HEADS: Mapping[LayerKind, Unit] = {"attention": "kv_head", "global": "global_kv_head"}
"""The kinds of layers that keep keys and values."""

StagePlace = Literal["layer", "first", "last", "ends"]
"""Which stages hold a parameter: its layer's, the first, the last, or first and last (tied embeddings)."""


class Heads(NamedTuple):
    """KV heads of a layer, and columns of a head."""

    kv: int
    dim: int


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

FACTOR = "layer_scalar"
"""What the output of a layer of Gemma 4 is multiplied by. It has no gradient."""

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
    varied             how layers differ otherwise; None: they do not
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
    varied: VariedLayers | None = None
    gated_attention: bool = False
    sorted_by_heads: bool = False

    def kind_of(self, layer: int) -> LayerKind:
        """What mixes tokens in a layer."""
        return self.kinds[layer % len(self.kinds)] if self.kinds else "attention"

    def share(self, *kinds: LayerKind) -> float:
        """The share of layers of some kinds."""
        return sum(self.kind_of(layer) in kinds for layer in range(self.layers)) / self.layers

    @property
    def most_tp(self) -> int:
        """The most tp ranks of which none is empty."""
        heads = self.query_heads if self.delta is None else min(self.query_heads, self.delta.heads)
        return min(heads, self.least_columns, self.vocab)

    @property
    def keeps_states(self) -> bool:
        """Whether generation keeps more of a sequence than the keys and values of its tokens."""
        return any(kind not in KV_HEADS for kind in self.kinds)

    def heads(self, layer: int) -> Heads:
        """KV heads of a layer that attends, and columns of a head."""
        if self.varied is not None and self.kind_of(layer) == "global":
            return Heads(self.varied.kv_heads, self.varied.head_dim)
        return Heads(self.kv_heads, self.head_dim)

    def keys_of(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to: itself, unless it shares those of another."""
        first_sharing = self.layers - (0 if self.varied is None else self.varied.sharing)
        if layer < first_sharing:
            return layer
        return max(other for other in range(first_sharing) if self.kind_of(other) == self.kind_of(layer))

    def of_keys(self, layer: int) -> tuple[str, ...]:
        """The linear modules of a layer's keys and values; none where it has those of another layer."""
        if self.keys_of(layer) != layer:
            return ()
        without = self.varied is not None and self.varied.values_are_keys and self.kind_of(layer) == "global"
        return ("k_proj",) if without else ("k_proj", "v_proj")

    def dense_width(self, layer: int) -> int:
        """Columns of a layer's MLP, beside or in place of experts."""
        columns = self.intermediate
        if self.experts:
            columns = self.shared_columns if self.varied is not None else self.dense_columns
        doubled = self.varied is not None and self.varied.doubled and self.keys_of(layer) != layer
        return 2 * columns if doubled else columns

    @staticmethod
    def from_config(
        config: Mapping[str, Any],
        source: str = "inline config",
        weights: Mapping[str, tuple[int, ...]] | None = None,
    ) -> "ModelShape":
        """Read a Hugging Face config that is already a mapping; `source` names it in errors (ConfigError). Of a model
        of images or sound, it is that of the language model below.

        weights  as in `family_of`
        """
        if not isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]: users write it
            raise ConfigError(f"Model {source!r}: the config is not a JSON object.")
        config = language_config(config)
        family = family_of(config, source, weights)
        read = ConfigKeys(config, source, family.keys, family.omitted)
        heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
        mixture = read.mixture(family.mixture)
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
            varied=read.varied(kinds, read.count("vocab_size")) if family.varied else None,
            gated_attention=family.gated_attention,
            sorted_by_heads=family.sorted_by_heads,
        )
        if not family.keys.get("head_dim", ("head_dim",)) and hidden % heads:
            raise ConfigError(
                f"Model {source!r}: its hidden size {hidden} is not a multiple of {heads} heads."
            )
        for kv_heads in dict.fromkeys((shape.kv_heads, shape.varied.kv_heads if shape.varied else 1)):
            if heads % kv_heads:
                raise ConfigError(
                    f"Model {source!r}: {heads} query heads are not a multiple of {kv_heads} KV heads."
                )
        return shape

    @property
    def mean_head_dim(self) -> int:
        """Columns of a head of the layers that attend: of query and key, and of value, on average."""
        if self.latent is not None:
            return math.ceil((self.head_dim + self.latent.value) / 2)
        attending = [layer for layer in range(self.layers) if self.kind_of(layer) in KV_HEADS]
        return math.ceil(sum(self.heads(layer).dim for layer in attending) / max(1, len(attending)))

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
