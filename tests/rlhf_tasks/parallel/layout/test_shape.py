import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from prefect_rlhf.planner.plan.workload import RoleModel
from prefect_rlhf.planner.pricing.figures import MeasuredProfile
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import RoleRecord
from prefect_rlhf.rlhf_tasks.parallel.layout.families import FAMILIES
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora, linear_modules, parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.parallel.layout.work import pass_flops
from prefect_rlhf.rlhf_tasks.profiling.measurements import Timed
from tests.tiny_models import GEMMA4, scalar_model, stored_buffers

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 20,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FIGURES = {"tp": 1, "tokens": 8, "context": 8, "seconds": 1.0}
CASES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("gemma", {}),
    ("gemma2", {}),
    ("olmo2", {"attention_bias": True}),
    ("olmo3", {}),
    ("glm", {}),
    ("glm4", {"attention_bias": False}),
    ("phi3", {}),
    ("gemma3_text", {"attention_bias": True}),
    *(("gemma4_text", {**sizes, "num_hidden_layers": 8}) for sizes in GEMMA4.values()),
    ("gemma4_text", {**GEMMA4["inputs"], "num_hidden_layers": 9, "tie_word_embeddings": False}),
    ("gemma4_text", {**GEMMA4["experts"], "attention_k_eq_v": False, "attention_bias": True}),
    ("mixtral", {"num_local_experts": 3}),
    ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14}),
    (
        "qwen2_moe",
        {
            "num_experts": 5,
            "moe_intermediate_size": 14,
            "shared_expert_intermediate_size": 9,
            "qkv_bias": False,
        },
    ),
    (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "decoder_sparse_step": 2},
    ),
    (
        "deepseek_v3",
        {"moe_intermediate_size": 14, "n_routed_experts": 16, "q_lora_rank": 9, "attention_bias": True}
        | {"first_k_dense_replace": 1, "num_key_value_heads": 6},
    ),
    ("glm4_moe_lite", {"moe_intermediate_size": 14, "q_lora_rank": None, "num_key_value_heads": 6}),
    ("glm4_moe", {"n_routed_experts": 8, "moe_intermediate_size": 14, "n_shared_experts": 2}),
    ("gpt_oss", {"num_local_experts": 5}),
    ("gpt_oss", {"num_local_experts": 5, "attention_bias": False}),
    ("starcoder2", {"head_dim": None}),
    ("starcoder2", {"head_dim": None, "use_bias": False, "tie_word_embeddings": False}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("cohere", {}),
    ("cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    ("gpt2", {}),
    ("gpt2", {"n_inner": 20, "tie_word_embeddings": False}),
    ("lfm2", {"full_attn_idxs": [1]}),
    (
        "qwen3_next",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 14,
            "shared_expert_intermediate_size": 9,
        },
    ),
    (
        "qwen3_5_moe_text",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 14,
            "shared_expert_intermediate_size": 9,
        },
    ),
    (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 5,
            "moe_intermediate_size": 14,
            "num_dense_layers": 1,
        },
    ),
    ("lfm2", {"conv_bias": True, "layer_types": ["full_attention", "conv", "conv"], "conv_L_cache": 4}),
    ("lfm2", {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8}),
    ("qwen3_5_text", {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "attention_bias": True}),
    ("qwen3_5_text", {"full_attention_interval": 2, "linear_conv_kernel_dim": 3}),
    ("lfm2", {"block_auto_adjust_ff_dim": False, "block_ff_dim": 33}),
]


def config(**changes) -> dict:
    return {"model_type": "llama", **SIZES, **changes}


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_names_and_shapes_are_those_of_transformers(tmp_path, family, changes, head):
    theirs = AutoConfig.for_model(family, **{**SIZES, **changes}, num_labels=1)
    theirs.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs) if head == "lm" else scalar_model(theirs)
        stored: dict = dict(model.named_parameters()) | stored_buffers(model)
        stored = revert_weight_conversion(model, stored)
    expected = {name: tuple(p.shape) for name, p in stored.items()}

    shape = read_shape(tmp_path)

    ours = [item for spec in parameters(shape, head) for item in spec.stored.items()]
    assert dict(ours) == expected


