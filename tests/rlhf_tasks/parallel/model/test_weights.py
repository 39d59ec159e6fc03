"""Weights from Hugging Face folders, and folders from weights."""

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Mxfp4Config,
)

from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora, linear_modules, parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import CORRECTION, Head
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import (
    INDEX,
    SINGLE,
    LowRank,
    check_weights,
    read_shape,
)
from prefect_rlhf.rlhf_tasks.parallel.model import weights
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import (
    FolderWriter,
    _Merged,
    from_mxfp4,
    initialise,
    load,
    load_config,
    stored_rows,
)
from prefect_rlhf.rlhf_tasks.system.rank_process import give_back, process_bytes
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.adapter_folders import write_adapter
from tests.tiny_models import (
    GEMMA4,
    by_our_names,
    held_slices,
    in_mxfp4,
    packed,
    shape_of,
    tiny_config,
    tiny_model,
    tokens,
)

CPU = torch.device("cpu")
ALONE = Placement((0,), ParallelStrategy())
UNEVEN = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}


def make_stage(config, head: Head = "lm", dtype=torch.float32, lora=None) -> Stage:
    """A whole model."""
    layout = Layout(shape_of(config), head, ALONE, lora)
    return Stage(config, layout, ALONE.coordinate(0), None, device=CPU, dtype=dtype)


