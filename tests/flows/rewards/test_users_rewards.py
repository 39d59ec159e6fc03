"""Whole runs with a second user's rewards: what goes wrong in them ends the run at once, secrets stay with them."""

import asyncio
import json
from pathlib import Path

import pytest
from prefect.blocks.system import Secret

from prefect_rlhf.flows.ppo import rlhf_ppo
from prefect_rlhf.flows.run.training import RunFailed
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.checkpoint.commits import newest_step

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
CANARY = "canary-" + "5b1f09c7"
LATER = """
def later(completions, ground_truth, trainer_state, **kwargs):
    if trainer_state.global_step < 1:
        return [float(truth in c) for c, truth in zip(completions, ground_truth)]
    return [float(truth in c) for c, truth in zip(completions, [None] * len(completions))]
"""


@pytest.fixture
def run(cluster, second_user, tmp_path):
    """Run PPO on two ranks with these rewards; gives (summary, run folder)."""

    def begin(*rewards, **changes):
        places = {
            "actor_generate": "0-1 d2",
            "reward_inference": "0-1 d2",
            "ref_inference": "0",
            "critic_inference": "1",
            "actor_train": "0",
            "critic_train": "1",
        }
        document = second_user.ppo(
            *rewards,
            name="mine",
            output_dir=str(tmp_path / "runs"),
            plan=places,
            cluster={"address": cluster.scheduler_address, "devices_per_host": 2},
            **changes,
        )
        return asyncio.run(rlhf_ppo(make_config(document)))

    begin.folder = tmp_path / "runs" / "mine"
    return begin


@pytest.mark.whole
def test_a_reward_that_fails_in_the_second_iteration_ends_the_run_at_the_first_commit(run, tmp_path):
    """Both ranks judge; nothing is repeated, and what is told is the user's: sample, row, line, traceback."""
    (tmp_path / "later.py").write_text(LATER)
    with pytest.raises(RunFailed) as failed:
        run({"function": f"{tmp_path / 'later.py'}:later"}, total_iterations=4)
    told = str(failed.value)
    assert "call reward_inference, iteration 2: reward 'later' raised TypeError: " in told
    assert f" at {tmp_path / 'later.py'}:5. It was judging sample " in told
    assert "trl.jsonl:" in told
    assert 'prompt "What is ' in told
    assert "return [float(truth in c) for c, truth in zip(completions, [None]" in told
    assert "rlhf_tasks" not in told
    assert "rebuilds" not in told
    step = newest_step(run.folder)
    assert step in (0, 1)
    assert f"Correct that. {step} iterations are committed; resume to continue from there." in told
    rows = (
        [json.loads(line) for line in (run.folder / "lineage.jsonl").read_text().splitlines()] if step else []
    )
    assert {row["generation"] for row in rows} <= {0}
    assert "It has ended by a fault: rank " in (run.folder / "report.html").read_text()


@pytest.mark.slow
def test_a_reward_that_hangs_beyond_a_nodes_own_deadline_is_the_users_late_reward(run):
    """It is no rank that hangs: nothing is started anew."""
    limits = {"patience": 1 / 6, "max_restarts": 0}
    with pytest.raises(RunFailed) as failed:
        run("broken:hangs", reward_timeout_s=30, **limits)
    assert "reward 'hangs' gave no answer in 30 s at " in str(failed.value)


@pytest.mark.whole
def test_rows_and_rewards_in_verls_form_train(run, second_user):
    summary = run("verl:compute_score", "verl:loop_score", data="verl")
    assert summary["iterations"] == 2
    assert "rewards/loop_score/mean" in summary["metrics"]


def test_a_secret_stands_in_no_file_no_database_and_no_message(run, second_user, tmp_path_factory):
    """Its value comes from a Prefect block; the reward says it aloud, and fails with it."""
    Secret(value=CANARY).save("my-key", overwrite=True)
    reward = second_user.reward("broken:tells_its_key", kwargs={"api_key": {"block": "my-key"}})
    with pytest.raises(RunFailed) as failed:
        run(reward)
    assert "raised RuntimeError: 401 Unauthorized: *** at" in str(failed.value)
    assert CANARY not in str(failed.value)
    server = next(tmp_path_factory.getbasetemp().glob("server*"))
    assert files_with(server, "401 Unauthorized: ***"), "the server's database was not looked at"
    assert files_with(run.folder, "my-key")
    for folder in (run.folder, server):
        assert not files_with(folder, CANARY)


def files_with(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]
