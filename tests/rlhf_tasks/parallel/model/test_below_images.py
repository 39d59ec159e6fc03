"""Language models below a model of images: read from its folder, and written back beside its other parts."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from prefect_rlhf.rlhf_tasks.doctor import TOLERANCES, Case, Finding, examine, worst, write_answers
from prefect_rlhf.rlhf_tasks.parallel.layout.below_images import own_name
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora, linear_modules
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import check_weights, read_shape
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import FolderWriter, load, load_config
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.rlhf_tasks.parallel.model.test_stage import assert_close, reference
from tests.tiny_models import packed, tiny_config, tokens

CPU = torch.device("cpu")
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", QWEN_VISION),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN_VISION),
    "gemma3": ("gemma3_text", VISION),
    "gemma4": (
        "gemma4_text",
        {**VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "mistral3": ("mistral", {**VISION, "model_type": "pixtral", "head_dim": 8}),
    "lfm2_vl": ("lfm2", {**VISION, "model_type": "siglip2_vision_model"}),
    "smolvlm": ("llama", VISION),
}
"""model_type -> that of the language model below, and the config of what sees."""


def save_whole(folder: Path, kind: str, **changes: Any) -> Any:
    """Write a tiny model of images with weights large enough that every part matters, by transformers' own class."""
    text, vision = WHOLE[kind]
    below = tiny_config(text, pad_token_id=0).to_dict()
    config = AutoConfig.for_model(kind, text_config=below, vision_config=vision, **changes)
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config, experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return model.eval()


def make_stage(folder: Path, lora: Lora | None = None) -> Stage:
    shape, alone = read_shape(folder), Placement((0,), ParallelStrategy())
    layout = Layout(shape, "lm", alone, lora)
    check_weights(folder, layout.whole.parameters, needs_head=False)
    stage = Stage(load_config(folder), layout, alone.coordinate(0), None, device=CPU, dtype=torch.float32)
    assert load(stage, folder, seed=4) == ()
    return stage


def write(folder: Path, source: Path, layout: Layout, values: dict[str, Tensor], **how: Any) -> None:
    writer = FolderWriter(folder, source, layout, torch.float32, **how)
    for spec in layout.parameters:
        writer.add(spec.name, values[spec.name].detach())
    writer.close()


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", WHOLE)
def test_it_computes_what_transformers_does_and_returns_beside_the_untouched_parts(tmp_path: Path, kind: str):
    source, folder, again = tmp_path / "source", tmp_path / "out", tmp_path / "again"
    model, sequences = save_whole(source, kind), tokens(5, 9)
    (source / "preprocessor_config.json").write_text("{}")
    stage, micro = make_stage(source), packed(sequences)
    assert_close(stage(micro.input_ids, micro), reference(model, "lm", sequences), 1e-5)

    trained = {name: 1.5 * value for name, value in stage.named_slices().items()}
    write(folder, source, stage.layout, trained, shard_bytes=20_000)
    before, after = stored(source), stored(folder)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if own_name(name) is None else 1.5 * tensor), name
    assert (folder / "preprocessor_config.json").is_file()
    loaded, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is type(model)

    trained_stage = make_stage(folder)
    assert torch.equal(trained_stage.named_slices()["model.norm.weight"], trained["model.norm.weight"])
    write(again, folder, trained_stage.layout, trained_stage.named_slices(), shard_bytes=20_000)
    assert stored(again).keys() == after.keys()


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3", "gemma4"])
def test_of_most_kinds_transformers_reads_the_language_model_alone_from_it(tmp_path: Path, kind: str):
    source, folder = tmp_path / "source", tmp_path / "out"
    save_whole(source, kind)
    stage, micro = make_stage(source), packed(tokens(9))
    write(folder, source, stage.layout, stage.named_slices())
    alone = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    assert_close(stage(micro.input_ids, micro), reference(alone, "lm", tokens(9)), 1e-5)


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "gemma3", "gemma4"])
def test_a_reward_model_is_written_without_the_other_parts(tmp_path: Path, kind: str):
    source, folder = tmp_path / "source", tmp_path / "out"
    save_whole(source, kind)
    layout = Layout(read_shape(source), "scalar", Placement((0,), ParallelStrategy()))
    write(folder, source, layout, {s.name: torch.ones(s.shape) for s in layout.parameters})
    assert json.loads((folder / "config.json").read_text())["model_type"] == WHOLE[kind][0]
    assert set(stored(folder)) == {name for spec in layout.parameters for name in spec.stored}
    if kind == "gemma3":  # transformers has no class for the other one
        _, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    "kind", ["qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3", "lfm2_vl", "smolvlm"]
)
def test_adapters_are_those_of_the_model_that_transformers_makes_of_the_folder(tmp_path: Path, kind: str):
    source, folder, sequences = tmp_path / "source", tmp_path / "out", tokens(9)
    save_whole(source, kind)
    lora = Lora(3, 5.0, tuple(linear_modules(read_shape(source))))
    stage, micro = make_stage(source, lora), packed(sequences)
    for adapter in stage.trained_slices().values():
        adapter.data.normal_(0.0, 0.3)
    write(folder, source, stage.trained, stage.trained_slices())
    alone = kind in ("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4")
    loader = AutoModelForCausalLM if alone else AutoModelForImageTextToText
    base = loader.from_pretrained(source, experts_implementation="eager")
    adapted: Any = peft.PeftModel.from_pretrained(base, folder).eval()
    expected = stage(micro.input_ids, micro)
    assert_close(expected, adapted(sequences[0][None]).logits[0], 1e-4)
    merged = make_stage(folder)
    assert_close(merged(micro.input_ids, micro), expected, 1e-4)


