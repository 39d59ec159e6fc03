"""keep_best: which commits stay, and whose model a run exports."""

import json
import math
from dataclasses import replace

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.checkpoint.commits import (
    RunSnapshots,
    best_steps,
    commit_to_export,
    score_of,
    scores_of,
    step_folder,
)
from prefect_rlhf.rlhf_tasks.checkpoint.journals import BEFORE, METRICS
from tests.rlhf_tasks.checkpoint.test_commits import Spec, names, order, results


def config(keep: int):
    return make_config(
        {
            "type": "ppo",
            "models": {"actor": "m"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "rewards": [{"function": "m:f"}],
            "total_iterations": 8,
            "evaluation": {"data": "e", "keep_best": keep},
        }
    )


def committed(folder, scores, keep, begin=1, snapshots=None, attempt=1):
    """Commits of steps with these scores (None: not evaluated), each after the other."""
    spec = Spec(str(folder), attempt, config=config(keep).model_dump(mode="json"))
    snapshots = snapshots or RunSnapshots(spec)
    for step, score in enumerate(scores, start=begin):
        found = results(step - 1)
        told = {} if score is None else {"eval/reward": score}
        found["evaluate_actor"] = {
            rank: replace(result, key=result.key._replace(node="evaluate_actor"), metrics=told)
            for rank, result in found["actor_train"].items()
        }
        snapshots.commit(order(spec, step), {step - 1: found})
        snapshots.prune()
    return spec


def steps(folder):
    return sorted(int(name.removeprefix("step-")) for name in names(folder))


def exported(folder, keep):
    commit, _ = commit_to_export(folder, config(keep))
    return None if commit is None else commit.step


def test_the_best_stay_besides_the_last_and_the_best_is_exported(tmp_path):
    committed(tmp_path, [0.2, 0.9, 0.4, 0.7, None, 0.1], keep=2)
    assert steps(tmp_path) == [2, 4, 5, 6]
    assert exported(tmp_path, 2) == 2
    assert exported(tmp_path, 0) == 6, "without keep_best the last"


def test_a_later_better_one_displaces_the_earlier(tmp_path):
    committed(tmp_path, [0.9, 0.2, 0.3, 1.0, 0.1, 0.1], keep=1)
    assert steps(tmp_path) == [4, 5, 6]
    assert exported(tmp_path, 1) == 4


def test_a_resumed_run_knows_what_was_best_before(tmp_path):
    spec = committed(tmp_path, [0.3, 0.9, 0.2], keep=1)
    again = RunSnapshots(replace(spec, attempt=2))
    assert again.latest() == (3, 24)
    committed(tmp_path, [0.5, 0.4, 0.1], keep=1, begin=4, snapshots=again, attempt=2)
    assert steps(tmp_path) == [2, 5, 6]


def test_a_best_that_was_removed_before_keep_best_was_set_takes_no_place(tmp_path):
    spec = committed(tmp_path, [0.9, 0.1, 0.2], keep=0)
    assert steps(tmp_path) == [2, 3]
    again = RunSnapshots(replace(spec, attempt=2, config=config(1).model_dump(mode="json")))
    again.latest()
    committed(tmp_path, [0.5, 0.3, 0.3, 0.3], keep=1, begin=4, snapshots=again, attempt=2)
    assert steps(tmp_path) == [4, 6, 7]
    assert exported(tmp_path, 1) == 4


def test_a_line_of_metrics_that_a_kill_has_cut_hinders_no_export(tmp_path):
    committed(tmp_path, [0.9, 0.1, 0.2], keep=1)
    with (tmp_path / METRICS).open("a", encoding="utf-8") as journal:
        journal.write('{"iteration": 3, "eval/rew')
    assert exported(tmp_path, 1) == 1


def test_a_damaged_best_is_passed_over(tmp_path):
    committed(tmp_path, [0.2, 0.9, 0.4, 0.7, 0.1, 0.1], keep=2)
    (step_folder(tmp_path, 2) / "actor.rank-00000.gen-0.safetensors").write_bytes(b"")
    commit, refused = commit_to_export(tmp_path, config(2))
    assert commit is not None
    assert commit.step == 4
    assert len(refused) == 1


def test_the_start_may_be_the_best_and_its_metrics_are_a_line_of_their_own(tmp_path):
    """It is known when step 1 is committed, before anything is removed."""
    spec = Spec(str(tmp_path), config=config(1).model_dump(mode="json"))
    snapshots, first = RunSnapshots(spec), results(0)
    snapshots.commit(order(spec, 0), {})
    key = first["actor_train"][0].key._replace(node="evaluate_actor_at_start")
    first["evaluate_actor_at_start"] = {
        rank: replace(
            result, key=key, metrics={}, details={BEFORE: {"eval/reward": 0.9, "eval/loss": math.inf}}
        )
        for rank, result in first["actor_train"].items()
    }
    snapshots.commit(order(spec, 1), {0: first})
    committed(tmp_path, [0.2, 0.3, 0.1], keep=1, begin=2, snapshots=snapshots)
    assert steps(tmp_path) == [0, 3, 4]
    assert exported(tmp_path, 1) == 0
    rows = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert rows[0] == {"iteration": -1, "eval/reward": 0.9, "eval/loss": None}
    assert [row["iteration"] for row in rows] == [-1, 0, 1, 2, 3]
    assert scores_of(tmp_path)[0] == (True, 0.9)


def test_without_any_evaluation_the_last_is_exported(tmp_path):
    committed(tmp_path, [None, None], keep=1)
    assert exported(tmp_path, 1) == 2


def test_of_equal_ones_the_earlier_is_better_and_what_is_not_finite_counts_nothing(tmp_path):
    assert best_steps({3: (True, 0.5), 1: (True, 0.5), 2: (True, 0.4)}, 2) == [1, 3]
    committed(tmp_path, [math.nan, 0.1], keep=1)
    assert scores_of(tmp_path) == {2: (True, 0.1)}


@pytest.mark.parametrize("count", [0, 9])
def test_as_many_as_there_are(count):
    assert best_steps({1: (True, 0.1), 2: (True, 0.2)}, count) == [2, 1][:count]


def test_without_rewards_the_lowest_loss_is_the_best():
    assert score_of({"eval/loss": 0.5}) == (False, -0.5)
    assert score_of({"eval/loss": 0.5, "eval/reward": 0.2}) == (True, 0.2)
    assert score_of({"eval/loss": None}) is None
    assert score_of({"loss/sft": 0.5}) is None


def test_a_loss_is_not_compared_with_rewards():
    """In an iteration whose answers no reward judged, only the loss is there."""
    told = {1: {"eval/reward": -9.0, "eval/loss": 3.0}, 2: {"eval/loss": 2.0}}
    scores = {step: score for step, metrics in told.items() if (score := score_of(metrics)) is not None}
    assert best_steps(scores, 2) == [1, 2]
