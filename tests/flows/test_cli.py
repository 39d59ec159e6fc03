"""The command line: every mistake of a user ends in one sentence and status 2, before anything is started."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from flows.cli import run_command
from flows.demo_data import DATA, write_model_folder
from flows.find_rewards import check_rewards
from flows.run_folder import new_run_folder
from rlhf_tasks.config import ConfigError, make_config
from rlhf_tasks.config_parts import RewardFunction
from rlhf_tasks.parallel.shape import ModelShape, parameters
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
PLACE = {
    "devices": [0],
}
CALLS = (
    "actor_generate",
    "reward_inference",
    "ref_inference",
    "critic_inference",
    "actor_train",
    "critic_train",
)


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


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """A sound PPO configuration for 2 devices, with its files."""
    model_folder(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "de"}\n')
    (tmp_path / "rewards.py").write_text(
        "import a_thing_that_is_not_there\n\ndef good(prompts, completions): ...\n"
    )
    return {
        "type": "ppo",
        "models": {"actor": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "prompts.jsonl")},
        "output_dir": str(tmp_path / "runs"),
        "sampling": {"max_completion_length": 8},
        "rewards": [{"function": f"{tmp_path / 'rewards.py'}:good"}],
        "batch_size": 8,
        "num_mini_batches": 2,
        "total_iterations": 2,
        "cluster": {"devices_per_host": 2},
    }


@pytest.fixture
def call(document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run a command on the document; gives (status, standard output, standard error)."""

    def run(*command: str) -> tuple[int, str, str]:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
        status = run_command([part.replace("FILE", str(tmp_path / "run.yaml")) for part in command])
        out, err = capsys.readouterr()
        return status, out, err

    run.files = lambda: {path for path in tmp_path.rglob("*") if path.name != "run.yaml"}
    return run


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


def test_a_sound_configuration_is_validated_and_its_plan_printed(call, tmp_path):
    status, out, err = call("config", "validate", "FILE")
    assert status == 0, err
    assert all(name in out for name in CALLS)
    assert "sound. 2 rows, 2 iterations." in out
    assert not (tmp_path / "runs").exists()


def test_an_override_is_part_of_the_configuration(call):
    status, out, _ = call("config", "show", "FILE", "kl_coef=0.5", "optimizer.learning_rate=1e-3")
    shown = yaml.safe_load(out)
    assert status == 0
    assert shown["kl_coef"] == 0.5
    assert shown["optimizer"]["learning_rate"] == 1e-3
    assert shown["optimizer"]["adam_betas"] == [0.9, 0.95]


@pytest.mark.parametrize("kind", ["ppo", "grpo", "sft", "reward-model", "rollout"])
def test_every_type_has_a_schema_and_a_graph(call, kind):
    status, out, _ = call("config", "schema", kind)
    assert status == 0
    assert json.loads(out)["properties"]["data"]
    status, out, _ = call("graph", kind, "--as", "mermaid")
    assert status == 0
    assert out.startswith("flowchart TD")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"kl_coeff": 0.1}, ("kl_coeff: unknown key, did you mean 'kl_coef'?",)),
        ({"batch_size": "many"}, ("batch_size: ", "integer", "'many'")),
        ({"gamma": 1.5}, ("gamma: ", "less than or equal to 1", "1.5")),
        (
            {"plan": {"actor_train": {**PLACE, "dp": 2}}},
            ("plan.actor_train", "dp=2 tp=1 pp=1", "2 devices", "1"),
        ),
        (
            {"plan": {"actor_train": {"devices": [1, 2], "dp": 2}}},
            ("plan.actor_train.devices", "[2]", "0 to 1"),
        ),
        (
            {"batch_size": 2, "plan": {name: {"devices": [0, 1], "dp": 2} for name in CALLS}},
            ("2 ", "2 mini-batches"),
        ),
        ({"plan": {"actor_train": PLACE}}, ("actor_generate",)),
        ({"type": "dpo"}, ("type: must be one of ppo", "'dpo'")),
        ({"num_mini_batches": 3}, ("num_mini_batches: 3 does not divide batch_size=8",)),
        ({"name": "../x"}, ("name: ", "'../x'")),
    ],
)
def test_a_faulty_configuration_is_refused(call, document, change, parts):
    document |= change
    refused(call, *parts)


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ({"devices": [2]}, ("actor_train", "[2]", "devices 0 to 1")),
        ({"devices": [0, 1], "tp": 4}, ("actor_train", "tp=4", "4 devices", "2")),
        ({"hosts": [1], "dp": 2}, ("actor_train", "[2, 3]", "devices 0 to 1")),
        ({"hosts": [0], "dp": 3}, ("actor_train", "dp=3", "3 devices", "2")),
    ],
)
def test_a_faulty_plan_file_is_refused(call, document, tmp_path, place, parts):
    plan = {**dict.fromkeys(CALLS, PLACE), "actor_train": place}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    refused(call, *parts, command=("run", "ppo", "--config", "FILE", f"plan={tmp_path / 'plan.yaml'}"))


