"""Folders that are written parameter by parameter, read back by transformers and by a stage."""

import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_tasks.parallel.layout.shape import Lora, linear_modules
from rlhf_tasks.parallel.layout.slices import Head, Layout
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.layout.weight_files import check_weights
from rlhf_tasks.parallel.model.export import FolderWriter
from rlhf_tasks.parallel.model.stage import Stage
from rlhf_tasks.parallel.model.weights import load, load_config
from rlhf_tasks.system.reading import ConfigError
from tests.tiny_models import by_our_names, packed, shape_of, tiny_config, tiny_model, tokens

ALONE = Placement((0,), ParallelStrategy())


def layout_of(source: Path, head: Head) -> Layout:
    return Layout(shape_of(load_config(source)), head, ALONE)


def write(folder: Path, source: Path, head: Head, weights: dict[str, Tensor], shard_bytes: int) -> None:
    """All parameters of a model, by our names, as a folder."""
    layout = layout_of(source, head)
    dtype = weights["model.norm.weight"].dtype
    writer = FolderWriter(folder, source, layout, dtype, shard_bytes)
    for spec in layout.parameters:
        writer.add(spec.name, weights[spec.name])
    writer.close()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("gemma", {}),
        ("qwen2", {}),
        ("phi3", {}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("gpt2", {}),
    ],
    ids=["llama", "qwen3", "gemma", "qwen2", "phi3", "mixtral", "qwen3_moe", "gpt2"],
)
def test_a_round_trip_is_bit_exact(tmp_path: Path, family: str, changes: dict[str, Any]):
    source, folder = tmp_path / "source", tmp_path / "out"
    model = tiny_model(tiny_config(family, **changes))
    model.save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{}")
    weights = by_our_names(layout_of(source, "lm"), model, model.state_dict())
    write(folder, source, "lm", weights, shard_bytes=9999)
    assert (folder / "model.safetensors.index.json").exists()
    assert (folder / "tokenizer_config.json").exists()
    assert (folder / "generation_config.json").exists()
    again, loading = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager"
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    [sequence] = tokens(6)
    theirs, ours = model(sequence[None]).logits, again.eval()(sequence[None]).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # tensors may lie otherwise in memory


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_adapters_of_transposed_weights_are_saved_as_peft_reads_them(tmp_path: Path):
    """GPT-2's attention and MLP both end in a module of one name: each has its adapter."""
    source, folder = tmp_path / "source", tmp_path / "out"
    model = tiny_model(tiny_config("gpt2"))
    model.save_pretrained(source)
    shape = shape_of(load_config(source))
    layout = Layout(shape, "lm", ALONE, Lora(3, 5.0, tuple(linear_modules(shape))))
    stage = Stage(
        load_config(source),
        layout,
        ALONE.coordinate(0),
        None,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    load(stage, source, seed=4)
    writer = FolderWriter(folder, source, layout, torch.float32)
    for name, adapter in stage.trained_slices().items():
        adapter.data.normal_(0.0, 0.3)
        writer.add(name, adapter.data)
    writer.close()
    assert len(stage.trained_slices()) == 4 * 3 * 2
    [sequence] = tokens(9)
    alone = model(sequence[None]).logits[0].detach()
    adapted: Any = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), folder).eval()
    theirs, micro = adapted(sequence[None]).logits[0], packed([sequence])
    assert (theirs - alone).abs().max() > 1.0
    torch.testing.assert_close(stage(micro.input_ids, micro), theirs, rtol=1e-4, atol=1e-4)


def test_the_weights_of_a_decoder_without_its_head_are_read(tmp_path: Path):
    """GPT-2's folder on the Hub has names without `transformer.`, and masks."""
    model: Any = tiny_model(tiny_config("gpt2"))
    model.transformer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "h.0.attn.c_attn.weight" in weights
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(4)}
    save_file({**weights, **masks}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    layout = layout_of(tmp_path, "lm")
    check_weights(tmp_path, layout.parameters, needs_head=False)
    stage = Stage(
        load_config(tmp_path),
        layout,
        ALONE.coordinate(0),
        None,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    assert load(stage, tmp_path, seed=4) == ()
    for name, tensor in by_our_names(layout, model, model.state_dict()).items():
        assert torch.equal(stage.named_slices()[name], tensor), name


def test_a_reward_model_is_saved_as_a_sequence_classifier(tmp_path: Path):
    source, folder, again = tmp_path / "source", tmp_path / "out", tmp_path / "again"
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(source)

    def read(place: Path) -> dict[str, Tensor]:
        layout = layout_of(source, "scalar")
        stage = Stage(
            load_config(source),
            layout,
            ALONE.coordinate(0),
            None,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
        )
        load(stage, place, seed=4)
        return stage.named_slices()

    write(folder, source, "scalar", read(source), 10**9)
    assert (folder / "model.safetensors").exists()
    loaded, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert loaded.config.num_labels == 1
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.architectures == ["LlamaForSequenceClassification"]
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.bfloat16())
    write(again, folder, "scalar", read(folder), 10**9)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_every_file_has_the_mode_that_the_umask_grants(tmp_path: Path, umask: int, mode: int):
    source, folder = tmp_path / "source", tmp_path / "out"
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "tokenizer_config.json").chmod(0o400)
    before = os.umask(umask)
    try:
        weights = by_our_names(layout_of(source, "lm"), model, model.state_dict())
        write(folder, source, "lm", weights, shard_bytes=9999)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert len(modes) > 3
    assert set(modes.values()) == {mode}, modes


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


def test_a_link_out_of_the_model_folder_is_refused_and_nothing_is_written(tmp_path: Path):
    source, folder = tmp_path / "source", tmp_path / "out"
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(source)
    (tmp_path / "id_rsa").write_text("my key")
    (source / "merges.txt").symlink_to(tmp_path / "id_rsa")
    weights = by_our_names(layout_of(source, "lm"), model, model.state_dict())
    with pytest.raises(
        ConfigError, match=r"merges\.txt is a link to .*id_rsa, outside of it.* Copy the file there"
    ):
        write(folder, source, "lm", weights, shard_bytes=1 << 30)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "id_rsa"}


def test_links_inside_the_folder_and_those_of_the_hubs_cache_are_followed(tmp_path: Path):
    """models--X/snapshots/REVISION/FILE -> ../../blobs/HASH, but no blob that is itself a link out of there."""
    revision, blobs = tmp_path / "models--x" / "snapshots" / "a1b2", tmp_path / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(revision)
    for name in ("config.json", "generation_config.json"):
        (revision / name).rename(blobs / name)
        (revision / name).symlink_to(Path("..", "..", "blobs", name))
    (revision / "vocab.json").write_text("{}")
    (revision / "added_tokens.json").symlink_to("vocab.json")
    weights = by_our_names(layout_of(revision, "lm"), model, model.state_dict())
    current = tmp_path / "current"
    current.symlink_to(revision)
    write(tmp_path / "out", current, "lm", weights, shard_bytes=1 << 30)
    assert not (tmp_path / "out" / "generation_config.json").is_symlink()
    assert (tmp_path / "out" / "added_tokens.json").read_text() == "{}"
    (tmp_path / "id_rsa").write_text("my key")
    (blobs / "c3").symlink_to(tmp_path / "id_rsa")
    (revision / "merges.txt").symlink_to(Path("..", "..", "blobs", "c3"))
    with pytest.raises(ConfigError, match="outside of it"):
        write(tmp_path / "again", revision, "lm", weights, shard_bytes=1 << 30)
