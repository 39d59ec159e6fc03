"""Files of a run as small as they can be for its checks, and what a refusal looks like."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from tests.tiny_runs import EOS, byte_tokenizer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 48,
}
PLACE = "0"


def model_folder(folder: Path, **config: Any) -> Path:
    """What is checked of a model before anything starts: its configuration, its tokenizer, its weights."""
    folder.mkdir()
    tokenizer = byte_tokenizer()
    eos = tokenizer.token_to_id(EOS)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": eos, **config}))
    tokenizer.save(str(folder / "tokenizer.json"))
    shape = ModelShape.from_config(
        {**LLAMA, **{k: v for k, v in config.items() if k in LLAMA and k != "model_type"}}
    )
    specs = {spec.name: spec.shape for head in ("lm", "scalar") for spec in parameters(shape, head)}
    weights = {name: np.zeros(dims, np.float32) for name, dims in specs.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def without(folder: Path, name: str) -> None:
    """Remove a parameter from a model folder."""
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors")


def refused(call, *parts: str, command: tuple[str, ...] = ("run", "ppo", "--config", "FILE")) -> None:
    """The command must end with status 2 and one sentence that has all parts; nothing must have been written."""
    before = call.files()
    status, out, err = call(*command)
    assert status == 2, (out, err)
    assert call.files() == before
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err, err
