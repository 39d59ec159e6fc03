"""A run that cannot learn says so: which rows of metrics make which warning."""

from typing import Any

import pytest

from flows.run.learning_warnings import IN_A_ROW, learning_warnings

HEALTHY = {
    "reward": 0.4,
    "reward_std": 0.3,
    "frac_reward_zero_std": 0.5,
    "completions/clipped_ratio": 0.9,
    "completions/mean_length": 100.0,
    "kl": 5.0,
}
ZERO = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
EQUAL_GROUPS = {"frac_reward_zero_std": 1.0}
TRUNCATED = {"completions/clipped_ratio": 1.0}
FAR = {"kl": 60.0}


def rows(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**HEALTHY, **change} for change in changes]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{}] * 60, {}),
        ([ZERO] * (IN_A_ROW - 1), {}),
        ([ZERO] * IN_A_ROW, {"equal rewards": "every response of 5 iterations has the reward 0.000"}),
        ([ZERO, {}, *[ZERO] * (IN_A_ROW - 1)], {}),
        (
            [{"reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": None}] * 9,
            {"equal rewards": "reward 1.000"},
        ),
        ([EQUAL_GROUPS] * IN_A_ROW, {"equal rewards": "all responses to a prompt have equal rewards"}),
        (
            [TRUNCATED] * IN_A_ROW,
            {"truncated": "all are cut at 100 tokens. Raise sampling.max_completion_length"},
        ),
        ([{}, *[FAR] * IN_A_ROW], {"kl": "0.6 nats a token, above 0.5 for 5 iterations"}),
        ([FAR] * 60, {}),  # far from the start, as a teacher is
        ([{}, *[FAR] * IN_A_ROW, {}], {}),
        ([{**ZERO, **TRUNCATED}] * 5, {"equal rewards": "samples/", "truncated": "sampling.stop"}),
        ([dict.fromkeys(HEALTHY)] * 9, {}),
    ],
)
def test_a_warning_needs_five_iterations_that_agree(changes: list[dict[str, Any]], said: dict[str, str]):
    so_far = rows(*changes)
    found = learning_warnings(so_far[0], so_far)
    assert found.keys() == said.keys()
    for what, part in said.items():
        assert part in found[what]
        assert "\n" not in found[what]


def test_runs_without_these_metrics_are_told_nothing():
    assert learning_warnings({"loss/sft": 2.0}, [{"loss/sft": 2.0}] * 60) == {}
