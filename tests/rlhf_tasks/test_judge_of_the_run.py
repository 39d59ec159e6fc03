"""The judge as a role of the run: its replies, and so scores and losses, are equal under any plan."""

from functools import partial

import pytest

from tests.rlhf_tasks.rank.engines_of_others import Uniform
from tests.rlhf_tasks.test_layout_invariance import differences, trajectory
from tests.tiny_judge import judged

ALONE = "0"
OF_GRPO = ("actor_generate", "judge_generate", "reward_inference", "ref_inference", "actor_train")
TOGETHER = (2, dict.fromkeys(OF_GRPO, "0-1 d2 tokens"))
APART = (
    4,
    {
        "actor_generate": "0-1 t2",
        "judge_generate": "2-3 p2 m2 offload",
        "reward_inference": "1",
        "ref_inference": "0-3 d4",
        "actor_train": "0-1 d2",
    },
)


def losses(ranks, folder, plans, alone, **changes):
    """The metrics of three iterations on one rank, once it is shown that all plans have the same."""
    config = partial(judged, **changes)
    reference = trajectory(ranks, folder, 1, alone, config)
    for n_ranks, plan in plans:
        found = trajectory(ranks, folder, n_ranks, plan, config)
        assert not differences(reference, found), plan
    return reference


@pytest.mark.dist
@pytest.mark.parametrize(
    "temperature", [pytest.param(1.0, marks=pytest.mark.whole), pytest.param(0.0, marks=pytest.mark.slow)]
)
def test_a_judge_replies_the_same_under_any_plan(ranks, tmp_path, temperature):
    alone = dict.fromkeys(OF_GRPO, ALONE)
    seen = losses(ranks, tmp_path, [TOGETHER, APART], alone, asks={"temperature": temperature})
    assert 0 < seen[0]["judge_generate/judge/unreadable"] < 1
    assert seen[0]["reward_inference/reward_std"] > 0
    assert len({each["actor_train/loss/policy"] for each in seen}) == 3


KINDS = {
    "parts": ({"chunks": 2, "asks": {"temperature": 1.0}}, OF_GRPO),
    "remax": (
        {"type": "remax"},
        (*OF_GRPO, "greedy_generate", "greedy_judge_generate", "greedy_reward_inference"),
    ),
    "ppo": ({"type": "ppo"}, (*OF_GRPO, "critic_inference", "critic_train")),
    "stale": ({"staleness": 1, "num_mini_batches": 2}, (*OF_GRPO, "actor_inference")),
    "segments": ({"sampling": {"max_completion_length": 12, "segment_tokens": 5}}, OF_GRPO),
    "rounds": ({"filter_groups": 2}, OF_GRPO),
    "responses of another engine": (
        {"generation": {"engine": f"{Uniform.__module__}:Uniform"}, "num_mini_batches": 2},
        (*OF_GRPO, "actor_inference"),
    ),
    "rloo": ({"type": "rloo"}, OF_GRPO),
    "reinforce_pp": ({"type": "reinforce_pp"}, OF_GRPO),
}
"""Kind of run -> its changes and its calls."""
IN_INTEGRATION = ("parts", "remax", "responses of another engine")


@pytest.mark.dist
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.whole if kind in IN_INTEGRATION else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_so_it_does_in_every_kind_of_run(ranks, tmp_path, kind):
    changes, calls = KINDS[kind]
    apart = dict.fromkeys(calls, "0-1 d2") | {"judge_generate": "0-1 t2", "reward_inference": "1"}
    seen = losses(ranks, tmp_path, [(2, apart)], dict.fromkeys(calls, ALONE), **changes)
    assert any(name.endswith("judge/unreadable") for name in seen[0])
    assert len({each["actor_train/loss/policy"] for each in seen}) == 3
