"""What the families of decoders have in their layers: tested ones from a table, others read from their weights.

A family is the models of one `model_type`. Pure Python.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, shown

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
"""The norms of a layer of Llama."""


HeadNorms = Literal["each head", "all heads"]
"""RMS norms on query and key: over each head, with weights that all heads share, or over all heads together."""

Packing = Literal["qkv", "gate_up"]
"""Linear modules that files hold as one tensor: q, k and v; gate and up."""


class Where(NamedTuple):
    """A value where a config key is true, else None."""

    key: str
    value: HeadNorms


class Unless(NamedTuple):
    """True unless a config key is false."""

    key: str


class Latent(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): default sizes of what queries, and
    keys with values, are computed from; of a head's rotated and other columns of query and key; of its value."""

    query_rank: int
    rank: int
    rotated: int
    plain: int
    value: int


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """MLPs of a mixture that every token passes besides the experts that the router gives it to; side by side, they
    are one.

    block    the name of the module
    columns  the config key of their columns
    count    the config key of their number, where each has the columns of an expert
    gate     the name of a linear module whose sigmoid is a factor of what they give; None: there is none
    """

    block: str
    columns: str | None = None
    count: str | None = None
    gate: str | None = None


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a family's layers have in place of one MLP: experts, and a router that gives each token to some of them.

    Each default is of a config key that may be omitted.

    width            the config key of the columns of an expert
    count, per_token default numbers of experts, and of those that a token is given to
    block            the name in files of what is `mlp` in the module
    projections      the names in files of an expert's gate, up and down
    router           the name in files of the router
    biased           router and experts have biases
    alternating      files hold all experts of a layer in one tensor [experts, in, out], gate's and up's columns in
                     turns; it may be quantised as MXFP4
    clamped          gates and columns are bounded, as GPT-OSS does (`clamped`, model/tensor_parallel.py)
    shared           the experts that every token passes; None: there are none
    first_dense      default number of the first layers that have one MLP in place of experts (first_k_dense_replace);
                     None: there is no such key
    among            config keys that name further layers without experts, as Qwen's do
    groups           default numbers of groups, and of those that a token chooses experts of
    grouped          scores are sigmoids; a token chooses groups of experts first, and a further number of each expert
                     counts in its choice (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)
    """

    width: str
    count: int
    per_token: int
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    biased: bool = False
    alternating: bool = False
    clamped: bool = False
    shared: SharedExperts | None = None
    first_dense: int | None = None
    among: tuple[str, ...] = ()
    grouped: bool = False
    groups: tuple[int, int] = (1, 1)


LayerKind = Literal["attention", "delta", "convolution"]
"""What mixes the tokens of a sequence in a layer, and so what generation keeps of a sequence: the keys and values of
all its tokens; a state of the gated delta rule and the last inputs of a convolution; the latter alone."""


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of layers with the gated delta rule. Each key head belongs to `group` value heads, which stay together.

    key_dim, value_dim  sizes of a key (and query), and of a value
    """

    heads: int
    group: int
    key_dim: int
    value_dim: int

    @property
    def state(self) -> int:
        """Elements of a sequence's state."""
        return self.heads * self.group * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class Kinds:
    """Which layers of a family are of which kind.

    names    the values of the config's `layer_types` -> kind
    default  the kinds where the config has no `layer_types`: told the config and the number of layers. Raises
             ValueError, as `columns` of `Family` does, for what is wrong in the config
    """

    names: Mapping[str, LayerKind]
    default: Callable[[Mapping[str, Any], int], list[LayerKind]]


