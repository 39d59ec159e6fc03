"""The tested families of decoders: `Family` says what its fields mean. Pure Python."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefect_rlhf.rlhf_tasks.parallel.layout.family import (
    LAYER_NORMS,
    Family,
    Kinds,
    Latent,
    LayerKind,
    Mixture,
    Names,
    SharedExperts,
    Unless,
    Where,
)
from prefect_rlhf.rlhf_tasks.system.reading import shown

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
_GATED_EXPERT = SharedExperts(
    "shared_expert", columns="shared_expert_intermediate_size", gate="shared_expert_gate"
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


def _gemma4_kinds(config: Mapping[str, Any], layers: int) -> list[LayerKind]:
    return ["global" if (i + 1) % 6 == 0 or i == layers - 1 else "attention" for i in range(layers)]


_LFM2 = Family(
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
    "gemma3_text": replace(
        _GEMMA2,
        title="Gemma 3 (text)",
        qk_norm="each head",
        omitted={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "gemma4_text": replace(
        _GEMMA2,
        title="Gemma 4 (text)",
        qk_norm="each head",
        kinds=Kinds({"sliding_attention": "attention", "full_attention": "global"}, _gemma4_kinds),
        varied=True,
        mixture=Mixture(
            "moe_intermediate_size",
            count=0,
            per_token=0,
            router="router",
            shared=SharedExperts("", columns="intermediate_size"),
            beside="enable_moe_block",
        ),
        keys={"num_experts_per_tok": ("top_k_experts",)},
    ),
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
            shared=_GATED_EXPERT,
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
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        title="LFM2-MoE",
        columns=None,
        files={**_LFM2.files, "model.rotary_emb.": "model.pos_emb."},
        keys={**_LFM2.keys, "first_k_dense_replace": ("num_dense_layers",)},
        mixture=Mixture(
            "moe_intermediate_size",
            count=32,
            per_token=4,
            block="feed_forward",
            projections=("w1", "w3", "w2"),
            first_dense=2,
            grouped=True,
            correction="expert_bias",
            least_sum=1e-6,
        ),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        title="Qwen3.5-MoE (text)",
        kv_heads=2,
        mixture=Mixture("moe_intermediate_size", count=256, per_token=8, shared=_GATED_EXPERT),
    ),
    "qwen3_next": replace(
        _QWEN3_5,
        title="Qwen3-Next",
        kv_heads=2,
        sorted_by_heads=True,
        mixture=Mixture("moe_intermediate_size", count=512, per_token=10, shared=_GATED_EXPERT, among=_AMONG),
    ),
}
"""The tested families: tests compare their logits, values and gradients with those of transformers."""

TESTED = ", ".join(family.title for family in FAMILIES.values())

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The config keys of the number of experts: transformers writes any of them."""
