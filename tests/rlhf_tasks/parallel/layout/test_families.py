"""Families that are read from their weights, and what a folder's weights may not have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from prefect_rlhf.rlhf_tasks.parallel.layout.families import FAMILIES
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import check_weights, read_shape
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.tiny_models import SIZES, tiny_config, tiny_model


def save(folder: Path, family: str, **changes: Any) -> dict[str, tuple[int, ...]]:
    """Write a tiny model of a family; gives the shapes of its parameters."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **changes}))
    model.save_pretrained(folder)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("smollm3", {"tie_word_embeddings": False}),
        ("smollm3", {"tie_word_embeddings": True}),
        ("vaultgemma", {}),
        ("seed_oss", {"attention_bias": True, "mlp_bias": True}),
        ("arcee", {}),  # without gates
        ("exaone4", {}),  # norms after the blocks, and on the heads
    ],
)
def test_an_untested_family_of_llamas_kind_is_read_from_its_weights(tmp_path, family, changes):
    assert family not in FAMILIES
    expected = save(tmp_path, family, **changes)
    shape = read_shape(tmp_path)
    assert shape.family == family
    specs = parameters(shape, "lm")
    assert {spec.name: spec.shape for spec in specs} == expected
    check_weights(tmp_path, specs, needs_head=False)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("cohere", r"has use_qk_norm, which is unknown here"),
        ("jais2", r"has input_layernorm\.bias, which Llama's have not"),
        ("nanochat", r"has mlp\.fc1\.weight, which Llama's have not"),
        ("apertus", r"has mlp\.act_fn\.alpha_n, which Llama's have not"),
        ("olmo", r"its norms have no weights"),
        ("bert", r"lacks self_attn\.q_proj\.weight"),
    ],
)
def test_layers_of_another_kind_are_refused_by_what_they_have(tmp_path, family, said):
    save(tmp_path, family, **({"use_qk_norm": True} if family == "cohere" else {}))
    with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path))}.*({said})"):
        read_shape(tmp_path)


def test_a_tensor_that_the_model_has_not_is_refused_but_for_idle_ones(tmp_path):
    tiny_model(tiny_config("llama")).save_pretrained(tmp_path)
    specs, file = parameters(read_shape(tmp_path), "lm"), tmp_path / "model.safetensors"
    weights, extra = load_file(file), torch.zeros(24)
    save_file(
        {**weights, "score.weight": extra, "model.layers.0.self_attn.rotary_emb.inv_freq": extra[:3].clone()},
        file,
    )
    check_weights(tmp_path, specs, needs_head=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file({**weights, "model.layers.4.enorm.weight": extra}, file)  # predicts the token after the next
    check_weights(tmp_path, specs, needs_head=False)
    save_file({**weights, "model.layers.0.self_attn.q_proj.bias": extra}, file)
    with pytest.raises(ConfigError, match=r"has 'model\.layers\.0\.self_attn\.q_proj\.bias' \(and 0 more"):
        check_weights(tmp_path, specs, needs_head=False)


def test_keys_and_values_that_no_layer_of_gemma_4_reads_are_idle(tmp_path):
    tiny_model(tiny_config("gemma4_text")).save_pretrained(tmp_path)
    specs, file = parameters(read_shape(tmp_path), "lm"), tmp_path / "model.safetensors"
    weights = load_file(file)
    assert not any(name.startswith("model.layers.3.self_attn.k_") for name in weights)
    extra = {f"model.layers.3.self_attn.{name}.weight": torch.zeros(8) for name in ("k_proj", "k_norm")}
    save_file(weights | extra, file)
    check_weights(tmp_path, specs, needs_head=False)
    save_file({**weights, "model.layers.1.self_attn.v_proj.weight": torch.zeros(8)}, file)
    with pytest.raises(ConfigError, match=r"has 'model\.layers\.1\.self_attn\.v_proj\.weight'"):
        check_weights(tmp_path, specs, needs_head=False)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_mixture_without_shared_experts_may_have_empty_tensors_of_them(tmp_path):
    tiny_model(tiny_config("glm4_moe", n_shared_experts=0)).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.shared_columns == 0
    check_weights(tmp_path, parameters(shape, "lm"), needs_head=False)