def test_the_published_gpt_oss_has_20_9_billion_parameters_of_which_a_token_passes_3_6():
    """As its model card counts (arXiv:2508.10925): a token passes the head, and its embedding is no product."""
    sizes = {"num_hidden_layers": 24, "num_local_experts": 32, "hidden_size": 2880, "intermediate_size": 2880}
    heads = {"num_attention_heads": 64, "vocab_size": 201088, "max_position_embeddings": 131072}
    shape = ModelShape.from_config({"model_type": "gpt_oss", **sizes, **heads})
    assert sum(spec.size for spec in parameters(shape, "lm")) == pytest.approx(20.9e9, rel=0.005)
    active = pass_flops(shape, "lm", [1]) / 2
    assert active == pytest.approx(3.61e9, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_are_absent_have_the_defaults_of_transformers(family):
    given = {key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")}
    given |= {"hidden_size": 96, "num_attention_heads": 32}
    mixture = FAMILIES[family].mixture
    if mixture is not None:
        given |= {mixture.width: 20, "intermediate_size": 40, "shared_expert_intermediate_size": 8}
        given["first_k_dense_replace"] = 1
    theirs = AutoConfig.for_model(family, **given)
    theirs.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose heads differ

    shape = ModelShape.from_config({"model_type": family, **given})

    heads = getattr(theirs, "num_key_value_heads", 32), getattr(theirs, "head_dim", None) or 3
    if FAMILIES[family].latent is not None:
        heads = (32, theirs.qk_head_dim)
    assert (shape.kv_heads, shape.head_dim) == heads
    assert shape.tied == theirs.tie_word_embeddings
    experts = (
        getattr(theirs, "num_local_experts", getattr(theirs, "num_experts", 0)) or 0,
        getattr(theirs, "num_experts_per_tok", 0),
    )
    assert (shape.experts, shape.experts_per_token) == experts


GROUPED = {
    "model_type": "glm4_moe",
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
LATENT = {"model_type": "glm4_moe_lite", "moe_intermediate_size": 8, "num_key_value_heads": None}


def test_glm_4_7_flash_has_a_first_layer_without_experts_whatever_another_key_says():
    for first in (0, 2):
        shape = ModelShape.from_config(config(**LATENT, first_k_dense_replace=first))
        assert shape.dense_layers == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert'.*Llama, Mistral, Qwen2"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": "falcon"}, r"packed projections \(query_key_value\).*Llama, Mistral, Qwen2"),
        (
            {"model_type": "gpt2", "add_cross_attention": True},
            r"\(gpt2\) has add_cross_attention, which is unknown",
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv"]},
            "layer_types in its config is not a list of 3 kinds",
        ),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "mamba"]},
            "has 'mamba', which is not one of",
        ),
        (
            {"model_type": "lfm2", "full_attn_idxs": 1},
            "full_attn_idxs=1 in its config is not a list of layers",
        ),
        (
            {"model_type": "lfm2", "block_multiple_of": 0},
            "block_multiple_of=0 in its config is not a positive number",
        ),
        (
            {"model_type": "lfm2", "full_attn_idxs": [], "conv_L_cache": 0},
            "conv_L_cache=0 in its config is not a positive whole number",
        ),
        (
            {"model_type": "qwen3_5_text", "linear_num_key_heads": 5},
            r"32 value heads are not a multiple of 5 key heads \(linear_num",
        ),
        (
            {"model_type": "qwen3_5_text", "full_attention_interval": "x"},
            "full_attention_interval='x' in its config",
        ),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer=0 in its config is not a positive"),
        ({"model_type": "gpt2", "n_embd": 25}, "hidden size 25 is not a multiple of 6 heads"),
        (
            {"model_type": "jamba", "num_experts": 8},
            r"'jamba'\) is a mixture of experts \(num_experts\) of a family whose router.*Llama, Mistral",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "more than its 2 experts",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 10**9},
            "num_local_experts=1000000000.*more than 4,096",
        ),
        *(
            (
                {"model_type": "mixtral", key: value},
                f"{key}={shown} in its config is not a positive whole number",
            )
            for key in ("num_local_experts", "num_experts_per_tok")
            for value, shown in ((0, "0"), (-3, "-3"), (2.0, "2.0"), ("8", "'8'"), ([4], r"\[4\]"))
        ),
        (
            {"model_type": "mixtral", "router_jitter_noise": "x"},
            "router_jitter_noise='x'.*number of at least 0",
        ),
        (
            {"model_type": "mixtral", "router_aux_loss_coef": -1},
            "router_aux_loss_coef=-1.*number of at least 0",
        ),
        (
            {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "norm_topk_prob": 1},
            "norm_topk_prob=1 in its config is neither true nor false",
        ),
        ({"model_type": "qwen3_moe"}, "moe_intermediate_size=None"),
        (
            {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "mlp_only_layers": "all"},
            "mlp_only_layers='all' in its config is not a list",
        ),
        (
            {"model_type": "qwen3_moe", "moe_intermediate_size": 8, "decoder_sparse_step": 4},
            "none of its 3 layers has experts",
        ),
        (
            {"model_type": "glm4_moe", "moe_intermediate_size": 8, "n_routed_experts": 9, "n_group": 2},
            "n_group=2 and topk_group=1 in its config do not fit 9 experts of which 8",
        ),
        (
            {"model_type": "glm4_moe", "moe_intermediate_size": 8, "n_shared_experts": -1},
            "n_shared_experts=-1 in its config is not a positive whole number",
        ),
        ({**GROUPED, "n_group": 8, "topk_group": 4}, "n_group=8 in its config makes groups of one expert"),
        (
            {**GROUPED, "model_type": "deepseek_v3", "n_group": None},
            r"n_group is null in its config.*default \(n_group=8, topk_group=4\)",
        ),
        ({**LATENT, "num_key_value_heads": 2}, "num_key_value_heads=2 in its config is not its 6 heads"),
        ({**LATENT, "partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 in its config is not 1"),
        ({**LATENT, "rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
        ({"model_type": "cohere", "logit_scale": None}, "logit_scale is null in its config"),
        ({"model_type": "cohere2", "sliding_window": None}, "sliding_window is null in its config"),
        ({"model_type": "lfm2_moe", "use_expert_bias": False}, "use_expert_bias is false"),
        (
            {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text"}},
            "has model_type 'qwen2_5_vl_text', which is not a decoder of a tested family",
        ),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "hidden_size=None"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'.*default, linear"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type 'longrope'.*longest sequence of its batch",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "spiral"}}},
            "rope_type 'spiral': the engine has not been tested with it",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
        ({"use_bidirectional_attention": True}, "causal decoder"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"num_key_value_heads": 4}, "6 query heads are not a multiple of 4"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_by_its_name(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(config(**changes)))

    with pytest.raises(ValueError, match=message) as refusal:
        read_shape(tmp_path)

    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"quantization_config": None},
    ],
)
def test_a_model_that_is_computed_faithfully_is_taken(changes):
    assert ModelShape.from_config(config(**changes)) == ModelShape.from_config(config())


def test_adapters_lie_beside_what_files_do_not_pack():
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert sorted(linear_modules(ModelShape.from_config(config()))) == every
    packed = ModelShape.from_config(config(model_type="phi3"))
    assert sorted(linear_modules(packed)) == ["down_proj", "o_proj"]
    with pytest.raises(ValueError, match=r"'q_proj', which is not a linear layer of phi3"):
        Lora(2, 4.0, ("q_proj",)).check(packed)
    of_gpt2 = ModelShape.from_config(config(model_type="gpt2"))
    assert linear_modules(of_gpt2) == {"c_fc": (96, 24), "c_proj": (24, 24)}
    mixture = ModelShape.from_config(config(model_type="mixtral"))
    assert sorted(linear_modules(mixture)) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    latent = {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    shared = ModelShape.from_config(config(model_type="deepseek_v3", num_key_value_heads=6, **latent))
    of_attention = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
    assert sorted(linear_modules(shared)) == of_attention
    with pytest.raises(ValueError, match=r"'up_proj', .* of mixtral \(its experts have no adapters\)\. Its"):
        Lora(2, 4.0, ("up_proj",)).check(mixture)


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe", b"[]"])
def test_a_folder_without_a_readable_config_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ValueError, match=str(tmp_path)):
        read_shape(tmp_path)


def test_difference_names_the_fields():
    ours, theirs = ModelShape.from_config(config()), ModelShape.from_config(config(vocab_size=40))

    assert ours.difference(theirs) == {"vocab": (37, 40)}
    assert ours.difference(ours) == {}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt2"])
def test_a_saved_shape_of_before_says_with_booleans_what_norms_and_packing_are_now(family):
    """In manifests, the planner's problems and measured profiles."""
    shape = ModelShape.from_config({"model_type": family, **SIZES})
    placement, timed = Placement((0,), ParallelStrategy()), Timed(operation="layer/forward", **FIGURES)
    saved = (
        (
            "shape",
            RoleRecord(version=1, optimizer_step=1, state={}, shape=shape, head="lm", placement=placement),
        ),
        ("shape", RoleModel(shape=shape)),
        (
            "model",
            MeasuredProfile(
                device="x", n_hosts=1, devices_per_host=1, model=shape, itemsize=2, operations=(timed,)
            ),
        ),
    )
    for key, record in saved:
        document = record.model_dump(mode="json")
        assert type(record).model_validate_json(json.dumps(document)) == record
        document[key] |= {"qk_norm": bool(shape.qk_norm), "packed": bool(shape.packed)}
        assert type(record).model_validate_json(json.dumps(document)) == record
