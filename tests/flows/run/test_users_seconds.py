"""The seconds that rewards may take in a node, for which its deadline allows."""

from typing import Any

from flows.run.planning import users_seconds
from flows.run.prepare import prepare
from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.user_code.process import ENDING_S, MOST_LOST
from tests.tiny_runs import ppo_config


def seconds(config: Any, held_out_rows: int = 0) -> dict[str, float]:
    return users_seconds(config, prepare(config).plan, held_out_rows)


def test_the_call_that_judges_may_take_what_its_rewards_may(tmp_path):
    assert seconds(ppo_config(tmp_path, reward_timeout_s=100)) == {"reward_inference": 100 + ENDING_S}


def test_a_reward_model_alone_has_no_such_seconds(tmp_path):
    assert seconds(ppo_config(tmp_path, rewards=[])) == {}


def test_a_process_that_is_started_anew_has_its_time_again(tmp_path):
    skips = ppo_config(tmp_path, reward_timeout_s=100, on_reward_error="skip")
    assert seconds(skips) == {"reward_inference": (1 + MOST_LOST) * (100 + ENDING_S)}


def test_an_evaluation_may_take_as_long_in_each_of_its_batches(tmp_path):
    ppo_config(tmp_path)
    asked = {"data": str(tmp_path / "prompts.jsonl"), "num_generations": 2}
    config = ppo_config(tmp_path, reward_timeout_s=50, evaluation=asked, batch_size=20)
    once = 50 + ENDING_S
    assert seconds(config, 21) == {"reward_inference": once, "evaluate_actor": 3 * once}


def test_both_of_remaxs_calls_judge(tmp_path):
    ppo = ppo_config(tmp_path).model_dump(include={"data", "output_dir", "sampling", "rewards", "batch_size"})
    document = ppo | {"type": "remax", "models": {"actor": str(tmp_path / "actor")}, "total_iterations": 1}
    assert seconds(make_config(document)).keys() == {"reward_inference", "greedy_reward_inference"}
