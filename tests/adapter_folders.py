"""Folders of LoRA adapters as peft writes them, over tiny models. Import as `tests.adapter_folders`."""

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "o_proj", "down_proj"],
    "gpt_oss": ["q_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}


def write_adapter(folder: Path, base: Path, family: str = "llama", head: str = "lm", **changes: Any) -> Any:
    """Write an adapter of a saved model, none of whose halves is zero. Returns the model with it merged in."""
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    labels = {} if head == "lm" else {"num_labels": 1}
    model = kind.from_pretrained(base, dtype=torch.float64, experts_implementation="eager", **labels)
    config: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": TARGETS.get(family, ["q_proj", "o_proj", "down_proj"]),
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "fan_in_fan_out": family == "gpt2",
    }
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**{**config, **changes}))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()
