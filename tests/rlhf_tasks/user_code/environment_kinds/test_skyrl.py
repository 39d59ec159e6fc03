"""Environments of skyrl-gym, with rows as SkyRL's."""

import pytest

from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROW = {
    "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
    "data_source": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "5"},
    "extra_info": {"max_turns": 3},
}


@pytest.fixture(autouse=True)
def package(installed):
    return installed("skyrl")


def test_turns_observations_and_rewards_are_the_environments(table):
    game = table("skyrl:gsm8k_multi_turn")
    first, second = game.play(ROW, "#### 4", "#### 5")
    assert first == (first[0], pytest.approx(0.2 / 3), False)
    assert "tentative numeric answer" in first[0]
    assert second == ("", 1.0, True)
    assert game.play(ROW, "#### 4", "#### 4", "#### 4")[-1][2], "after max_turns of the row"
    assert table("skyrl:gsm8k").play({**ROW, "prompt": "What is 2 + 3?"}, "#### 5") == [("", 1.0, True)]


def test_an_environment_of_the_users_gets_kwargs_and_the_rows_columns(table, tmp_path):
    (tmp_path / "rooms.py").write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput\n\n\n"
        "class Room(BaseTextEnv):\n"
        "    def __init__(self, env_config, extras):\n"
        "        super().__init__()\n"
        "        self.key, self.turned = env_config.door + extras['extra_info']['key'], env_config.get('turned')\n\n"
        "    def init(self, prompt):\n"
        "        return (prompt[:-1] if self.turned else prompt), {}\n\n"
        "    def step(self, action):\n"
        "        return BaseTextEnvStepOutput(observations=[], reward=float(action == self.key), done=True)\n"
    )
    name, row = f"skyrl:{tmp_path}/rooms.py:Room", {"prompt": "?", "extra_info": {"key": "b"}}
    assert table(name, door="a").play(row, "ab") == [("", 1.0, True)]
    with pytest.raises(RewardError, match=r"its init changes the prompt to ''"):
        table(name, door="a", turned=True).play(row, "ab")


def test_a_name_that_is_not_there_is_one_sentence(table):
    with pytest.raises(
        RewardError, match=r"skyrl:nothing: reset raised Error: No registered env with id: nothing"
    ):
        table("skyrl:nothing").play(ROW, "5")