@pytest.mark.parametrize("command", [("run", "ppo", "--config", "FILE"), ("config", "validate", "FILE")])
def test_a_device_that_is_not_known_is_refused(call, document, command):
    document["planning"] = {"device": "zx"}
    refused(call, "planning.device: There is no device preset 'zx'; known are", command=command)


def test_a_missing_configuration_is_refused(call):
    refused(call, "nowhere.yaml: no such file", command=("run", "ppo", "--config", "nowhere.yaml"))


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model_type": "bert"}, ("model", "bert")),
        ({"model_type": "gpt2"}, ("gpt2", "c_attn", "cannot be split")),
        ({"auto_map": {"AutoModel": "mine.Model"}}, ("auto_map",)),
        ({"model_type": "new"}, ("'new'", "tensor-parallel plan", "llama")),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("rope_type 'dynamic'", "yarn")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantised weights", "Save it unquantised")),
        ({"vocab_size": 100}, ("257 tokens", "100")),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(call, document, tmp_path, config, parts):
    document["models"] = {"actor": str(model_folder(tmp_path / "other", **config))}
    refused(call, *parts)


def test_a_model_folder_that_is_not_there_is_refused(call, document, tmp_path):
    document["models"] = {"actor": str(tmp_path / "nowhere")}
    refused(call, "role 'actor'", str(tmp_path / "nowhere"), "is not there")
    (tmp_path / "nowhere").mkdir()
    refused(call, str(tmp_path / "nowhere"), "config.json")


def test_a_reward_model_without_its_head_is_refused(call, document, tmp_path):
    document["models"]["reward"] = str(model_folder(tmp_path / "reward"))
    assert call("config", "validate", "FILE")[0] == 0
    without(tmp_path / "reward", "score.weight")
    refused(call, "/reward' has no score.weight", "trained reward model")
    del document["models"]["reward"]
    without(tmp_path / "model", "score.weight")
    status, _, err = call("config", "validate", "FILE")
    assert status == 0, f"a critic may begin as a language model: {err}"


def test_weights_that_are_not_the_models_are_refused(call, document, tmp_path):
    weights = tmp_path / "model" / "model.safetensors"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    refused(call, "mlp.gate_proj.weight has shape [24, 16]; config.json says [32, 16]")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    os.truncate(weights, weights.stat().st_size - 4)
    refused(call, "model.safetensors is cut off")
    without_norm = model_folder(tmp_path / "other")
    without(without_norm, "model.norm.weight")
    document["models"]["actor"] = str(without_norm)
    refused(call, "/other' lacks model.norm.weight")


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ("", ("prompts.jsonl: has no rows",)),
        ('{"prompt": "a"}\nnonsense\n', ("prompts.jsonl:2: not valid JSON",)),
        ('{"prompt": "a"}\n\n{"question": "a"}\n', ("prompts.jsonl:3: has no column 'prompt'", "question")),
        (
            '{"prompt": "%s"}\n' % ("a" * 41),
            ("prompts.jsonl:1: has 41 tokens and an answer up to 8", "holds 48"),
        ),
    ],
)
def test_faulty_data_is_refused_with_file_and_line(call, tmp_path, rows, parts):
    (tmp_path / "prompts.jsonl").write_text(rows)
    refused(call, *parts)


def test_the_shortest_context_of_all_models_counts(call, document, tmp_path):
    document["models"]["reward"] = str(model_folder(tmp_path / "reward", max_position_embeddings=24))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "%s"}\n' % ("a" * 17))
    refused(call, "prompts.jsonl:2: has 17 tokens and an answer up to 8", "/reward) holds 24")


def test_a_prompt_that_just_fits_is_accepted(call, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "%s"}\n' % ("a" * 40))
    assert call("config", "validate", "FILE")[0] == 0


def test_a_missing_data_file_is_refused(call, tmp_path):
    (tmp_path / "prompts.jsonl").unlink()
    refused(call, "prompts.jsonl: no such file")


