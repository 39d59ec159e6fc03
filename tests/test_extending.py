"""The code of the pages that say how to add something does what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.parallel.layout.families import FAMILIES
from prefect_rlhf.rlhf_tasks.user_code.environments import EnvironmentProcess
from prefect_rlhf.rlhf_tasks.user_code.episodes import Answer, Episode
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers, TrainerState, load_reward
from tests.committed import assert_same_run, generations_of
from tests.flows.marked_command import MarkedCommand
from tests.tiny_runs import write_model, write_prompts

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / "how-to" / f"{name}.md").read_text(encoding="utf-8")


PYTHON = re.compile(r"```python[^\n]*\n(.*?)```", re.DOTALL)
[REWARD] = PYTHON.findall(page("rewards"))
[ENVIRONMENT] = PYTHON.findall(page("environments"))
[FAMILY] = PYTHON.findall(page("new-model-family"))
FILES = dict(re.findall(r"```\w+\n# ([\w/.]+)\n(.*?)```", page("new-algorithm"), re.DOTALL))
"""The package of the algorithm, and the file of its run."""
ITERATIONS = 3


def test_the_reward_is_found_and_judges(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    reward = load_reward("brief", f"{tmp_path / 'rewards.py'}:brief", {"most": 8})
    answers = Answers(["p"] * 3, ["yes", "no", "yes, indeed"], [[0]] * 3, {"answer": ["yes"] * 3}, ["p"] * 3)
    arguments = reward.arguments(answers, TrainerState(0, 1), {})
    assert reward.values(reward.function(**arguments), range(3), answers) == [1.0, 0.0, 0.0]


@pytest.mark.cluster
def test_the_environment_is_found_and_answers(tmp_path):
    (tmp_path / "doors.py").write_text(ENVIRONMENT)
    [section] = re.findall(r"```yaml\n(environment:.*?)```", page("environments"), re.DOTALL)
    environment = {**yaml.safe_load(section)["environment"], "factory": f"{tmp_path}/doors.py:Doors"}
    document = {"models": {"actor": "a"}, "data": {"train": "d"}, "sampling": {"max_completion_length": 9}}
    process = EnvironmentProcess(make_config({"type": "rollout", "environment": environment, **document}))
    try:
        first = process.answers([Episode(seed, {"prompt": "p"}, seed, ["0"]) for seed in range(8)])
        away = [0 if answer.done else int(answer.observation.split()[0]) for answer in first]
        assert set(away) == {0, 1, 2, 3}
        left = [Episode(n, {"prompt": "p"}, n, ["0", str(away[n])]) for n in range(8) if away[n]]
        assert process.answers(left) == [Answer("", 1.0, True)] * len(left)
    finally:
        process.close()


def test_the_family_is_the_one_that_the_page_names():
    names: dict = {}
    exec(FAMILY, names)
    assert names["qwen2"] == FAMILIES["qwen2"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of processes that find the page's package installed; nothing of it is in the checkout."""
    source, place = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name, text in FILES.items():
        if name != "regression.yaml":
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_text(text)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*pip, *offline, "--target", str(place), str(source)], check=True, timeout=300)
    return {"PYTHONPATH": f"{place}:{ROOT}"}


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A folder with the page's run and what it names; its reward gives answers of any length a score."""
    folder = tmp_path_factory.mktemp("user")
    write_model(folder / "model")
    write_prompts(folder / "prompts.jsonl")
    (folder / "rewards.py").write_text(
        "def brief(completions, **columns):\n    return [len(completion) / 8 for completion in completions]\n"
    )
    (folder / "regression.yaml").write_text(FILES["regression.yaml"])
    return folder


def command(installed, user, *arguments):
    """`prefect-rlhf ARGUMENTS` in the user's folder, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "prefect_rlhf.flows.cli", *arguments],
        cwd=user,
        env={**os.environ, **installed},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.whole
def test_the_algorithm_is_found_drawn_and_planned(installed, user):
    drawn = command(installed, user, "graph", "weighted-regression")
    assert drawn.returncode == 0, drawn.stderr
    assert [line.split()[0] for line in drawn.stdout.strip().splitlines()[2:]] == [
        "actor_generate",
        "judge_generate",
        "reward_inference",
        "actor_train",
    ]
    schema = command(installed, user, "config", "schema", "weighted-regression")
    assert json.loads(schema.stdout)["properties"]["score_scale"]["default"] == 1.0
    planned = command(installed, user, "config", "validate", "regression.yaml", "cluster.devices_per_host=2")
    assert planned.returncode == 0, planned.stderr
    assert "valid. 64 rows, 3 iterations." in planned.stdout
    assert "save_actor" in planned.stdout
    refused = command(installed, user, "config", "validate", "regression.yaml", "score_scales=1")
    assert refused.returncode == 2
    assert refused.stderr == "error: score_scales: unknown key, did you mean 'score_scale'?\n"


def run(installed, user, name, *arguments, **environment):
    """Carry out `prefect-rlhf run weighted-regression`; gives its exit status and what it has printed."""
    with MarkedCommand(
        user / f"{name}.log",
        "run",
        "weighted-regression",
        *arguments,
        environment={**installed, **environment},
    ) as begun:
        status = begun.process.wait(400)
        begun.assert_gone()
        return status, begun.output


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_the_algorithm_trains_loses_a_rank_and_is_resumed_to_the_same_bits(installed, user, monkeypatch):
    monkeypatch.chdir(user)
    folders = {name: user / "runs" / name for name in ("undisturbed", "rebuilt", "ended")}
    plan = {"actor_generate": "0-1 d2", "reward_inference": "1", "actor_train": "0-1 d2"}
    document = {**yaml.safe_load(FILES["regression.yaml"]), "plan": plan, "cluster": {"devices_per_host": 2}}
    (user / "planned.yaml").write_text(yaml.safe_dump(document))
    killed = {"PREFECT_RLHF_FAILPOINT": "trained:kill@rank1@iter1@gen0"}

    status, said = run(installed, user, "undisturbed", "--config", "planned.yaml", "name=undisturbed")
    assert status == 0, said
    rows = [json.loads(line) for line in (folders["undisturbed"] / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    assert all(row["regression/weight"] > 0 and row["loss/regression"] > 0 for row in rows)
    assert (folders["undisturbed"] / "model" / "model.safetensors").exists()

    status, said = run(installed, user, "rebuilt", "--config", "planned.yaml", "name=rebuilt", **killed)
    assert status == 0, said
    assert generations_of(folders["rebuilt"])[ITERATIONS - 1] == (1, 1), "no rank was lost"
    assert_same_run(folders["rebuilt"], folders["undisturbed"])

    changes = ("name=ended", "max_restarts=0")
    status, said = run(installed, user, "ended", "--config", "planned.yaml", *changes, **killed)
    assert status == 1, said
    assert f"To continue: prefect-rlhf run weighted-regression --resume {folders['ended']}" in said
    status, said = run(installed, user, "resumed", "--resume", str(folders["ended"]))
    assert status == 0, said
    assert generations_of(folders["ended"])[ITERATIONS - 1] == (2, 0), "it began anew"
    assert_same_run(folders["ended"], folders["undisturbed"])
