"""Folders written by the ranks of a placement, read back by transformers and by other placements."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_tasks.parallel.export import FolderWriter, export
from rlhf_tasks.parallel.groups import ProcessGroups, device_sets
from rlhf_tasks.parallel.layout import Head, Layout
from rlhf_tasks.parallel.stage import Stage
from rlhf_tasks.parallel.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.weights import initialise, load, load_config
from tests.tiny_models import shape_of, tiny_config, tiny_model, tokens

CPU = torch.device("cpu")
UNEVEN = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}


def _stage(rank: int, source: Path, strategy: ParallelStrategy, head: Head, dtype: torch.dtype):
    placement = Placement(tuple(reversed(range(strategy.size))), strategy)
    groups = ProcessGroups(device_sets(placement), 30.0, CPU)
    config = load_config(source)
    layout = Layout(shape_of(config), head, placement)
    tp_group = groups[placement.tp_group(rank)]
    stage = Stage(config, layout, placement.coordinate(rank), tp_group, device=CPU, dtype=dtype)
    return stage, groups


def _load_and_export(
    rank: int,
    world: int,
    source: Path,
    folder: Path,
    strategy: ParallelStrategy,
    head: Head,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 9999,
) -> None:
    stage, groups = _stage(rank, source, strategy, head, dtype)
    load(stage, source, seed=4)
    export(stage, groups, folder, source, shard_bytes=shard_bytes)


def _initialise_and_export(rank: int, world: int, source: Path, folder: Path, strategy) -> None:
    stage, groups = _stage(rank, source, strategy, "lm", torch.float32)
    initialise(stage, seed=4)
    export(stage, groups, folder, source)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("family", "changes", "strategy"),
    [
        ("llama", {**UNEVEN, "attention_bias": True}, ParallelStrategy(dp=2, tp=2)),
        ("qwen3", {**UNEVEN, "tie_word_embeddings": True}, ParallelStrategy(tp=2, pp=2)),
        ("gemma", {}, ParallelStrategy(tp=4)),
        ("qwen2", {}, ParallelStrategy()),
    ],
)
def test_a_round_trip_is_bit_exact(ranks, tmp_path: Path, family: str, changes: dict, strategy):
    source, folder = tmp_path / "source", tmp_path / "out"
    model = tiny_model(tiny_config(family, **changes))
    model.save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{}")
    ranks.run(strategy.size, _load_and_export, source, folder, strategy, "lm")
    assert (folder / "model.safetensors.index.json").exists()
    assert (folder / "tokenizer_config.json").exists()
    assert (folder / "generation_config.json").exists()
    again, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    [sequence] = tokens(6)
    assert torch.equal(again.eval()(sequence[None]).logits, model(sequence[None]).logits)


@pytest.mark.dist
def test_a_reward_model_is_saved_as_a_sequence_classifier(ranks, tmp_path: Path):
    source, folder, again = tmp_path / "source", tmp_path / "out", tmp_path / "again"
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(source)
    strategy = ParallelStrategy(tp=2)
    ranks.run(2, _load_and_export, source, folder, strategy, "scalar", torch.bfloat16, 10**9)
    assert (folder / "model.safetensors").exists()
    loaded, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert loaded.config.num_labels == 1
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.architectures == ["LlamaForSequenceClassification"]
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.bfloat16())
    ranks.run(2, _load_and_export, folder, again, strategy, "scalar", torch.bfloat16, 10**9)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.dist
def test_a_random_start_is_the_same_in_every_layout(ranks, tmp_path: Path):
    config = tiny_config("qwen3", **UNEVEN)
    config.save_pretrained(tmp_path)
    for strategy in (ParallelStrategy(), ParallelStrategy(tp=2, pp=2)):
        ranks.run(strategy.size, _initialise_and_export, tmp_path, tmp_path / str(strategy.size), strategy)
    files = [(tmp_path / size / "model.safetensors").read_bytes() for size in "14"]
    assert files[0] == files[1]


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path):
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    layout = Layout(shape_of(config), "lm", Placement((0,), ParallelStrategy()))
    folder = tmp_path / "out"
    writer = FolderWriter(folder, tmp_path, layout, torch.float32)
    for spec in layout.parameters[:-1]:
        writer.add(spec.name, torch.zeros(spec.shape))
    with pytest.raises(AssertionError, match="not added"):
        writer.close()
    assert not folder.exists()
    last = layout.parameters[-1]
    writer.add(last.name, torch.zeros(last.shape))
    writer.close()
    assert (folder / "model.safetensors").exists()
    with pytest.raises(FileExistsError, match="out is there already"):
        FolderWriter(folder, tmp_path, layout, torch.float32)


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_ino, folder.exists()))
    )
    config, folder = tiny_config("llama"), tmp_path / "model"
    config.save_pretrained(tmp_path)
    layout = Layout(shape_of(config), "lm", Placement((0,), ParallelStrategy()))
    writer = FolderWriter(folder, tmp_path, layout, torch.float32)
    for spec in layout.parameters:
        writer.add(spec.name, torch.zeros(spec.shape))
    writer.close()
    before = {inode for inode, named in synced if not named}
    assert before == {path.stat().st_ino for path in (folder, *folder.iterdir())}
    assert [inode for inode, named in synced if named] == [tmp_path.stat().st_ino]
