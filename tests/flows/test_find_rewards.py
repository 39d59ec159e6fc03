"""Rewards in Python are found before a run starts, without importing them."""

import pytest

from flows.find_rewards import check_rewards
from rlhf_tasks.config import ConfigError
from rlhf_tasks.config_parts import RewardFunction
from tests.flows.checked_files import refused


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("HERE/nowhere.py:good", ("nowhere.py cannot be read (No such file or directory)",)),
        ("HERE/rewards.py:bad", ("has no function 'bad' (functions there: good)",)),
        ("no_such_module_here:f", ("there is no module 'no_such_module_here'",)),
        ("json.nothing.here:f", ("there is no module 'json.nothing.here'",)),
        ("json.decoder:nothing", ("has no function 'nothing'", "py_scanstring")),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused(call, document, tmp_path, function, parts):
    document["rewards"] = [{"function": function.replace("HERE", str(tmp_path))}]
    refused(call, *parts)


def test_a_reward_may_be_bound_in_any_way(tmp_path):
    file = tmp_path / "r.py"
    file.write_text(
        "import x as imported\nif True:\n    def inside(): ...\n"
        "try:\n    from y import tried\nexcept ImportError:\n    tried = None\nassigned = lambda: 0\n"
        "def outer():\n    hidden = 1\n"
    )
    for name in ("imported", "inside", "tried", "assigned", "outer"):
        check_rewards([RewardFunction(function=f"{file}:{name}")])
    with pytest.raises(ConfigError, match="no function 'hidden'"):
        check_rewards([RewardFunction(function=f"{file}:hidden")])
    file.write_text("def broken(:\n")
    with pytest.raises(ConfigError, match="no Python source"):
        check_rewards([RewardFunction(function=f"{file}:broken")])