def test_experts_that_files_hold_together_are_read_one_by_one(tmp_path: Path):
    """As published Qwen3.5-MoE folders do."""
    save_whole(tmp_path, "qwen3_5_moe")
    wanted = {name: value.clone() for name, value in make_stage(tmp_path).named_slices().items()}
    file = tmp_path / "model.safetensors"
    apart = load_file(file)
    for layer in range(4):
        block = f"model.language_model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([apart.pop(f"{block}.{number}.{part}_proj.weight") for number in range(5)])
            for part in ("gate", "up", "down")
        }
        apart[f"{block}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        apart[f"{block}.down_proj"] = parts["down"]
    save_file(apart, file, metadata={"format": "pt"})
    for name, value in make_stage(tmp_path).named_slices().items():
        assert torch.equal(value, wanted[name]), name
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    save_file({**apart, name: apart[name][:, 1:].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"gate_up_proj has shape \[5, 27, 24\]; config\.json says \[5, 28, 24\]"
    ):
        make_stage(tmp_path)


def test_a_head_in_the_files_says_that_embeddings_are_not_tied(tmp_path: Path):
    """Whatever the config's default is: published Mistral Small folders have such a head."""
    save_whole(tmp_path, "mistral3", tie_word_embeddings=False)
    described = json.loads((tmp_path / "config.json").read_text())
    assert "language_model.lm_head.weight" in load_file(tmp_path / "model.safetensors")
    for says in ({}, {"tie_word_embeddings": True}):
        described.pop("tie_word_embeddings", None)
        (tmp_path / "config.json").write_text(json.dumps({**described, **says}))
        assert not read_shape(tmp_path).tied


def test_embeddings_that_files_have_twice_are_tied_where_the_config_ties_them(tmp_path: Path):
    save_whole(tmp_path, "gemma3", tie_word_embeddings=True)
    file, embeddings = tmp_path / "model.safetensors", "language_model.model.embed_tokens.weight"
    tensors = load_file(file)
    for change, tied in ((0.0, True), (1.0, False)):
        tensors["language_model.lm_head.weight"] = tensors[embeddings] + change
        save_file(tensors, file, metadata={"format": "pt"})
        assert read_shape(tmp_path).tied == tied
        stage, folder = make_stage(tmp_path), tmp_path / f"out-{tied}"
        write(folder, tmp_path, stage.layout, stage.named_slices())
        says = json.loads((folder / "config.json").read_text())
        assert says.get("tie_word_embeddings", True) == tied
        assert ("language_model.lm_head.weight" in stored(folder)) != tied
        assert read_shape(folder).tied == tied


def test_without_weights_their_index_says_whether_there_is_a_head(tmp_path: Path):
    save_whole(tmp_path, "gemma3")
    (tmp_path / "model.safetensors").unlink()
    for names, tied in ((["lm_head.weight"], False), (["model.norm.weight"], True)):
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert read_shape(tmp_path).tied == tied


def test_trained_tensors_are_in_exports_whatever_they_are_called(tmp_path: Path):
    """Also under the names of a language model alone."""
    source, folder, file = tmp_path / "source", tmp_path / "out", "model.safetensors"
    save_whole(source, "gemma4")
    own = {name.replace("model.language_model.", "model."): t for name, t in load_file(source / file).items()}
    save_file(own, source / file, metadata={"format": "pt"})
    stage = make_stage(source)
    write(folder, source, stage.layout, {name: 1.5 * value for name, value in stage.named_slices().items()})
    after, trained = stored(folder), {n for spec in stage.layout.parameters for n in spec.stored}
    assert after.keys() == own.keys()
    for name, tensor in own.items():
        assert torch.equal(after[name], 1.5 * tensor if name in trained else tensor), name


def test_a_tensor_of_the_language_model_that_it_has_not_is_found(tmp_path: Path):
    save_whole(tmp_path, "gemma3")
    file = tmp_path / "model.safetensors"
    odd = "language_model.model.layers.0.self_attn.q_proj.bias"
    save_file({**load_file(file), odd: torch.ones(24)}, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"q_proj\.bias.*which the model that its config\.json describes has not"
    ):
        make_stage(tmp_path)


STRATEGIES = (ParallelStrategy(tp=2), ParallelStrategy(pp=2), ParallelStrategy(dp=2))


def _examine(rank: int, world: int, case: Case) -> list[Finding]:
    return examine(rank, CPU, case, TOLERANCES["float32"], STRATEGIES)


@pytest.mark.dist
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_5",
        *(pytest.param(k, marks=pytest.mark.whole) for k in ("qwen3_5_moe", "gemma3", "gemma4", "mistral3")),
    ],
)
def test_the_doctor_compares_it_with_the_whole_model(ranks, tmp_path: Path, kind: str):
    save_whole(tmp_path / "model", kind)
    (tmp_path / "answers").mkdir()
    sequences = tuple(tuple(s.tolist()) for s in tokens(5, 9, 1, 7))
    case = Case(str(tmp_path / "model"), str(tmp_path / "answers"), "float32", sequences, 6)
    write_answers(case, CPU)
    findings = worst(ranks.run(2, _examine, case))
    assert len(findings) == len(STRATEGIES) * 4
    assert all(found.passed for found in findings), findings
    assert all(found.difference > 0 for found in findings if found.check == "gradients")