@dataclass(frozen=True, slots=True)
class Names:
    """What the modules of a layer are called, in transformers' classes as here.

    attention, mlp         the two blocks
    q_norm, k_norm         the norms inside heads
    out, gate, up, down    linear modules: the last one of the heads; those of an MLP
    qkv, gate_up           those that a family packs several in
    """

    attention: str = "self_attn"
    mlp: str = "mlp"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    out: str = "o_proj"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    qkv: str = "qkv_proj"
    gate_up: str = "gate_up_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of the models of one `model_type`, and defaults of keys that their configs may omit.

    title                         what people call it
    qkv_bias, out_bias, mlp_bias  True, False, or the config key that says which (False where it is absent)
    sinks                         each head may attend to nothing, to a score of its own
    qk_norm                       norms on query and key; None: none
    head_dim                      default size of a head; None: hidden_size // heads
    kv_heads                      default number of KV heads; None: as many as query heads
    tied                          default of tie_word_embeddings
    norms                         the norms of a layer over hidden states, in the order of the forward pass
    gated                         the MLP is down(act(gate(x)) * up(x)); False: down(act(up(x)))
    packed                        what files hold as one tensor
    mixture                       the experts of layers; None: a layer has one MLP
    latent                        keys and values of all heads are computed from one narrow vector; None: they are not
    norm_bias                     norms subtract the mean and add a bias (LayerNorm)
    learned_positions             an embedding of positions is added to that of tokens; no rotary angles
    columns_per_hidden            default columns of the MLP, in hidden sizes; None: the config must say
    columns                       columns of the MLP, told the config and its `intermediate_size`; None: as many
    kinds                         the kinds of layers; None: attention alone
    gated_attention               each head's query is followed by a gate of the head's output
    sorted_by_heads               delta layers have two input projections, whose rows are sorted by key heads; False:
                                  a packed one of query, key and value, and one each of gate, beta and decay
    names                         of the modules of a layer
    keys                          key of Llama's configs -> the keys that mean the same, the first of which counts;
                                  none: there is no such key, and its default holds
    files                         beginning of a parameter's name -> what stands in files instead
    transposed                    files hold the weights of linear modules as [in, out]
    embedding_factor              config key of a factor on the embeddings of tokens; None: there is none
    logits_factor, logits_divisor likewise of logits
    refused                       config keys that must be false: of what is unknown here
    needed                        config keys that may be absent, but not null
    """

    title: str = ""
    qkv_bias: bool | str | Unless = False
    out_bias: bool | str | Unless = False
    mlp_bias: bool | str | Unless = False
    sinks: bool = False
    qk_norm: HeadNorms | Where | None = None
    head_dim: int | None = None
    kv_heads: int | None = None
    tied: bool = False
    norms: tuple[str, ...] = LAYER_NORMS
    gated: bool = True
    packed: tuple[Packing, ...] = ()
    mixture: Mixture | None = None
    latent: Latent | None = None
    norm_bias: bool = False
    learned_positions: bool = False
    columns_per_hidden: int | None = None
    columns: Callable[[Mapping[str, Any], int], int] | None = None
    kinds: Kinds | None = None
    gated_attention: bool = False
    sorted_by_heads: bool = False
    names: Names = Names()
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    transposed: bool = False
    embedding_factor: str | None = None
    logits_factor: str | None = None
    logits_divisor: str | None = None
    refused: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()


_GEMMA = Family(
    "Gemma", qkv_bias="attention_bias", out_bias="attention_bias", head_dim=256, kv_heads=16, tied=True
)
_SANDWICH = (*LAYER_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GEMMA2 = replace(_GEMMA, title="Gemma 2", kv_heads=4, norms=_SANDWICH)
_OLMO2 = Family(
    "OLMo 2",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="all heads",
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_GROUPED = Mixture(
    "moe_intermediate_size",
    count=128,
    per_token=8,
    shared=SharedExperts("shared_experts", count="n_shared_experts"),
    first_dense=1,
    grouped=True,
)
_AMONG = ("mlp_only_layers", "decoder_sparse_step")
_GLM = Family("GLM-4", qkv_bias=Unless("attention_bias"), head_dim=128, kv_heads=2, packed=("gate_up",))

_COHERE = Family(
    "Cohere",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    tied=True,
    norms=("input_layernorm",),
    logits_factor="logit_scale",
    refused=("use_qk_norm",),
    needed=("logit_scale",),
)


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    """Raises ValueError, naming the key, for what is not a positive number."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_FACTOR:
        raise ValueError(f"{key}={shown(value)} in its config is not a positive number")
    return value


