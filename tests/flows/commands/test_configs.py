"""`prefect-rlhf doctor`: a line for each comparison, its exit status, and one sentence for every mistake."""

import json

import pytest

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.run.examination import Patient, default_strategies
from prefect_rlhf.rlhf_tasks.doctor import Finding
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from tests.adapter_folders import write_adapter
from tests.tiny_models import tiny_config, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(tiny_config("qwen3")).save_pretrained(folder)
    return folder


@pytest.fixture
def doctor(capsys):
    """Runs the command; gives its status, output and errors."""

    def run(folder, *arguments):
        try:
            status = run_command(["doctor", "--model", str(folder), *arguments])
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, printed.out, " ".join(printed.err.split())

    return run


@pytest.mark.slow
@pytest.mark.dist
def test_every_comparison_of_every_strategy_is_a_line(doctor, model):
    status, out, err = doctor(model, "--strategy", "1,2,1", "1,1,2")
    assert status == 0, err
    told, *lines = out.strip().splitlines()
    assert told.endswith("qwen3, 0.02162 million parameters, float32")
    assert len(lines) == 2 * 4
    for line in lines:
        assert line.startswith(("dp=1 tp=2 pp=1", "dp=1 tp=1 pp=2"))
        assert line.endswith("ok")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_an_adapters_folder_is_examined_as_the_merged_model(doctor, model, tmp_path):
    write_adapter(tmp_path / "adapter", model)
    status, out, err = doctor(tmp_path / "adapter", "--strategy", "1,2,1")
    assert status == 0, err
    assert [line.endswith("ok") for line in out.strip().splitlines()[1:]] == [True] * 4


def test_a_difference_out_of_tolerance_is_told_with_status_1(doctor, model, monkeypatch):
    found = Finding(ParallelStrategy(tp=2), "logits", 3e-3, 1e-4)
    monkeypatch.setattr("prefect_rlhf.flows.commands.configs.examined", lambda *_: [found])
    status, out, _ = doctor(model)
    assert status == 1
    assert "3.00e-03 of 1e-04   out of tolerance" in out


def test_a_model_of_one_layer_and_one_head_is_not_split_by_default(tmp_path):
    config = tiny_config("llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    tiny_model(config).save_pretrained(tmp_path)
    assert default_strategies(Patient.of(tmp_path, "float32")) == [ParallelStrategy(), ParallelStrategy(dp=2)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--strategy", "2,2"), "--strategy '2,2' is not dp,tp,pp"),
        (("--strategy", "1,0,1"), "--strategy '1,0,1' is not dp,tp,pp"),
        (
            ("--strategy", "1,8,1"),
            "dp=1 tp=8 pp=1 cannot be laid out: tp=8 exceeds the model's 4 query heads",
        ),
        (("--strategy", "1,1,9"), "dp=1 tp=1 pp=9 cannot be laid out: pp=9 exceeds the model's 4 layers"),
        (("--strategy", "99,1,1"), "it needs 99 ranks on this machine; at most 64"),
        (("--strategy", "64,1,1"), "GiB of memory (128 times the weights, and 64 rank processes)"),
    ],
)
def test_a_strategy_that_cannot_be_gets_one_sentence(doctor, model, monkeypatch, arguments, said):
    monkeypatch.setattr("prefect_rlhf.flows.run.examination.memory_bytes", lambda: 8 * 2**30)
    status, _, err = doctor(model, *arguments)
    assert status == 2
    assert said in err


def test_a_bad_model_gets_one_sentence(doctor, model, tmp_path):
    assert doctor(tmp_path)[2].startswith(f"error: Model folder '{tmp_path}' has no config.json")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "has neither model.safetensors" in doctor(tmp_path)[2]
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    status, _, err = doctor(tmp_path)
    assert (status, "model_type 'bert'" in err) == (2, True)