@pytest.mark.parametrize(
    ("family", "changes", "strategy"),
    [
        ("llama", {**UNEVEN, "attention_bias": True}, ParallelStrategy(dp=2, tp=2)),
        ("qwen3", {**UNEVEN, "tie_word_embeddings": True}, ParallelStrategy(tp=2, pp=2)),
        ("gemma", {}, ParallelStrategy(tp=4)),
        ("gemma4_text", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("phi3", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("olmo2", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("glm4", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("qwen2_moe", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("glm4_moe", {}, ParallelStrategy(tp=4)),
        ("deepseek_v3", {}, ParallelStrategy(tp=4)),
        ("mixtral", {}, ParallelStrategy(tp=4)),
        ("qwen3_moe", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("gpt_oss", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("gpt2", {"hidden_size": 36, "num_attention_heads": 9}, ParallelStrategy(tp=2, pp=2)),
    ],
)
def test_each_rank_reads_or_draws_its_slices_of_one_whole_model(tmp_path: Path, family, changes, strategy):
    model = tiny_model(tiny_config(family, **changes))
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # experts of a layer are in several files
    config = load_config(tmp_path)
    placement = Placement(tuple(reversed(range(strategy.size))), strategy)
    layout = Layout(shape_of(config), "lm", placement)
    alone = make_stage(config)
    initialise(alone, seed=4)
    read, drawn = by_our_names(layout, model, model.state_dict()), alone.named_slices()
    group: Any = object() if strategy.tp > 1 else None  # nothing is computed, so nothing is sent
    for device in placement.devices:
        stage = Stage(config, layout, placement.coordinate(device), group, device=CPU, dtype=torch.float32)
        for whole in (read, drawn):
            if whole is read:
                assert load(stage, tmp_path, seed=4) == ()
            else:
                initialise(stage, seed=4)
            for name, expected in held_slices(layout, device, whole).items():
                assert torch.equal(stage.named_slices()[name], expected), (device, name)


def test_in_16_bits_the_corrections_of_a_router_keep_their_differences(tmp_path: Path):
    model = tiny_model(tiny_config("glm4_moe", n_routed_experts=64, n_group=4))
    [name, *_] = names = [name for name in model.state_dict() if name.endswith(CORRECTION)]
    for each in names:  # as large as published ones, in which bfloat16 knows steps of 0.03
        model.get_buffer(each).copy_(
            6.94 + 0.05 * torch.randn(64, generator=torch.Generator().manual_seed(1))
        )
    model.save_pretrained(tmp_path)
    config, published = load_config(tmp_path), model.get_buffer(name)
    wide, narrow = make_stage(config), make_stage(config, dtype=torch.bfloat16)
    for stage in (wide, narrow):
        load(stage, tmp_path, seed=0)
    assert torch.equal(wide.named_slices()[name], published)
    held = narrow.named_slices()[name].float()
    assert ((held - held[0]) - (published - published[0])).abs().max() < 1e-3
    spec = narrow.layout.specs[name]
    assert torch.equal(weights.near_zero(held, spec, torch.bfloat16).float(), held), "not what was written"


def _anonymous_bytes_while_loading(rank: int, world: int, folder: str) -> tuple[int, int, int]:
    """(most bytes at a parameter that is filled, bytes of the slices, bytes of the largest tensor), of one of two tp
    ranks."""
    config, placement = load_config(folder), Placement((0, 1), ParallelStrategy(tp=2))
    layout, group = Layout(shape_of(config), "lm", placement), cast(Any, object())
    stage = Stage(config, layout, placement.coordinate(0), group, device=CPU, dtype=torch.float32)
    fill, held = weights._fill, []

    def watched(parameter: torch.Tensor, values: torch.Tensor, *rest: Any) -> None:
        fill(parameter, values, *rest)
        held.append(process_bytes(CPU))

    weights._fill = watched
    give_back()
    before = process_bytes(CPU)
    try:
        load(stage, folder, seed=0)
    finally:
        weights._fill = fill
    slices = sum(p.numel() * p.itemsize for p in stage.parameters())
    return max(held) - before, slices, 4 * max(prod(spec.shape) for spec in layout.specs.values())


@pytest.mark.dist
def test_a_rank_holds_its_slices_and_one_tensor_while_it_reads(tmp_path: Path, ranks):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    model = tiny_model(tiny_config("llama", **sizes))
    model.save_pretrained(tmp_path)
    [(held, slices, largest)] = ranks.run(1, _anonymous_bytes_while_loading, str(tmp_path))
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert slices + largest < 0.7 * whole
    assert held <= slices + largest + 2**20


def test_a_critic_starts_from_a_language_model_with_a_new_head(tmp_path: Path):
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    heads = []
    for seed in (5, 5, 6):
        stage = make_stage(config, "scalar")
        assert load(stage, tmp_path, seed) == ("score.weight",)
        assert torch.equal(stage.model.norm.weight, model.model.norm.weight)
        heads.append(stage.score.weight.detach())
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0.2 < heads[0].std() / config.initializer_range < 3


def change(folder: Path, norm: Tensor | None) -> None:
    """Give the folder's only file another norm, or none."""
    tensors = load_file(folder / SINGLE) | {"model.norm.weight": norm}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / SINGLE)


def index(folder: Path, text: str = "") -> None:
    """Write an index; by default one that names the only file for every parameter."""
    names = dict.fromkeys(load_file(folder / SINGLE), SINGLE)
    (folder / INDEX).write_text(text or json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: change(f, None), r"lacks model\.norm\.weight"),
        (lambda f: change(f, torch.ones(23)), r"model\.norm\.weight has shape \[23\].*\[24\]"),
        *(
            (lambda f, b=b: (f / SINGLE).write_bytes(b), "not valid safetensors")
            for b in (b"", b"{}", b"\xff" * 64)
        ),
        (
            lambda f: os.truncate(f / SINGLE, (f / SINGLE).stat().st_size - 1),
            r"is cut off: \d+ of \d+ bytes",
        ),
        (lambda f: (f / SINGLE).unlink(), "has neither"),
        (lambda f: index(f, "{"), r"index\.json.*not valid JSON"),
        (lambda f: index(f, "{}"), r"index\.json.*has no weight_map"),
        (lambda f: index(f, "[]"), r"index\.json.*expected a JSON object"),
        (lambda f: index(f, '{"weight_map": ["a"]}'), r"index\.json.*has no weight_map"),
        (lambda f: [index(f), (f / SINGLE).unlink()], "names files that are not there: model"),
        (lambda f: [index(f), change(f, None)], r"lacks model\.norm\.weight, which .*index\.json says"),
    ],
)
def test_faults_of_a_folder_are_named(tmp_path: Path, spoil: Callable[[Path], object], said: str):
    tiny_model(tiny_config("llama")).save_pretrained(tmp_path)
    stage = make_stage(load_config(tmp_path))
    spoil(tmp_path)
    with pytest.raises(ValueError, match=said):
        load(stage, tmp_path, seed=0)


def test_a_folder_without_a_config_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nowhere.*has no config\.json"):
        load_config(tmp_path / "nowhere")


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_random_start_follows_the_config(family: str):
    config = tiny_config(family, hidden_size=64, initializer_range=0.05, pad_token_id=3, attention_bias=True)
    stage = make_stage(config)
    initialise(stage, seed=11)
    slices = stage.named_slices()
    assert torch.all(slices["model.norm.weight"] == (0.0 if family == "gemma" else 1.0))
    assert torch.all(slices["model.layers.1.self_attn.q_proj.bias"] == 0.0)
    assert torch.all(slices["model.embed_tokens.weight"][3] == 0.0)
    weight = slices["model.layers.1.mlp.up_proj.weight"]
    assert abs(float(weight.detach().std()) - 0.05) < 0.003
    assert not torch.equal(weight, slices["model.layers.2.mlp.up_proj.weight"])


def test_a_random_start_depends_on_the_seed():
    stage = make_stage(tiny_config("qwen3"))
    heads = []
    for seed in (1, 2, 1):
        initialise(stage, seed)
        heads.append(stage.named_slices()["lm_head.weight"].detach().clone())
    assert torch.equal(heads[0], heads[2])
    assert not torch.equal(heads[0], heads[1])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    ("family", "changes", "strategy"),
    [
        ("llama", UNEVEN, ParallelStrategy(dp=2, tp=2)),
        ("gemma4_text", GEMMA4["inputs"], ParallelStrategy(tp=2, pp=2)),
        ("gemma4_text", {}, ParallelStrategy(tp=2, pp=2)),
        ("qwen3", {"tie_word_embeddings": True}, ParallelStrategy(tp=2, pp=2)),
        ("phi3", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("olmo2", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("glm4", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("qwen2_moe", {}, ParallelStrategy(tp=2, pp=2)),
        ("gpt_oss", UNEVEN, ParallelStrategy(tp=2, pp=2)),
        ("deepseek_v3", {}, ParallelStrategy(tp=2, pp=2)),
        ("gpt2", {"hidden_size": 36, "num_attention_heads": 9}, ParallelStrategy(tp=2, pp=2)),
    ],
)
def test_an_adapters_folder_is_read_as_the_model_that_peft_merges(tmp_path: Path, family, changes, strategy):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    tiny_model(tiny_config(family, **changes)).save_pretrained(base)
    merged = write_adapter(folder, base, family)
    alone = make_stage(load_config(folder), dtype=torch.float64)
    assert load(alone, folder, seed=4) == ()
    [sequence] = tokens(9)
    micro = packed([sequence])
    theirs = merged(sequence[None]).logits[0]
    torch.testing.assert_close(alone(micro.input_ids, micro), theirs, rtol=1e-5, atol=1e-5)
    placement = Placement(tuple(range(strategy.size)), strategy)
    layout = Layout(shape_of(load_config(folder)), "lm", placement)
    wanted = by_our_names(layout, merged, merged.state_dict())
    group: Any = object() if strategy.tp > 1 else None  # nothing is computed, so nothing is sent
    for device in placement.devices:
        at = placement.coordinate(device)
        stage = Stage(load_config(folder), layout, at, group, device=CPU, dtype=torch.float64)
        load(stage, folder, seed=4)
        expected = held_slices(layout, device, wanted)
        torch.testing.assert_close(dict(stage.named_slices()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_a_reward_models_adapter_brings_its_head(tmp_path: Path):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    tiny_model(tiny_config("llama")).save_pretrained(base)  # a language model
    merged = write_adapter(folder, base, head="scalar")
    stage = make_stage(load_config(folder), head="scalar", dtype=torch.float64)
    assert load(stage, folder, seed=4) == ()
    torch.testing.assert_close(stage.named_slices()["score.weight"], merged.score.weight.data)


@pytest.mark.parametrize("rank", [1, 4, 32])
def test_any_part_of_a_merged_weight_has_the_bits_of_the_whole(rank: int):
    generator = torch.Generator().manual_seed(rank)
    own, b, a = (torch.randn(n, m, generator=generator) for n, m in ((64, 64), (64, rank), (rank, 64)))
    merged = _Merged(own, a, b, LowRank(Path("f"), "a", "b", 0.5, False))
    whole = merged[:, :]
    torch.testing.assert_close(whole, own + 0.5 * (b @ a))
    for first in range(0, 64, 8):
        part = slice(first, first + 8)
        assert torch.equal(merged[part, :], whole[part])
        assert torch.equal(merged[:, part], whole[:, part])


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
        *(("gemma4_text", own) for own in GEMMA4.values()),
        ("qwen2", {}),
        ("phi3", {}),
        ("olmo3", {}),
        ("glm", {}),
        ("qwen2_moe", {}),
        ("glm4_moe", {}),
        ("deepseek_v3", {}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("granite", {}),
        ("cohere2", {}),
        ("gpt2", {}),
    ],
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


def test_weights_in_mxfp4_are_read_in_slices_as_transformers_dequantises_them_and_written_as_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source, folder = tmp_path / "source", tmp_path / "out"
    in_mxfp4(source, tiny_config("gpt_oss", hidden_size=64, intermediate_size=96))
    theirs = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    config, strategy = load_config(source), ParallelStrategy(tp=3, pp=2)
    placement = Placement(tuple(range(strategy.size)), strategy)
    layout = Layout(read_shape(source), "lm", placement)
    check_weights(source, layout.parameters, needs_head=True)
    dequantised = {name: p.detach() for name, p in theirs.named_parameters()}
    wanted = {
        spec.name: stored_rows(dequantised.__getitem__, spec, Interval(0, spec.length))
        for spec in layout.parameters
    }
    computed = []

    def counted(blocks, scales):
        computed.append(scales.shape[0])
        return from_mxfp4(blocks, scales)

    monkeypatch.setattr(weights, "from_mxfp4", counted)
    for device in placement.devices:  # a third of 96 columns begins inside a block of 32 gates and columns
        at, group = placement.coordinate(device), cast(Any, object())
        stage = Stage(config, layout, at, group, device=CPU, dtype=torch.float32)
        computed.clear()
        load(stage, source, seed=0)
        # Of each of a layer's 5 experts: 32 gates, as many columns beside them, and 64 rows of the way down.
        assert sum(computed) == len(stage.layers) * 5 * (32 + 32 + 64), "nothing is computed twice"
        for name, expected in held_slices(layout, device, wanted).items():
            assert torch.equal(stage.named_slices()[name], expected), name

    write(folder, source, "lm", {name: tensor.bfloat16() for name, tensor in wanted.items()}, 10**9)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    again, loading = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    for name, tensor in dequantised.items():
        assert torch.equal(again.get_parameter(name), tensor.bfloat16().float()), name
        if "_proj" in name and "experts" in name and "bias" not in name:
            assert torch.equal(again.get_parameter(name), tensor), (
                name
            )  # 4 bits and a scale: nothing is rounded


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"down_proj_scales": None},
            r"lacks model\.layers\.0\.mlp\.experts\.down_proj_scales, the scales of",
        ),
        (
            {"down_proj_blocks": torch.zeros(5, 64, 3, 15, dtype=torch.uint8)},
            r"shape \[5, 64, 3, 15\]; .*16\]",
        ),
        ({"down_proj_scales": torch.zeros(5, 64, 3)}, r"down_proj_scales has dtype F32, not one of U8"),
        ({"other_blocks": torch.zeros(1)}, r"has 'model\.layers\.0\.mlp\.experts\.other_blocks'"),
    ],
    ids=["no scales", "shape", "dtype", "another tensor"],
)
def test_mxfp4_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], said: str):
    in_mxfp4(tmp_path, tiny_config("gpt_oss", hidden_size=64, intermediate_size=96))
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in changes.items():
        stored.pop(f"model.layers.0.mlp.experts.{name}", None)
        if tensor is not None:
            stored[f"model.layers.0.mlp.experts.{name}"] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=said):
        check_weights(tmp_path, parameters(read_shape(tmp_path), "lm"), needs_head=True)


def test_the_numbers_of_mxfp4():
    numbers = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 16)  # as low halves; the high ones are 0
    found = from_mxfp4(numbers, torch.tensor([[128]], dtype=torch.uint8))[0, ::2].tolist()
    assert found[:8] == [0, 1, 2, 3, 4, 6, 8, 12]
    assert found[8:] == [-0.0, -1, -2, -3, -4, -6, -8, -12]
    assert from_mxfp4(numbers << 4, torch.tensor([[126]], dtype=torch.uint8))[0, 1::2].tolist()[7] == 3


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_adapters_of_transposed_weights_are_saved_as_peft_reads_them(tmp_path: Path):
    """GPT-2's attention and MLP both end in a module of one name: each has its adapter."""
    source, folder = tmp_path / "source", tmp_path / "out"
    model = tiny_model(tiny_config("gpt2"))
    model.save_pretrained(source)
    lora = Lora(3, 5.0, tuple(linear_modules(shape_of(load_config(source)))))
    stage = make_stage(load_config(source), lora=lora)
    load(stage, source, seed=4)
    writer = FolderWriter(folder, source, stage.trained, torch.float32)
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
    stage = make_stage(load_config(tmp_path))
    assert load(stage, tmp_path, seed=4) == ()
    for name, tensor in by_our_names(layout, model, model.state_dict()).items():
        assert torch.equal(stage.named_slices()[name], tensor), name