_MOST_FACTOR = 1e6


def _lfm2_columns(config: Mapping[str, Any], columns: int) -> int:
    """Two thirds, times a factor, rounded up to a multiple; unless the config says not to."""
    if config.get("block_auto_adjust_ff_dim") is False:
        return columns
    factor, multiple = (
        _number(config, "block_ffn_dim_multiplier", 1.0),
        _number(config, "block_multiple_of", 256),
    )
    return math.ceil(int(factor * int(2 * columns / 3)) / multiple) * math.ceil(multiple)


def _lfm2_kinds(config: Mapping[str, Any], layers: int) -> list[LayerKind]:
    attending = config.get("full_attn_idxs")
    if attending is not None and not isinstance(attending, list):
        raise ValueError(f"full_attn_idxs={shown(attending)} in its config is not a list of layers")
    return ["attention" if attending is None or i in attending else "convolution" for i in range(layers)]


def _qwen_kinds(config: Mapping[str, Any], layers: int) -> list[LayerKind]:
    every = _number(config, "full_attention_interval", 4)
    return ["delta" if (i + 1) % every else "attention" for i in range(layers)]


_QWEN3_5 = Family(
    "Qwen3.5 (text)",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="each head",
    head_dim=256,
    kv_heads=4,
    kinds=Kinds({"full_attention": "attention", "linear_attention": "delta"}, _qwen_kinds),
    gated_attention=True,
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family("Mistral", kv_heads=8),
    "qwen2": Family("Qwen2", qkv_bias=True, kv_heads=32),
    "qwen3": Family(
        "Qwen3",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="each head",
        head_dim=128,
        kv_heads=32,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, title="Gemma 3 (text)", qk_norm="each head"),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, title="OLMo 3"),
    "glm": _GLM,
    "glm4": replace(
        _GLM, title="GLM-4-0414", norms=(*LAYER_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")
    ),
    "phi3": Family("Phi-3", packed=("qkv", "gate_up")),
    "mixtral": Family(
        "Mixtral",
        kv_heads=8,
        mixture=Mixture(
            "intermediate_size",
            count=8,
            per_token=2,
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="each head",
        kv_heads=4,
        mixture=Mixture("moe_intermediate_size", count=128, per_token=8, among=_AMONG),
    ),
    "qwen2_moe": Family(
        "Qwen2-MoE",
        qkv_bias=Unless("qkv_bias"),
        kv_heads=16,
        mixture=Mixture(
            "moe_intermediate_size",
            count=60,
            per_token=4,
            shared=SharedExperts(
                "shared_expert", columns="shared_expert_intermediate_size", gate="shared_expert_gate"
            ),
            among=_AMONG,
        ),
    ),
    "glm4_moe": Family(
        "GLM-4.5 (MoE)",
        qkv_bias="attention_bias",
        qk_norm=Where("use_qk_norm", "each head"),
        kv_heads=8,
        mixture=_GROUPED,
    ),
    "glm4_moe_lite": Family(
        "GLM-4.7-Flash",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mixture=replace(_GROUPED, count=64, per_token=4, among=("mlp_layer_types",)),
        latent=Latent(query_rank=768, rank=512, rotated=64, plain=192, value=256),
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mixture=replace(_GROUPED, count=256, groups=(8, 4), first_dense=3),
        latent=Latent(query_rank=1536, rank=512, rotated=64, plain=128, value=128),
    ),
    "gpt_oss": Family(
        "GPT-OSS",
        qkv_bias=Unless("attention_bias"),
        out_bias=Unless("attention_bias"),
        sinks=True,
        head_dim=64,
        kv_heads=8,
        mixture=Mixture(
            "intermediate_size",
            count=128,
            per_token=4,
            projections=("gate_up_proj", "gate_up_proj", "down_proj"),
            router="router",
            biased=True,
            alternating=True,
            clamped=True,
        ),
    ),
    "granite": Family(
        "Granite",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        embedding_factor="embedding_multiplier",
        logits_divisor="logits_scaling",
    ),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, title="Cohere 2", needed=("logit_scale", "sliding_window")),
    "starcoder2": Family(
        "StarCoder2",
        qkv_bias=Unless("use_bias"),
        out_bias=Unless("use_bias"),
        mlp_bias=Unless("use_bias"),
        kv_heads=2,
        tied=True,
        gated=False,
        norm_bias=True,
        names=Names(up="c_fc", down="c_proj"),
    ),
    "gpt2": Family(
        "GPT-2",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
        norms=("ln_1", "ln_2"),
        gated=False,
        packed=("qkv",),
        norm_bias=True,
        learned_positions=True,
        columns_per_hidden=4,
        names=Names("attn", out="c_proj", up="c_fc", down="c_proj", qkv="c_attn"),
        keys={
            "num_hidden_layers": ("n_layer", "num_hidden_layers"),
            "hidden_size": ("n_embd", "hidden_size"),
            "num_attention_heads": ("n_head", "num_attention_heads"),
            "max_position_embeddings": ("n_positions", "max_position_embeddings"),
            "intermediate_size": ("n_inner",),
            "num_key_value_heads": (),
            "head_dim": (),
        },
        files={
            "model.embed_tokens.": "transformer.wte.",
            "model.embed_positions.": "transformer.wpe.",
            "model.layers.": "transformer.h.",
            "model.norm.": "transformer.ln_f.",
        },
        transposed=True,
        refused=("add_cross_attention",),
    ),
    "lfm2": Family(
        "LFM2",
        qk_norm="each head",
        kv_heads=8,
        tied=True,
        norms=("operator_norm", "ffn_norm"),
        columns=_lfm2_columns,
        kinds=Kinds({"full_attention": "attention", "conv": "convolution"}, _lfm2_kinds),
        names=Names(
            mlp="feed_forward",
            q_norm="q_layernorm",
            k_norm="k_layernorm",
            out="out_proj",
            gate="w1",
            up="w3",
            down="w2",
        ),
        keys={
            "tie_word_embeddings": ("tie_embedding", "tie_word_embeddings"),
            "intermediate_size": ("block_ff_dim", "intermediate_size"),
        },
        files={"model.norm.": "model.embedding_norm."},
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": replace(
        _QWEN3_5,
        title="Qwen3-Next",
        kv_heads=2,
        sorted_by_heads=True,
        mixture=Mixture(
            "moe_intermediate_size",
            count=512,
            per_token=10,
            shared=SharedExperts(
                "shared_expert", columns="shared_expert_intermediate_size", gate="shared_expert_gate"
            ),
            among=_AMONG,
        ),
    ),
}
"""The tested families: tests compare their logits, values and gradients with those of transformers."""

