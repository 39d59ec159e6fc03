"""Algorithms without a critic through the command that a user types; GRPO also loses a rank and is resumed."""

import json

import pytest
import yaml

from tests.committed import assert_same_run, generations_of
from tests.flows.marked_command import outcome
from tests.tiny_runs import write_model, write_prompts

ITERATIONS = 3
PLACED = {
    "actor_generate": "0-1 d2",
    "reward_inference": "1",
    "ref_inference": "0-1 t2",
    "actor_train": "0-1 d2 m2 tokens",
}
DOCUMENT = {
    "type": "dapo",
    "models": {"actor": "model"},
    "data": {"train": "prompts.jsonl"},
    "sampling": {"max_completion_length": 8},
    "rewards": [{"function": "rewards.py:length"}],
    "on_reward_error": "skip",
    "beta": 0.1,
    "num_generations": 4,
    "batch_size": 16,
    "num_mini_batches": 2,
    "num_iterations": 2,
    "total_iterations": ITERATIONS,
    "cluster": {"devices_per_host": 2},
    "plan": PLACED,
}
REWARD = """
def length(completions, **columns):
    assert all(len(completion) % 3 for completion in completions), "a multiple of three"
    return [len(completion) / 8 for completion in completions]
"""
KILLED = {"PREFECT_RLHF_FAILPOINT": "trained:kill@rank1@iter1@gen0"}


OTHERS = {
    "remax": {
        "num_generations": None,
        "plan": PLACED | {"greedy_generate": "1", "greedy_reward_inference": "0"},
    },
    "rloo": {},
    "reinforce_pp": {"baseline": "group"},
    "expert_iteration": {
        "beta": None,
        "num_iterations": None,
        "best_of_group": True,
        "plan": {call: place for call, place in PLACED.items() if call != "ref_inference"},
    },
}
"""Algorithm -> its changes of `DOCUMENT`; None: without that field."""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A folder with what `DOCUMENT` names, from which commands run."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_run_of_grpo_that_loses_a_rank_and_is_resumed_has_the_same_bits(user):
    (user / "run.yaml").write_text(yaml.safe_dump(DOCUMENT))
    whole, ended = user / "runs" / "whole", user / "runs" / "ended"

    status, said = outcome(user / "whole.log", "run", "dapo", "--config", "run.yaml", "name=whole")
    assert status == 0, said
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))
    assert all(row["policy/steps"] == 4 and row["policy/mismatch"] < 1e-5 for row in rows)
    assert all(0 <= row["frac_reward_zero_std"] <= 1 and row["reward_std"] > 0 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert (whole / "model" / "model.safetensors").exists()

    changes = ("name=ended", "max_restarts=0")
    status, said = outcome(user / "ended.log", "run", "dapo", "--config", "run.yaml", *changes, **KILLED)
    assert status == 1, said
    status, said = outcome(user / "resumed.log", "run", "dapo", "--resume", str(ended))
    assert status == 0, said
    assert generations_of(ended)[ITERATIONS - 1] == (2, 0), "it began anew"
    assert_same_run(ended, whole)
    listed = [skipped_of(folder) for folder in (whole, ended)]
    assert listed[0] == listed[1]
    assert len(listed[0]) == sum(row["skipped_samples"] for row in rows) > 0
    assert all("prompts.jsonl:" in line["row"] for line in listed[0])


def skipped_of(folder):
    """The samples that a run has skipped."""
    files = sorted((folder / "skipped-samples").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", OTHERS)
def test_each_of_the_others_runs_to_its_end_under_a_plan_by_hand(user, kind):
    document = {**DOCUMENT, "type": kind, **OTHERS[kind]}
    document = {field: value for field, value in document.items() if value is not None}
    (user / "run.yaml").write_text(yaml.safe_dump(document))
    status, said = outcome(
        user / "log", "run", kind.replace("_", "-"), "--config", "run.yaml", f"name={kind}"
    )
    assert status == 0, said
    lines = (user / "runs" / kind / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == ITERATIONS
    assert all(row["grad_norm/actor"] > 0 for row in rows)
    assert all(("greedy/reward" in row) == (kind == "remax") for row in rows)
