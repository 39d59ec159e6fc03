"""Calls that are cut into parts, and rounds of samples, under plans that differ in everything: the same losses."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from tests.rlhf_tasks.test_layout_invariance import ALONE, PLANS, differences, trajectory
from tests.tiny_runs import critic_free_config, ppo_config

pytestmark = pytest.mark.dist

REWARD = """
from zlib import crc32
def judge(prompts, completions, answer, **columns):
    return [1.0 if int(a) < 1 else crc32(c.encode()) / 2**32 for c, a in zip(completions, answer)]
"""
"""One of seven prompts has a group of equal scores."""

SIDE_BY_SIDE = {
    "actor_generate": "0-1 t2",
    "reward_inference": "2",
    "ref_inference": "2-3 d2 tokens",
    "actor_train": "0-3 d2 t2 m2 tokens",
}
ROUND_PLANS = {
    "scored on other devices": (4, SIDE_BY_SIDE),
    "dealt by tokens": (2, dict.fromkeys(SIDE_BY_SIDE, "0-1 d2 tokens")),
    "in a pipeline": (2, dict.fromkeys(SIDE_BY_SIDE, "0-1 p2 m2")),
}


def of_calls(found: list[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics by call, whichever of its parts told them."""
    return [{re.sub(r"_\d+/", "/", name, count=1): v for name, v in seen.items()} for seen in found]


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """The metrics of whole calls on one rank."""
    return trajectory(ranks, tmp_path_factory.mktemp("whole"), *PLANS["one rank"])


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        pytest.param("one rank", 4, marks=pytest.mark.whole),
        pytest.param("calls on meshes and strategies of their own", 2, marks=pytest.mark.whole),
        pytest.param("overlapping meshes, balanced by tokens", 4, marks=pytest.mark.slow),
        pytest.param(
            "one mesh, dealt by prompts to generate and by whole sequences to learn",
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parts_of_a_call_change_no_metric_under_any_plan(ranks, tmp_path, whole, name, chunks):
    cut = of_calls(trajectory(ranks, tmp_path, *PLANS[name], partial(ppo_config, chunks=chunks)))
    assert cut[2].keys() >= whole[2].keys()
    assert not differences(whole, cut)


def dapo_config(folder: Path, **changes: Any) -> RunConfig:
    """DAPO with a reference, in up to two rounds of four groups."""
    (folder / "rewards.py").write_text(REWARD)
    rewards = [{"function": f"{folder}/rewards.py:judge"}]
    own = {"type": "dapo", "rewards": rewards, "num_generations": 4, "num_mini_batches": 2}
    return critic_free_config(folder, **own | changes)


@pytest.mark.parametrize(
    "name",
    ["scored on other devices", *(pytest.param(n, marks=pytest.mark.slow) for n in list(ROUND_PLANS)[1:])],
)
def test_rounds_are_decided_and_learned_alike_under_any_plan(ranks, tmp_path, name):
    alone = trajectory(ranks, tmp_path, 1, dict.fromkeys(SIDE_BY_SIDE, ALONE), dapo_config)
    rounds = [seen["actor_train/groups/rounds"] for seen in alone]
    assert set(rounds) == {1.0, 2.0}
    assert max(seen["actor_train/groups/kept"] for seen in alone) == 4
    assert not differences(alone, trajectory(ranks, tmp_path, *ROUND_PLANS[name], dapo_config))