TESTED = ", ".join(family.title for family in FAMILIES.values())

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The config keys of the number of experts: transformers writes any of them."""

_EXPERT_KEYS = (*EXPERT_COUNTS, "moe_intermediate_size")
_PACKED = ("gpt_neox", "falcon")
_KNOWN = f"Use a decoder of one of the families {TESTED}, or another dense one with layers like theirs."
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
_ROPE_OF_THE_BATCH = ("dynamic", "longrope")  # as in transformers' modeling_rope_utils.py
"""Kinds of rotary embedding whose angles depend only on the token's position."""


def kinds_of(config: Mapping[str, Any], family: Family, layers: int) -> tuple[LayerKind, ...]:
    """The kind of each layer; none where all have attention. Raises ValueError, without the model's name, for a list
    that is not one of the family's kinds for each layer."""
    if family.kinds is None:
        return ()
    named = config.get("layer_types")
    if named is None:
        return tuple(family.kinds.default(config, layers))
    kinds = cast(list[Any], named if isinstance(named, list) else [])
    if len(kinds) != layers:
        raise ValueError(f"layer_types in its config is not a list of {layers} kinds, one for each layer")
    unknown = next((kind for kind in kinds if kind not in list(family.kinds.names)), None)
    if unknown is not None:
        raise ValueError(
            f"layer_types in its config has {shown(unknown)}, which is not one of {', '.join(family.kinds.names)}"
        )
    return tuple(family.kinds.names[kind] for kind in kinds)