def test_a_reward_model_is_saved_as_a_sequence_classifier(tmp_path: Path):
    source, folder, again = tmp_path / "source", tmp_path / "out", tmp_path / "again"
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(source)

    def read(place: Path) -> dict[str, Tensor]:
        stage = make_stage(load_config(source), "scalar", torch.bfloat16)
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
    shared = tmp_path / "blobs" / "ab" / "abcd"  # of several repositories, as the client marks it
    shared.parent.mkdir(parents=True)
    shared.write_text("{}")
    (blobs / "special").symlink_to(Path("..", "..", "blobs", "ab", "abcd"))
    (revision / "special_tokens_map.json").symlink_to(Path("..", "..", "blobs", "special"))
    with pytest.raises(ConfigError, match="outside of it"):
        write(tmp_path / "unmarked", revision, "lm", weights, shard_bytes=1 << 30)
    (tmp_path / "blobs" / ".huggingface-shared-blobs").touch()
    write(tmp_path / "marked", revision, "lm", weights, shard_bytes=1 << 30)
    assert (tmp_path / "marked" / "special_tokens_map.json").read_text() == "{}"
    (tmp_path / "id_rsa").write_text("my key")
    (blobs / "c3").symlink_to(tmp_path / "id_rsa")
    (revision / "merges.txt").symlink_to(Path("..", "..", "blobs", "c3"))
    with pytest.raises(ConfigError, match="outside of it"):
        write(tmp_path / "again", revision, "lm", weights, shard_bytes=1 << 30)
