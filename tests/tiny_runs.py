"""Whole runs at the smallest size: model folders, prompts and configurations. Import as `tests.tiny_runs`."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.config.base import RunConfig

EOS = "<eos>"
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "pad_token_id": None,
}

TWO_RANKS = {
    "actor_generate": "0-1 t2",
    "ref_inference": "0",
    "reward_inference": "1",
    "critic_inference": "1",
    "actor_train": "0 m2",
    "critic_train": "1 m2",
}
"""Placements of PPO on two ranks, with reallocations and redistributions."""


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


def write_model(folder: Path, head: str = "lm", seed: int = 1, family: str = "llama", **changes: Any) -> Path:
    """A tiny model with weights and tokenizer in Hugging Face's format."""
    tokenizer = byte_tokenizer()
    eos = tokenizer.token_to_id(EOS)
    sizes = {**SIZES, "vocab_size": 260, "tie_word_embeddings": True, "eos_token_id": eos, **changes}
    config = AutoConfig.for_model(family, **sizes)
    config.num_labels = 1
    set_seed(seed)
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = kind.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.12)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps({"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "tokenizer_config.json").write_text(text)
    return folder


def write_prompts(path: Path, n: int = 64) -> Path:
    """Prompts of different lengths with a column for rewards."""
    rows = [{"prompt": f"{i:x} says " + "ab" * (i % 5), "answer": str(i % 7)} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learning_config(folder: Path, kind: str, **changes: Any) -> RunConfig:
    """DPO, KTO or distillation on two models and rows below `folder`, which are made where they are not there yet."""
    if not (folder / "actor").exists():
        write_model(folder / "actor")
        write_model(folder / "frozen", seed=2)
        rows = [
            {"prompt": f"{i:x} says ", "chosen": "ab" * (i % 5 + 1), "rejected": f"{i % 7}"}
            for i in range(32)
        ]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generates = kind == "distillation"
    document = {
        "type": kind,
        "models": {"actor": str(folder / "actor"), "teacher" if generates else "ref": str(folder / "frozen")},
        "data": {"train": str(folder / "pairs.jsonl")},
        "output_dir": str(folder / "runs"),
        "batch_size": 16,
        "num_mini_batches": 2,
        "total_iterations": 3,
        "snapshot_every": 1,
        "optimizer": {"learning_rate": 1e-3},
        **({"sampling": {"max_completion_length": 12}} if generates else {}),
    }
    return make_config({**document, **changes})


def critic_free_config(folder: Path, **changes: Any) -> RunConfig:
    """An algorithm (`type`) on a model and prompts below `folder`, which are made where they are not there yet."""
    if not (folder / "actor").exists():
        write_model(folder / "actor")
        write_prompts(folder / "prompts.jsonl")
    document = {
        "models": {"actor": str(folder / "actor")},
        "data": {"train": str(folder / "prompts.jsonl")},
        "output_dir": str(folder / "runs"),
        "sampling": {"max_completion_length": 12},
        "rewards": [{"function": f"{Path(__file__).with_name('tiny_reward.py')}:length_reward"}],
        "batch_size": 16,
        "beta": 0.1,
        "total_iterations": 3,
        "optimizer": {"learning_rate": 1e-3},
    }
    return make_config({**document, **changes})


def ppo_config(folder: Path, **changes: Any) -> PPOConfig:
    """PPO with all six calls on models and data below `folder`, which are made where they are not there yet."""
    if not (folder / "actor").exists():
        write_model(folder / "actor")
        write_model(folder / "reward", head="scalar", seed=2)
        write_prompts(folder / "prompts.jsonl")
    document = {
        "type": "ppo",
        "dtype": "float32",
        "models": {"actor": str(folder / "actor"), "reward": str(folder / "reward")},
        "data": {"train": str(folder / "prompts.jsonl")},
        "output_dir": str(folder / "runs"),
        "sampling": {"max_completion_length": 12},
        "rewards": [{"function": f"{Path(__file__).with_name('tiny_reward.py')}:length_reward"}],
        "batch_size": 16,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "total_iterations": 3,
        "snapshot_every": 1,
        "normalize_values": True,
        "optimizer": {"learning_rate": 1e-3},
    }
    config = make_config({**document, **changes})
    assert isinstance(config, PPOConfig)
    return config
