"""Runs whose responses a model of the run judges, through the commands that a user types."""

import json
from pathlib import Path
from string import ascii_lowercase

import pytest
import yaml

from prefect_rlhf.deployments.examples.guessing import HINTS, write_model
from tests.committed import assert_same_run
from tests.flows.marked_command import outcome
from tests.tiny_judge import judged

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]

ASKED, RIGHT = "bcdfgh", "aeiou"
"""Letters of the prompts; to each any vowel is a right answer."""


def write_rows(folder: Path) -> None:
    """Rows from which a judge learns to say 1 of a vowel and 0 of all else, and the prompts of the policy."""
    wrong = ["", *HINTS, *sorted({*ascii_lowercase} - {*RIGHT}), *"0123456789 :"]
    answers = [*wrong, *RIGHT * 4]
    lessons = [{"prompt": f"{a}:{b} ", "completion": str(int(b in [*RIGHT]))} for a in ASKED for b in answers]
    prompts = [{"prompt": f"{letter}:"} for letter in ASKED] * 16
    for name, rows in (("lessons", lessons), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


PIPELINE = {
    "type": "pipeline",
    "name": "judged",
    "cluster": {"devices_per_host": 2},
    "stages": [
        {
            "name": "judge",
            "type": "sft",
            "models": {"actor": "model"},
            "data": {"train": "lessons.jsonl"},
            "batch_size": 64,
            "total_iterations": 60,
            "optimizer": {"learning_rate": 3e-3, "lr_scheduler_type": "linear"},
            "snapshot_every": 1000,
        },
        {
            "name": "policy",
            "type": "grpo",
            "models": {"actor": "model", "judge": "stage:judge"},
            "data": {"train": "prompts.jsonl"},
            "sampling": {"max_completion_length": 1},
            "rewards": [
                {
                    "function": "builtin:judge",
                    "kwargs": {
                        "template": "{prompt}{completion} ",
                        "pattern": "[01]",
                        "most": 1,
                        "max_tokens": 2,
                        "unreadable": 0,
                    },
                },
                {"function": "builtin:format", "weight": 0.0, "kwargs": {"pattern": f"[{RIGHT}]"}},
            ],
            "num_generations": 16,
            "batch_size": 64,
            "total_iterations": 30,
            "optimizer": {"learning_rate": 2e-3},
            "snapshot_every": 1000,
            "plan": {
                "actor_generate": "0",
                "judge_generate": "1",
                "reward_inference": "0",
                "actor_train": "0-1 d2",
            },
        },
    ],
}


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_policy_learns_what_a_judge_that_was_trained_before_calls_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", 0)
    write_rows(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(PIPELINE))
    status, said = outcome(tmp_path / "log", "run", "pipeline", "--config", "run.yaml")
    assert status == 0, said
    rows = rows_of(tmp_path / "runs" / "judged" / "policy")
    first, last = rows[0], rows[-1]
    assert first["rewards/judge/mean"] < 0.4
    assert first["rewards/format/mean"] < 0.3
    assert last["rewards/judge/mean"] > 0.9
    assert last["rewards/format/mean"] > 0.9
    assert all(row["judge/unreadable"] < 0.1 for row in rows)


def test_a_judged_run_that_loses_a_rank_has_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {
        "actor_generate": "0-1 d2",
        "judge_generate": "0-1 t2",
        "reward_inference": "1",
        "ref_inference": "0",
        "actor_train": "0-1 d2",
    }
    config = judged(
        tmp_path, asks={"temperature": 1.0}, plan=places, cluster={"devices_per_host": 2}, snapshot_every=1
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    for name, killed in (
        ("whole", {}),
        ("killed", {"PREFECT_RLHF_FAILPOINT": "trained:kill@rank1@iter1@gen0"}),
    ):
        log = tmp_path / f"{name}.log"
        status, said = outcome(log, "run", "grpo", "--config", "run.yaml", f"name={name}", **killed)
        assert status == 0, said
    whole, killed = (tmp_path / "runs" / name for name in ("whole", "killed"))
    assert_same_run(killed, whole)
    assert rows_of(whole)[-1]["reward_std"] > 0
