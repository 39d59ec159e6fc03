"""The demo's models with random weights, and prompts of one length, for benchmarks with a fixed amount of work."""

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed

from flows.demo import MODEL, byte_tokenizer
from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.algorithms.ppo.config import PPOConfig


def write_models(folder: Path) -> None:
    """Write the folders `actor` (language model) and `reward` (scalar head), of the demo's shape.

    Their end token is outside the vocabulary, so that every response has the maximum length.
    """
    for name, kind in (("actor", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        config = LlamaConfig(**{**MODEL, "eos_token_id": MODEL["vocab_size"], "num_labels": 1})
        set_seed(0)
        kind(config).save_pretrained(folder / name)
        byte_tokenizer().save(str(folder / name / "tokenizer.json"))


def ppo_of(
    folder: Path, n_ranks: int, batch_size: int, prompt_tokens: int, new_tokens: int, **changes: Any
) -> PPOConfig:
    """A PPO configuration for the models in a folder (`write_models`), with prompts and responses of fixed length.

    prompt_tokens, new_tokens  tokens of every prompt and of every response
    changes                    further keys of the configuration
    """
    prompts = folder / f"prompts-{prompt_tokens}.jsonl"
    if not prompts.exists():
        rows = [{"prompt": f"{i:04d}".ljust(prompt_tokens, ".")} for i in range(1024)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "type": "ppo",
        "dtype": "float32",
        "models": {"actor": str(folder / "actor"), "reward": str(folder / "reward")},
        "data": {"train": str(prompts)},
        "output_dir": str(folder / "runs"),
        "sampling": {"max_completion_length": new_tokens},
        "batch_size": batch_size,
        "num_mini_batches": 2,
        "total_iterations": 1000,
        "cluster": {"devices_per_host": n_ranks},
    }
    config = make_config({**document, **changes})
    assert isinstance(config, PPOConfig)
    return config
