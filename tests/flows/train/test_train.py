"""`train` in a script: what it returns and leaves, what it refuses, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from prefect_rlhf import ConfigError, GRPOConfig, train
from tests.flows.train.scripts import CONFIG, environment, files_in, run_script

TWICE = """
import json
import os
import psutil
from prefect_rlhf import ConfigError, GRPOConfig, TrainResult, train

def letters(completions, answer, **_):
    return [len(completion) + float(a) for completion, a in zip(completions, answer, strict=True)]

if __name__ == "__main__":
    settings = CONFIG, name="mine")
    before = dict(os.environ)
    result = train(GRPOConfig(**settings, rewards=[letters], total_iterations=1))
    changed = sorted({name for name, _ in before.items() ^ os.environ.items()})
    assert isinstance(result, TrainResult)
    first = letters

    def letters(completions, answer, **_):
        return [-len(completion) for completion in completions]

    said = ""
    try:
        train(GRPOConfig(**settings, rewards=[letters], total_iterations=2), resume=result.folder)
    except ConfigError as refused:
        said = str(refused)
    further = train(
        {"type": "grpo", **settings, "rewards": [letters], "total_iterations": 2},
        resume=result.folder, accept_changes=True,
    )
    print(json.dumps({
        "model": str(result.model), "folder": str(result.folder),
        "rewards": [row["reward"] for row in further.metrics],
        "iterations": [result.summary["iterations"], further.summary["iterations"]], "refused": said,
        "changed": changed,
        "left": len(psutil.Process().children(recursive=True)),
    }))
"""


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_script_trains_and_continues_with_a_function_that_was_defined_anew(prefect, tmp_path):
    ended = run_script(files_in(tmp_path), TWICE, environment(prefect))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *lines, last = ended.stdout.splitlines()
    result = json.loads(last)
    folder = tmp_path / "runs" / "mine"
    assert (result["folder"], result["model"]) == (str(folder), str(folder / "model"))
    assert (folder / "model" / "model.safetensors").exists()
    first, second = result["rewards"]  # a row for each iteration
    assert first > 0 > second
    assert result["iterations"] == [1, 2]
    assert "rewards.0.function, the function 'letters', was defined anew with other code" in result["refused"]
    assert "total_iterations 1 (now 2)" in result["refused"]
    assert result["changed"] == [], "environment variables"
    assert result["left"] == 0, "a process is left"
    assert [line for line in lines if re.match(r"mine: iteration 2 of 2, .* reward -", line)]
    codes = list((folder / "functions").iterdir())
    assert len(codes) == 2
    assert {code.stat().st_mode & 0o777 for code in codes} == {0o600}


UNGUARDED = "from prefect_rlhf import train\ntrain(CONFIG))\n"


def test_a_script_without_a_main_guard_is_refused_before_anything_starts(tmp_path):
    ended = run_script(tmp_path, UNGUARDED, {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    assert ended.returncode == 1
    assert "ConfigError: " in ended.stderr
    assert "script.py:2: a flow is called outside a main guard" in ended.stderr
    assert "Put the call below `if __name__ == '__main__':`." in ended.stderr
    assert not ended.stdout


@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_ctrl_c_ends_a_script_as_the_command_and_says_how_to_continue(prefect, tmp_path):
    files_in(tmp_path)
    text = (
        "from prefect_rlhf import train\ndef long(completions, **_): return [1.0 for _ in completions]\n"
        "if __name__ == '__main__':\n"
        f"    train({CONFIG}, type='grpo', name='mine', rewards=[long], total_iterations=100000))\n"
    )
    (tmp_path / "script.py").write_text(text)
    with subprocess.Popen(
        [sys.executable, "-u", "script.py"], cwd=tmp_path, env=environment(prefect), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as script:  # fmt: skip
        assert script.stdout is not None
        assert any("iteration 2 of" in line for line in script.stdout)
        started = psutil.Process(script.pid).children(recursive=True)
        os.killpg(script.pid, signal.SIGINT)
        said, errors = script.communicate(timeout=60)
    assert f"stopped. To continue: train(resume='{tmp_path}/runs/mine')" in said, said + errors
    assert "KeyboardInterrupt" in errors
    assert script.returncode == -signal.SIGINT
    assert not psutil.wait_procs(started, timeout=30)[1]


def refused(*arguments, **settings) -> str:
    with pytest.raises(ConfigError) as error:
        train(*arguments, **settings)
    return str(error.value)


def test_what_train_cannot_use_is_refused_with_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused() == "Give train a configuration, or resume=FOLDER of a run to continue."
    assert refused(3) == (
        "train takes a configuration such as GRPOConfig(...), a dict or a YAML file, found 3."
    )
    assert "nowhere.yaml" in refused("nowhere.yaml")
    assert "nowhere is not a run folder" in refused(resume="nowhere")
    assert "type: must be one of" in refused({"type": "grop"})


def test_rows_that_no_file_can_hold_are_named_and_no_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": object()}]
    config = GRPOConfig(
        models={"actor": "actor"}, data={"train": rows}, sampling={"max_completion_length": 8},
        total_iterations=1, rewards=[{"function": "builtin:exact_match"}],
    )  # fmt: skip
    assert "row 1, column 'answer': <object object" in refused(config)
    assert "Leave the column out, or convert it." in refused(config)
    assert "accept_changes is only for a run that is resumed" in refused(config, accept_changes=True)
    assert not list((tmp_path / "runs").iterdir())
