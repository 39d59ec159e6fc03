"""A folder of an adapter is read as its base model with the adapter added, or refused in a sentence."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    adapter_of,
    base_of,
    check_weights,
    config_digest,
    read_shape,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.adapter_folders import write_adapter
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing.*:FutureWarning"
)  # peft asks for it


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Of an adapter, and of its base."""
    base, adapter = tmp_path / "models" / "base", tmp_path / "runs" / "sft" / "model"
    tiny_model(tiny_config("llama")).save_pretrained(base)
    write_adapter(adapter, base)
    return adapter, base


def check(folder: Path, head: Any = "lm") -> None:
    check_weights(folder, parameters(read_shape(folder), head), needs_head=False)


def test_an_adapter_has_its_bases_shape_and_verdict(folders: tuple[Path, Path]):
    adapter, base = folders
    check(adapter)
    assert base_of(adapter) == base
    assert base_of(base) == base
    assert read_shape(adapter) == read_shape(base)
    assert config_digest(adapter) == config_digest(base)


def test_a_relative_base_is_found_from_the_adapters_folder_upwards(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    adapter, base = folders
    monkeypatch.chdir(os.sep)
    for relative in ("models/base", "../../../models/base"):
        change(adapter, base_model_name_or_path=relative)
        assert base_of(adapter).resolve() == base.resolve()
    change(adapter, base_model_name_or_path="someone/model")
    with pytest.raises(
        ConfigError, match="'someone/model' is no model folder in the adapter folder or one above it"
    ):
        base_of(adapter)


def change(adapter: Path, **values: Any) -> None:
    file = adapter / ADAPTER_CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def retensor(adapter: Path, changed: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(adapter / ADAPTER)
    changed(tensors)
    save_file(tensors, adapter / ADAPTER, metadata={"format": "pt"})


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda a: change(a, peft_type="IA3"), "peft_type is 'IA3', not LORA"),
        (lambda a: change(a, use_dora=True), "use_dora is True, which is no plain LoRA"),
        (lambda a: change(a, rank_pattern={"q_proj": 4}), "rank_pattern is"),
        (lambda a: change(a, bias="all"), "bias is 'all', not none"),
        (lambda a: change(a, init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
        (lambda a: change(a, r="3"), "r is '3', not a whole number"),
        (lambda a: change(a, lora_alpha=float("nan")), "lora_alpha is nan, not a number"),
        (lambda a: change(a, lora_alpha=10**400), "lora_alpha is a number of 1329 bits, not a number of use"),
        (lambda a: change(a, r=10**400), "r is a number of 1329 bits, not a whole number"),
        (lambda a: change(a, base_model_name_or_path="x" * 5000), "cannot be read (File name too long)"),
        (lambda a: change(a, base_model_name_or_path=None), "base_model_name_or_path is None"),
        (
            lambda a: change(a, base_model_name_or_path="\0"),
            "is no model folder in the adapter folder or one above",
        ),
        (lambda a: change(a, base_model_name_or_path=str(a)), "is an adapter itself. Merge that one first"),
        (
            lambda a: change(a, base_model_name_or_path="/nowhere"),
            "'/nowhere' is no model folder. Download it",
        ),
        (lambda a: change(a, r=4), "has shape [3, 24]; config.json of"),
        (lambda a: (a / ADAPTER).unlink(), f"has no {ADAPTER}"),
        (lambda a: (a / ADAPTER).write_bytes(b"no"), "not valid safetensors"),
        (lambda a: retensor(a, lambda t: t.pop(A)), "the other half of an adapter"),
        (lambda a: retensor(a, lambda t: t.clear()), "has no tensors"),
        (lambda a: retensor(a, lambda t: t.update({"x": t[A].clone()})), "belongs to no linear layer"),
        (lambda a: retensor(a, lambda t: t[A].fill_(float("nan"))), "not finite"),
        (
            lambda a: retensor(a, lambda t: t.update({A: t[A].bfloat16().fill_(float("inf"))})),
            "not finite",
        ),
        (lambda a: retensor(a, lambda t: t.update({A: t[A].to(torch.int8)})), "has dtype I8"),
    ],
)
def test_a_hostile_adapter_is_refused_in_one_sentence(
    folders: tuple[Path, Path], spoil: Callable[[Path], object], said: str
):
    adapter, _ = folders
    spoil(adapter)
    with pytest.raises(ConfigError) as refused:
        check(adapter)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_rank_stabilised_adapter_has_its_own_scale(folders: tuple[Path, Path]):
    adapter, _ = folders
    change(adapter, use_rslora=True)
    found = adapter_of(adapter)
    assert found is not None
    assert found.scale == pytest.approx(5 / 3**0.5)
