"""Runs with a judge of their own, at the smallest size. Import as `tests.tiny_judge`."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from tests.tiny_runs import byte_tokenizer, critic_free_config, ppo_config, write_model

ASKS = {
    "template": "{prompt}|{completion}|{answer}:",
    "pattern": r"\d",
    "most": 9,
    "max_tokens": 2,
    "unreadable": 0.0,
}
"""Arguments of builtin:judge."""


def write_judge(folder: Path) -> None:
    """A model that says digits and letters, by its prompt. Its size and its number of embeddings are its own."""
    write_model(folder, seed=7, num_hidden_layers=3, vocab_size=300, tie_word_embeddings=False)
    path = folder / "model.safetensors"
    weights = load_file(path)
    said = torch.tensor([byte_tokenizer().token_to_id(letter) for letter in "0123456789abcdef"])
    head = torch.zeros_like(weights["lm_head.weight"])
    head[said] = 4 * weights["lm_head.weight"][said]
    save_file({**weights, "lm_head.weight": head}, path, {"format": "pt"})


def judged(
    folder: Path, type: str = "grpo", asks: Any = None, only: Any = None, models: Any = None, **changes: Any
) -> RunConfig:
    """A run whose responses a model judges; models and rows are made below `folder`.

    asks  changes of ASKS; only: of the reward; models: further ones
    """
    if not (folder / "judge").exists():
        write_judge(folder / "judge")
    if type == "ppo":
        make = ppo_config
    else:
        make = partial(critic_free_config, type=type, **({} if type == "remax" else {"num_generations": 4}))
    named = {"actor": str(folder / "actor"), "judge": str(folder / "judge"), **(models or {})}
    reward = {"function": "builtin:judge", "kwargs": {**ASKS, **(asks or {})}, "only": only or {}}
    return make(folder, **{"models": named, "rewards": [reward], **changes})
