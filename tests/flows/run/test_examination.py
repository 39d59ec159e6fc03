"""The doctor's verdict on an untested family: kept in the model's folder, and asked for by runs."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefect_rlhf.flows.run.examination import Patient, keep_verdict, refuse_unexamined
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.doctor import Finding
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import VERDICT
from prefect_rlhf.rlhf_tasks.parallel.model.weights import FolderWriter
from tests.flows.checked_files import model_folder
from tests.flows.plan_documents import ppo
from tests.tiny_models import SIZES

SPLITS = (ParallelStrategy(dp=2), ParallelStrategy(tp=2, pp=2))
PASSED, FAILED = ([Finding(SPLITS[1], "logits", found, 1e-4)] for found in (1e-6, 0.3))


@pytest.fixture
def folder(tmp_path):
    """A model of a family that is not a tested one; it needs no transformers to be refused."""
    return model_folder(tmp_path / "model", model_type="smollm3")


def test_a_run_of_an_untested_family_needs_a_verdict_of_this_model(folder, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n')
    models = {"actor": str(folder), "reward": str(folder)}
    data = {"train": str(tmp_path / "prompts.jsonl")}
    config = make_config(ppo(models=models, data=data, output_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"untested family 'smollm3'.* is not there\. Run prefect-rlhf doc"):
        prepare(config)
    patient = Patient.of(folder, "float32")
    assert "allows runs of this model" in keep_verdict(patient, SPLITS, PASSED)
    assert prepare(config).iterations > 0

    verdict = json.loads((folder / VERDICT).read_text())
    (folder / VERDICT).write_text(json.dumps({**verdict, "transformers": "4.0"}))
    with pytest.raises(ConfigError, match=r"is of another config\.json or version of transformers"):
        refuse_unexamined(folder, patient.shape)


def test_an_export_takes_the_verdict_along_and_another_config_does_not(tmp_path):
    source, exported = tmp_path / "source", tmp_path / "exported"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("smollm3", **SIZES))
    model.save_pretrained(source)
    patient = Patient.of(source, "float32")
    keep_verdict(patient, SPLITS, PASSED)
    layout = Layout(patient.shape, "lm", Placement((0,), ParallelStrategy()))
    writer = FolderWriter(exported, source, layout, torch.float32)
    for spec in layout.parameters:
        writer.add(spec.name, model.get_parameter(spec.name))
    writer.close()
    refuse_unexamined(exported, patient.shape)

    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
    with pytest.raises(ConfigError, match=r"is of another config\.json"):
        refuse_unexamined(source, patient.shape)


def test_a_failed_examination_takes_an_older_verdict_away(folder):
    patient = Patient.of(folder, "float32")
    keep_verdict(patient, SPLITS, PASSED)
    assert "cannot be trained" in keep_verdict(patient, SPLITS, FAILED)
    with pytest.raises(ConfigError, match="is not there"):
        refuse_unexamined(folder, patient.shape)


def test_a_verdict_needs_every_axis_and_32_bits(folder):
    tell = keep_verdict(Patient.of(folder, "float32"), SPLITS[:1], PASSED)
    assert tell.endswith("runs do not accept this verdict: no strategy has tp above 1.")
    assert "bfloat16 rounds too much" in keep_verdict(Patient.of(folder, "bfloat16"), SPLITS, PASSED)
    assert not (folder / VERDICT).exists()


def test_a_tested_family_needs_no_verdict(tmp_path):
    patient = Patient.of(model_folder(tmp_path / "model"), "float32")
    assert keep_verdict(patient, SPLITS, PASSED) == ""
    refuse_unexamined(patient.folder, patient.shape)
    assert not (patient.folder / VERDICT).exists()
