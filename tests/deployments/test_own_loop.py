"""HybridFlow's loop in our words: it trains under both placements with the same losses, and ends where it decides."""

import subprocess
import sys

import pytest

from prefect_rlhf.deployments.examples import own_loop
from prefect_rlhf.deployments.examples.guessing import games, write_model
from prefect_rlhf.flows.demo import write_jsonl
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from tests.rlhf_tasks.test_layout_invariance import differences, trajectory


def document(folder, placement, **changes):
    if not (folder / "train.jsonl").exists():
        write_model(folder / "model", 0)
        rows = games(0)
        write_jsonl(folder / "train.jsonl", [next(rows) for _ in range(64)])
    return {**own_loop.document_of(folder, placement, 3), **changes}


@pytest.mark.parametrize(("placement", "devices"), [("together", {0}), ("apart", {0, 1})])
def test_each_role_is_in_its_pool(tmp_path, placement, devices):
    plan = prepare(make_config(document(tmp_path, placement))).plan
    assert {device for node in plan.nodes for device in node.devices} == devices
    places = {name: nodes[0].devices for name, nodes in plan.calls.items()}
    assert places["critic_inference"] == places["advantages"] == places["critic_train"]
    assert (places["actor_train"] == places["critic_train"]) == (placement == "together")


@pytest.mark.dist
def test_the_placement_changes_no_loss(ranks, tmp_path):
    seen = []
    for placement, n_ranks in (("together", 1), ("apart", 2)):

        def config(folder, placement=placement, **changes):
            changes["plan"] = "auto"
            return make_config(document(folder, placement, **changes))

        seen.append(trajectory(ranks, tmp_path, n_ranks, {}, config))
    assert len(seen[0]) == 3
    assert all(
        row["critic_train/loss/value"] > 0 and row["advantages/kl"] == row["advantages/kl"] for row in seen[0]
    )
    assert not differences(*seen)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_the_script_trains(tmp_path):
    command = [sys.executable, "-m", own_loop.NAME, str(tmp_path), "--iterations", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()[-1].split(":")[0].removeprefix("reward ").split(" -> ")
    assert float(after) > float(before)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_run_that_decides_to_stop_ends_with_that_iteration_and_is_not_continued(tmp_path):
    from prefect_rlhf import train

    bounded = document(tmp_path, "together", name="bounded", most_kl=1e-4, snapshot_every=2)
    result = train(bounded)
    # The policy has not moved in the first iteration; its KL exceeds nothing in the second.
    assert [row["decided/stop"] for row in result.metrics] == [0.0, 1.0]
    again = train(resume=result.folder)
    assert len(again.metrics) == 2