def family_of(
    config: Mapping[str, Any], source: str, weights: Mapping[str, tuple[int, ...]] | None
) -> Family:
    """The family of a config.

    source   names the model in errors
    weights  the shapes of its tensors by name, from which an untested family is read; None: they are not at hand
    Raises ConfigError, with the reason, when the engine cannot split such a model or would compute something else.
    """
    kind = config.get("model_type")
    if isinstance(config.get("text_config"), Mapping):
        raise ConfigError(
            f"Model {source!r} ({shown(kind)}): its language model lies below a model of images or sound "
            "(text_config), whose folder is not read. Save the language model alone by transformers, and copy the "
            f"tokenizer's files to it: AutoModelForCausalLM.from_pretrained({source!r})"
            ".save_pretrained(NEW_FOLDER, save_original_format=False)."
        )
    _refuse_unsplittable(config, kind, source)
    _check_arithmetic(config, source)
    if isinstance(kind, str) and kind in FAMILIES:
        family = FAMILIES[kind]
        unknown = next((key for key in family.refused if config.get(key)), None)
        if unknown is not None:
            raise ConfigError(f"Model {source!r} ({kind}) has {unknown}, which is unknown here. {_KNOWN}")
        null = next((key for key in family.needed if key in config and config[key] is None), None)
        if null is not None:
            raise ConfigError(
                f"Model {source!r}: {null} is null in its config, without which a {family.title} is not computed. "
                "Write its number, or leave the key out for the default."
            )
        return family
    if not isinstance(kind, str) or weights is None:
        raise ConfigError(
            f"Model {source!r} has model_type {shown(kind)}, which is not a decoder of a tested family ({TESTED}). "
            "How another one can be split is read from the weights in its folder."
        )
    return read_family(weights, source)


def _refuse_unsplittable(config: Mapping[str, Any], kind: Any, source: str) -> None:
    if "auto_map" in config:
        raise ConfigError(
            f"Model {source!r} brings its own code (auto_map), which is never run. If transformers has such "
            "models built in, remove auto_map from config.json; else use another model."
        )
    mixture = FAMILIES[kind].mixture if isinstance(kind, str) and kind in FAMILIES else None
    experts = [key for key in _EXPERT_KEYS if config.get(key)]
    if experts and mixture is None:
        raise ConfigError(
            f"Model {source!r} ({shown(kind)}) is a mixture of experts ({experts[0]}) of a family whose router and "
            f"experts are unknown here. {_KNOWN}"
        )
    if mixture is not None:
        _check_router(config, source)
    if isinstance(kind, str) and kind in _PACKED:
        raise ConfigError(
            f"Model {source!r} ({kind}) has packed projections (query_key_value), which cannot be split. {_KNOWN}"
        )


