"""Tiny models of every verified family, for tests of the engine. Import as `tests.tiny_models`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Starcoder2Config,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GenericForSequenceClassification

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch, micro_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import stored_rows

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "gemma4_text": Gemma4TextConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "glm": GlmConfig,
    "glm4": Glm4Config,
    "phi3": Phi3Config,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "glm4_moe": Glm4MoeConfig,
    "granite": GraniteConfig,
    "cohere": CohereConfig,
    "cohere2": Cohere2Config,
    "starcoder2": Starcoder2Config,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "deepseek_v3": DeepseekV3Config,
    "gpt2": GPT2Config,
    "gpt_oss": GptOssConfig,
    "lfm2": Lfm2Config,
    "lfm2_moe": Lfm2MoeConfig,
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
    "qwen3_next": Qwen3NextConfig,
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CENTRED = ("gemma2", "gemma3", "qwen3_next", "qwen3_5")
"""Families whose norms add 1 to their weights."""

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 4,
    "v_head_dim": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
}

_WITHOUT: dict[str, Any] = {
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "enable_moe_block": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
}
GEMMA4: dict[str, dict[str, Any]] = {
    # As its large ones: layers that attend to all tokens have larger heads, fewer KV heads, and values that are keys.
    "dense": {
        **_WITHOUT,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 2.0,
    },
    "experts": {
        **_WITHOUT,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 14,
    },
    # As its small ones: the last two layers share keys and values, every layer has an input of its own.
    "inputs": {
        **_WITHOUT,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 5,
        "vocab_size_per_layer_input": 64,
    },
}
"""The kinds of Gemma 4. Of each, layers 0 and 2 slide."""

OF_FAMILY: dict[str, dict[str, Any]] = {
    # layers 0 and 2 slide; scores and logits are large enough to be capped
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    # layers 0 and 2 slide, with rotary angles of their own
    "gemma3_text": {"sliding_window": 4, "sliding_window_pattern": 2},
    # one that has all that any of its kinds has
    "gemma4_text": {
        **{key: value for kind in GEMMA4.values() for key, value in kind.items() if value},
        "global_head_dim": 8,
        "rms_norm_eps": 0.1,  # as of Qwen3.5
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # all layers but the last slide
    "olmo3": {"sliding_window": 4},
    # of a head's 8 columns, 4 rotate
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},  # two of which a token is given to
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 14},
    # layers 1 and 3 have experts
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "shared_expert_intermediate_size": 26,
        "decoder_sparse_step": 2,
    },
    # layer 0 has no experts; a token chooses two of three groups first
    "glm4_moe": {
        "head_dim": 8,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe_lite": {**LATENT, "v_head_dim": 5, "q_lora_rank": None, "n_routed_experts": 4},
    "deepseek_v3": {
        **LATENT,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
    },
    # layers 0 and 2 slide; gates and columns are large enough to be bounded
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 4, "swiglu_limit": 1.5},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.7,
    },
    "cohere": {"logit_scale": 0.5},
    # layers 0 and 2 slide; the others have no rotary angles
    "cohere2": {"logit_scale": 0.5, "sliding_window": 4, "sliding_window_pattern": 2},
    "gpt2": {"num_key_value_heads": None, "n_inner": 40},
    # layers 1 and 3 attend, with gates; keys of 2 heads for 4 of values. What a head reads may be almost zero, and a
    # norm with the usual eps would scale its rounding error up
    "qwen3_5_text": {
        "rms_norm_eps": 0.1,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 6,
    },
    "qwen3_next": {
        "rms_norm_eps": 0.1,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 6,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "shared_expert_intermediate_size": 10,
    },
    "qwen3_5_moe_text": {
        "rms_norm_eps": 0.1,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 6,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "shared_expert_intermediate_size": 10,
    },
    # layer 0 has no experts
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "routed_scaling_factor": 1.5,
    },
    "lfm2": {"intermediate_size": 54, "block_multiple_of": 4, "full_attn_idxs": [1, 3]},  # 36 columns
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A config of a few thousand parameters: 4 layers, 4 query and 2 KV heads."""
    return CONFIGS[family](**{**SIZES, **OF_FAMILY.get(family, {}), **changes})


def tiny_model(config: PreTrainedConfig, head: str = "lm", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Hugging Face's model of a config with weights large enough that every part matters."""
    torch.manual_seed(7)
    how = {
        "dtype": dtype,
        "experts_implementation": "eager",
    }  # the other one wants sizes that are multiples of 4
    if head == "lm":
        model = AutoModelForCausalLM.from_config(config, **how)
    else:
        config.num_labels = 1
        model = scalar_model(config, **how)
    for name, parameter in model.named_parameters():
        is_norm = ("norm" in name or ".ln_" in name) and name.endswith(".weight")
        centred = (
            config.model_type == "gemma" or config.model_type.startswith(CENTRED)
        ) and "linear_attn" not in name
        offset = 1.0 if is_norm and not centred else 0.0
        parameter.data.normal_(offset, 0.3)
    for name, buffer in stored_buffers(model).items():
        buffer.normal_(1.0 if "layer_scalar" in name else 0.0, 0.3)
    return model.eval()


def scalar_model(config: PreTrainedConfig, **how: Any) -> nn.Module:
    """transformers' model with a score for each sequence; for a family without one, made from its decoder."""
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return AutoModelForSequenceClassification.from_config(config, **how)
    of_family = MODEL_MAPPING[type(config)].__mro__[1]
    return type("Scalar", (GenericForSequenceClassification, of_family), {})._from_config(config, **how)


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a model of transformers keeps in files besides its parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def in_mxfp4(folder: Path, config: PreTrainedConfig) -> None:
    """Write a tiny GPT-OSS as it is published: experts in MXFP4, blocks and scales of random bytes."""
    model = tiny_model(config)
    model.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(described))
    stored, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, into, out = stored.pop(name).shape
        size = (experts, out, into // 32)
        blocks = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, size, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def shape_of(config: PreTrainedConfig) -> ModelShape:
    return ModelShape.from_config(config.to_dict())


def by_our_names(layout: Layout, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the parameters of a model of transformers, by the names of our parameters."""
    stored: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))  # pyright: ignore[reportArgumentType]
    return {
        spec.name: stored_rows(stored.__getitem__, spec, Interval(0, spec.length))
        for spec in layout.parameters
    }


def of_tensor(layout: Layout, gradients: Mapping[str, Tensor], name: str) -> Tensor:
    """The gradients of all that files hold in one tensor with a parameter: [elements].

    The gradient of GPT-2's key biases alone is zero but for rounding.
    """
    stored = layout.specs[name].stored
    return torch.cat([gradients[s.name].flatten() for s in layout.parameters if s.stored == stored])


def held_slices(layout: Layout, device: int, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a device's slices of a whole model's tensors."""
    return {
        name: whole[name].narrow(layout.specs[name].dim, rows.start, rows.size).clone()
        for name, rows in layout.held(device).items()
    }


def fill(stage: Stage, model: nn.Module) -> None:
    """Give a stage its slices of a whole model of transformers."""
    whole = by_our_names(stage.layout, model, model.state_dict())
    for name, mine in held_slices(stage.layout, stage.holder, whole).items():
        stage.named_slices()[name].data.copy_(mine)


def tokens(*lengths: int, vocab: int = SIZES["vocab_size"]) -> list[Tensor]:
    """One random sequence of each length, the same in every call."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def packed(sequences: list[Tensor]) -> MicroBatch:
    """The sequences as one micro-batch."""
    return micro_batch(SampleBatch(tuple(range(len(sequences))), {"input_ids": Packed.of(sequences)}))
