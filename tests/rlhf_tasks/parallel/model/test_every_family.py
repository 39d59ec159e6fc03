"""What a user does with a model of each family: the doctor, adapters for peft, an export that transformers loads."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prefect_rlhf.rlhf_tasks.doctor import TOLERANCES, Case, Finding, examine, worst, write_answers
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora, linear_modules
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import check_weights, read_shape
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import FolderWriter, load, load_config
from tests.rlhf_tasks.parallel.model.test_stage import assert_close, reference
from tests.tiny_models import CONFIGS, packed, tiny_config, tiny_model, tokens

CPU = torch.device("cpu")


def make_stage(folder: Path, base: Path, lora: Lora | None = None) -> Stage:
    layout = Layout(read_shape(base), "lm", Placement((0,), ParallelStrategy()), lora)
    check_weights(folder, layout.whole.parameters, needs_head=False)
    at = layout.placement.coordinate(0)
    stage = Stage(load_config(base), layout, at, None, device=CPU, dtype=torch.float32)
    assert load(stage, folder, seed=4) == ()
    return stage


def write(folder: Path, source: Path, layout: Layout, values: dict[str, Any]) -> None:
    writer = FolderWriter(folder, source, layout, torch.float32)
    for spec in layout.parameters:
        writer.add(spec.name, values[spec.name].detach())
    writer.close()


def logits(stage: Stage, sequences: list[Tensor]) -> Tensor:
    micro = packed(sequences)
    return stage(micro.input_ids, micro).detach()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_are_read_by_peft_and_merged_by_us_into_what_transformers_loads(tmp_path: Path, family: str):
    source, adapter, merged = tmp_path / "source", tmp_path / "adapter", tmp_path / "merged"
    tiny_model(tiny_config(family)).save_pretrained(source)
    lora = Lora(2, 3.0, tuple(linear_modules(read_shape(source))))
    stage, sequences = make_stage(source, source, lora), tokens(9, 5)
    before = logits(stage, sequences)
    for half in stage.trained_slices().values():
        half.data.normal_(0.0, 0.1)
    ours = logits(stage, sequences)
    assert (ours - before).abs().max() > 1e-3

    write(adapter, source, stage.trained, stage.trained_slices())
    how: dict[str, Any] = {"experts_implementation": "eager"}
    adapted: Any = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(source, **how), adapter
    )
    assert_close(ours, reference(adapted.eval(), "lm", sequences), 1e-4)

    whole = make_stage(adapter, source)
    assert_close(logits(whole, sequences), ours, 1e-4)
    write(merged, source, whole.layout, whole.named_slices())
    model, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True, **how)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_close(ours, reference(model.eval(), "lm", sequences), 1e-4)


def _examine(rank: int, world: int, case: Case) -> list[Finding]:
    return examine(rank, CPU, case, TOLERANCES["float32"], (ParallelStrategy(tp=2), ParallelStrategy(pp=2)))


@pytest.mark.dist
@pytest.mark.whole
@pytest.mark.parametrize("family", CONFIGS)
def test_the_doctor_finds_a_sound_model_sound(ranks, tmp_path: Path, family: str):
    tiny_model(tiny_config(family)).save_pretrained(tmp_path)
    sequences = tuple(tuple(s.tolist()) for s in tokens(5, 9, 1, 7))
    case = Case(str(tmp_path), str(tmp_path), "float32", sequences, 4)
    write_answers(case, CPU)
    findings = worst(ranks.run(2, _examine, case))
    assert len(findings) == 8
    assert all(found.passed for found in findings), findings