def test_what_cannot_be_measured_is_refused(call, document, tmp_path):
    document["data"]["train"] = str(tmp_path / "nowhere.jsonl")
    refused(call, "nowhere.jsonl", command=("profile", "--config", "FILE"))


def test_a_profile_needs_no_file_of_a_model_but_its_configuration(call, document, tmp_path, monkeypatch):
    from flows import session

    measured = []
    monkeypatch.setattr(session, "profile_here", lambda config, out: measured.append(config))
    document["planning"] = {"prompt_tokens": 4}
    for file in (tmp_path / "model").iterdir():
        if file.name != "config.json":
            file.unlink()
    assert call("profile", "--config", "FILE")[0] == 0
    document["models"]["actor"] = {"config": LLAMA}
    refused(call, "role 'actor' are given inline", command=("profile", "--config", "FILE"))
    assert len(measured) == 1


def test_a_profile_that_is_damaged_is_refused(call, document, tmp_path):
    """The cache is read with the plan; the sentence names the file."""
    from flows.planning import hardware_of, problem_of
    from planner.profile_cache import cache_file

    config = make_config({**document, "output_dir": str(tmp_path / "runs"), "plan": "heuristic"})
    hardware = hardware_of(config)
    model = problem_of(config, hardware).model
    shape = model.models["actor"].shape
    path = cache_file(
        tmp_path / "runs/profiles", hardware.classes.profiles[0].name, hardware.cluster, shape, 4
    )
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    document |= {"output_dir": str(tmp_path / "runs")}
    refused(call, path.name, "prefect-rlhf profile", command=("plan", "--config", "FILE"))


def test_a_run_name_in_use_is_refused_with_the_way_to_go_on(call, document, tmp_path):
    document["name"] = "mine"
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    refused(call, "name='mine' is in use", f"--resume {tmp_path / 'runs' / 'mine'}")


def test_a_folder_that_is_no_run_cannot_be_resumed(call, tmp_path):
    refused(call, "is no run folder", command=("run", "ppo", "--resume", str(tmp_path)))


def test_a_resumed_run_takes_no_other_settings_than_its_cluster(call, document, tmp_path, monkeypatch):
    began = make_config({**document, "name": "mine"})
    folder = new_run_folder(began)
    resume = ("run", "ppo", "--resume", str(folder))
    refused(call, "total_iterations=9 would change it", command=(*resume, "total_iterations=9"))
    ran = []
    monkeypatch.setattr("flows.session.run_here", lambda *arguments: ran.append(arguments))
    status, _, err = call(*resume, "cluster.address=tcp://127.0.0.1:8786")
    assert status == 0, err
    moved = began.cluster.model_copy(update={"address": "tcp://127.0.0.1:8786"})
    assert ran == [("ppo", began.model_copy(update={"cluster": moved}), folder)]


def test_ctrl_c_before_there_is_a_run_folder_names_none_and_leaves_none(call, tmp_path, monkeypatch, capsys):
    """While Prefect is imported, for which there are seconds."""

    class Importing:
        @property
        def run_here(self):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "flows.session", Importing())
    with pytest.raises(SystemExit) as ended:
        call("run", "ppo", "--config", "FILE")
    assert ended.value.code == 130
    assert "go on" not in "".join(capsys.readouterr())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("resume", ["auto", "FOLDER"])
def test_resume_in_the_configuration_goes_on_with_that_run(call, document, monkeypatch, resume):
    began = make_config({**document, "name": "mine"})
    folder = new_run_folder(began)
    document |= {"name": "mine", "resume": resume.replace("FOLDER", str(folder)), "total_iterations": 9}
    ran = []
    monkeypatch.setattr("flows.session.run_here", lambda *arguments: ran.append(arguments))
    status, _, err = call("run", "ppo", "--config", "FILE")
    assert status == 0, err
    assert ran == [("ppo", began, folder)]
    assert "2 iterations." in call("config", "validate", "FILE")[1]


@pytest.mark.parametrize("command", [("run", "ppo", "--config", "FILE"), ("config", "validate", "FILE")])
def test_a_folder_to_resume_that_is_no_run_is_refused(call, document, command):
    document["resume"] = "/nowhere"
    refused(call, "/nowhere is no run folder", command=command)


