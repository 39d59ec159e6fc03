"""What a card or a tracker is told of a configuration."""

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.config.settings import public_document

NAMES = ("key", "access_key", "pwd", "auth", "passwd", "bearer", "scale", "api_key")


@pytest.mark.parametrize("name", NAMES)
def test_no_argument_of_a_users_code_is_told_whatever_its_name(name: str):
    literal = {name: "hunter-2", "deep": {name: ["hunter-2"]}}
    reward = {"function": "m:f", "kwargs": literal}
    config = make_config(
        {
            "type": "ppo",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "rewards": [reward, {"url": "https://judge.org/score?key=hunter-2", "headers": literal}],
            "environment": {"factory": "m:g", "kwargs": literal},
            "evaluation": {"data": "h"},
            "cluster": {"address": "tls://me:hunter-2@host:8786", "n_hosts": 1, "devices_per_host": 1},
            "total_iterations": 8,
        }
    )
    told = public_document(config)
    assert "hunter-2" not in str(told)
    assert told["rewards"][1]["url"] == "https://judge.org/score?***"
    assert told["cluster"]["address"] == "tls://***@host:8786"
    assert told["environment"]["factory"] == "m:g"
    assert told["total_iterations"] == 8