def _check_router(config: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError for a value of a router that is none."""
    for key in ("router_jitter_noise", "router_aux_loss_coef", "routed_scaling_factor"):
        value = config.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < math.inf):
            raise ConfigError(
                f"Model {source!r}: {key}={shown(value)} in its config is not a number of at least 0."
            )
    normalised = config.get("norm_topk_prob")
    if normalised is not None and not isinstance(normalised, bool):
        raise ConfigError(
            f"Model {source!r}: norm_topk_prob={shown(normalised)} in its config is neither true nor false."
        )


def _check_arithmetic(config: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError for settings under which the engine would compute something else than the model."""
    scaling: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(
            f"Model {source!r}: rope_scaling={shown(scaling)} in its config is not a JSON object."
        )
    whole = cast(Mapping[str, Any], scaling)
    by_layer_type = [cast(Mapping[str, Any], part) for part in whole.values() if isinstance(part, Mapping)]
    for rope in by_layer_type or [whole]:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _STATIC_ROPE:
            why = (
                "the angles that it gives a token depend on the longest sequence of its batch"
                if kind in _ROPE_OF_THE_BATCH
                else "the engine has not been tested with it"
            )
            raise ConfigError(
                f"Model {source!r} has rope_type {shown(kind)}: {why}. "
                f"Use a model with one of {', '.join(_STATIC_ROPE)}."
            )
    quantised = config.get("quantization_config")
    if quantised and not _reads(config.get("model_type"), quantised):
        raise ConfigError(
            f"Model {source!r} has quantised weights (quantization_config), which cannot be trained. "
            "Save it unquantised."
        )
    if config.get("use_bidirectional_attention"):
        raise ConfigError(f"Model {source!r} has use_bidirectional_attention. Use a causal decoder.")


def _reads(kind: Any, quantised: Any) -> bool:
    """Whether the weights of a model_type are read that its quantization_config describes: MXFP4, as floats."""
    mixture = FAMILIES[kind].mixture if isinstance(kind, str) and kind in FAMILIES else None
    if mixture is None or not mixture.alternating or not isinstance(quantised, Mapping):
        return False
    return cast(Mapping[str, Any], quantised).get("quant_method") == "mxfp4"


_FIRST = "model.layers.0."
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_KNOWN_IN_LAYER = re.compile(
    rf"self_attn\.({'|'.join(_ATTENTION)})\.(weight|bias)|mlp\.({'|'.join(_MLP)})\.(weight|bias)"
    r"|self_attn\.[qk]_norm\.weight|\w+norm\.weight"
)


def read_family(weights: Mapping[str, tuple[int, ...]], source: str) -> Family:
    """The family of a model whose layers are of Llama's kind, read from the names and shapes of its first layer.

    weights  tensor name -> shape; source: names the model in errors
    Raises ConfigError, naming what is there or missing, for layers of another kind.
    """
    layer = {
        name.removeprefix(_FIRST): shape
        for name, shape in weights.items()
        if name.startswith(_FIRST) and "rotary_emb" not in name
    }
    odd = sorted(name for name in layer if not _KNOWN_IN_LAYER.fullmatch(name))
    required = [f"self_attn.{name}.weight" for name in _ATTENTION] + [
        f"mlp.{name}.weight" for name in _MLP[1:]
    ]
    lacking = [name for name in required if name not in layer]
    if odd or lacking:
        what = f"has {odd[0]}, which Llama's have not" if odd else f"lacks {lacking[0]}"
        raise ConfigError(
            f"Model {source!r}: its first layer {what}, so it is unknown how to split it. {_KNOWN}"
        )
    hidden = layer["self_attn.q_proj.weight"][1:]
    norms = {name.removesuffix(".weight"): shape for name, shape in layer.items() if "norm" in name}
    if not norms and "model.norm.weight" not in weights:
        raise ConfigError(
            f"Model {source!r}: its norms have no weights (as OLMo 1's), which is unknown here. {_KNOWN}"
        )
    heads = [name for name in norms if name.startswith("self_attn.")]
    unlike = [name for name in norms if name not in heads and norms[name] != hidden]
    rows = {name: layer[name.replace("_norm", "_proj.weight")][:1] for name in heads}
    over_all = rows.get("self_attn.q_norm") == norms.get("self_attn.q_norm")
    unlike += [
        name
        for name in heads
        if len(heads) == 1 or len(norms[name]) > 1 or (over_all and norms[name] != rows[name])
    ]
    if unlike:
        raise ConfigError(
            f"Model {source!r}: {unlike[0]} in its first layer is a norm of shape {list(norms[unlike[0]])}, neither "
            f"over hidden states nor over each head of query and key nor over all, so it cannot be split. {_KNOWN}"
        )
    return Family(
        qkv_bias="self_attn.q_proj.bias" in layer,
        out_bias="self_attn.o_proj.bias" in layer,
        mlp_bias="mlp.up_proj.bias" in layer,
        qk_norm=None if not heads else "all heads" if over_all else "each head",
        tied="lm_head.weight" not in weights,
        norms=tuple(name for name in norms if name not in heads),
        gated="mlp.gate_proj.weight" in layer,
    )