@pytest.mark.parametrize(
    "command",
    [
        ("run", "ppo", "--config", "FILE"),
        ("config", "validate", "FILE"),
        ("demo", "--folder", "HERE/prompts.jsonl/in"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(call, document, tmp_path, command):
    pytest.importorskip("reasoning_gym")
    document["output_dir"] = str(tmp_path / "prompts.jsonl" / "in")
    command = tuple(part.replace("HERE", str(tmp_path)) for part in command)
    refused(
        call, "prompts.jsonl/in cannot be written to: Not a directory. Name another folder.", command=command
    )


def test_config_and_resume_exclude_each_other(call):
    refused(call, "--config FILE", "--resume FOLDER", command=("run", "ppo"))


def test_the_algorithm_must_be_the_configurations(call):
    refused(call, "'ppo', not 'sft'", command=("run", "sft", "--config", "FILE"))


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("HERE/nowhere.py:good", ("nowhere.py cannot be read (No such file or directory)",)),
        ("HERE/rewards.py:bad", ("has no function 'bad' (functions there: good)",)),
        ("no_such_module_here:f", ("there is no module 'no_such_module_here'",)),
        ("json.nothing.here:f", ("there is no module 'json.nothing.here'",)),
        ("json.decoder:nothing", ("has no function 'nothing'", "py_scanstring")),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused(call, document, tmp_path, function, parts):
    document["rewards"] = [{"function": function.replace("HERE", str(tmp_path))}]
    refused(call, *parts)


def test_a_reward_may_be_bound_in_any_way(tmp_path):
    file = tmp_path / "r.py"
    file.write_text(
        "import x as imported\nif True:\n    def inside(): ...\n"
        "try:\n    from y import tried\nexcept ImportError:\n    tried = None\nassigned = lambda: 0\n"
        "def outer():\n    hidden = 1\n"
    )
    for name in ("imported", "inside", "tried", "assigned", "outer"):
        check_rewards([RewardFunction(function=f"{file}:{name}")])
    with pytest.raises(ConfigError, match="no function 'hidden'"):
        check_rewards([RewardFunction(function=f"{file}:hidden")])
    file.write_text("def broken(:\n")
    with pytest.raises(ConfigError, match="no Python source"):
        check_rewards([RewardFunction(function=f"{file}:broken")])


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["run", "ppo", "--config"], ["graph", "dpo"], ["demo", "--seed", "x"]]
)
def test_a_malformed_command_line_has_status_2(arguments, capsys):
    assert run_command(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_demo_without_its_extra_is_refused(call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were not installed
    folder = str(tmp_path / "demo")
    refused(call, "pip install 'prefect-rlhf[demo]'", command=("demo", "--folder", folder))
    ran = []
    monkeypatch.setattr("flows.session.demo_here", lambda *arguments: ran.append(arguments))
    write_model_folder(
        tmp_path / "demo" / DATA / "base"
    )  # its data have been made: nothing else needs the extra
    assert call("demo", "--folder", folder)[0] == 0
    assert ran == [(tmp_path / "demo", 0)]


def test_an_error_of_ours_is_not_taken_for_the_users(monkeypatch, call):
    def broken(config):
        raise ValueError("a bug")

    monkeypatch.setattr("flows.commands.configs.load_config", lambda *arguments: broken(arguments))
    with pytest.raises(ValueError, match="a bug"):
        call("config", "show", "FILE")


def test_a_faulty_run_is_refused_as_a_process_before_prefect_or_torch_are_loaded(document, tmp_path):
    document["kl_coef"] = -1
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    code = (
        "import sys; from flows.cli import run_command; status = run_command(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers', 'prefect', 'distributed'} & sys.modules.keys())); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "run", "ppo", "--config", str(tmp_path / "run.yaml")]
    for change, sentence in (("kl_coef=-1", "kl_coef"), ("kl_coef=0", "")):
        done = subprocess.run(
            [*command, change, "rewards.0.function=no_module:f"], capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout == "[]\n"
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_console_entry_point_gives_the_status_to_the_shell(tmp_path):
    command = [sys.executable, "-m", "flows.cli"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0
    assert all(name in helped.stdout for name in ("config", "demo", "export", "graph", "run", "ui"))
    failed = subprocess.run([*command, "config", "show", "nowhere.yaml"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr == "error: nowhere.yaml: no such file.\n"


def test_a_package_that_hides_one_of_ours_is_refused(tmp_path: Path):
    hiding = tmp_path / "blocks"
    hiding.mkdir()
    (hiding / "__init__.py").touch()
    ours = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", "from flows.cli import main; main()"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ours}", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: blocks is to be imported from {hiding}, which hides")
    assert "Traceback" not in ended.stderr
