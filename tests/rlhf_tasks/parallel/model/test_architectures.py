"""What this engine says of the architectures that people download most: the table in docs/models.md."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prefect_rlhf.rlhf_tasks.parallel.layout.families import FAMILIES
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import load, load_config
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.rlhf_tasks.parallel.model.test_stage import assert_close, reference, run
from tests.tiny_models import CONFIGS, SIZES, tokens

PAGE = Path(__file__).parents[4] / "docs" / "models.md"
BEGIN, END = "<!-- written by test_architectures.py -->\n", "<!-- end -->\n"

TWENTY = (
    *("llama", "gpt2", "bloom", "opt", "gpt_neox", "falcon"),
    *("qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "mistral", "mixtral", "gemma2", "gemma3_text"),
    *("gemma4_text", "phi3", "gpt_oss", "deepseek_v3", "glm4", "olmo2"),
)
FURTHER = (
    "smollm3",
    "granite",
    "cohere",
    "cohere2",
    "stablelm",
    "lfm2",
    "lfm2_moe",
    "qwen3_5_moe_text",
    "olmo3",
    "starcoder2",
    "gptj",
    "mamba",
)

SMALL: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "moe_intermediate_size": 8,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {"num_local_experts": 4},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    },
    "mixtral": {"num_local_experts": 4},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 24},
    "qwen3_5_moe_text": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}


def save_tiny(folder: Path, family: str) -> None:
    """Write a tiny random model of an architecture, by transformers' own classes."""
    sizes = {**SIZES, **SMALL.get(family, {})}
    if family == "falcon":  # its configs refuse the key
        del sizes["head_dim"]
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def answer(folder: Path, family: str) -> str:
    """What is said of a model: taken, taken after the doctor, or refused and why, in the words that a user reads."""
    save_tiny(folder, family)
    try:
        read_shape(folder)
    except ConfigError as error:
        reason = str(error).partition(". ")[0].removeprefix(f"Model {str(folder)!r}")
        return "refused: " + re.sub(rf"^:? ?(\('?{family}'?\) )?", "", reason)
    return "taken" if family in FAMILIES else "taken after the doctor"


def test_the_table_says_what_the_engine_says(tmp_path: Path):
    """Where it does not, this test writes it anew: look at it, then keep it."""
    rows = [
        f"| `{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]}` | `{family}` | {answer(tmp_path / family, family)} |\n"
        for family in (*TWENTY, *FURTHER)
    ]
    table = "| architecture | `model_type` | |\n|---|---|---|\n" + "".join(rows)
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    old, end, after = rest.partition(END)
    assert begin, "the page has no place for the table"
    assert end
    if old != table:
        PAGE.write_text(before + begin + table + end + after)
    assert old == table, "the table was written anew"


def test_twenty_are_twenty_and_all_that_are_taken_are_compared_with_transformers():
    assert len(set(TWENTY)) == 20
    taken = {family for family in (*TWENTY, *FURTHER) if family in FAMILIES}
    assert taken <= CONFIGS.keys(), "tests of stages have these"
    assert FAMILIES.keys() == CONFIGS.keys()


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("family", ["smollm3", "ernie4_5"])
def test_what_the_doctor_has_to_examine_computes_what_transformers_does(tmp_path: Path, family: str, pp: int):
    assert answer(tmp_path, family) == "taken after the doctor"
    assert load_file(tmp_path / "model.safetensors")
    config, shape = load_config(tmp_path), read_shape(tmp_path)
    layout = Layout(shape, "lm", Placement(tuple(range(pp)), ParallelStrategy(pp=pp)))
    stages = [
        Stage(
            config,
            layout,
            layout.placement.coordinate(i),
            None,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        for i in range(pp)
    ]
    for stage in stages:
        assert load(stage, tmp_path, seed=0) == ()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    sequences = tokens(5, 9, 1, 7)
    assert_close(run(stages, sequences), reference(model, "lm", sequences), 1e-5)
