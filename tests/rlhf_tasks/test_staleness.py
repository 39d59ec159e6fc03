"""Samples that are drawn ahead of their training: the same bits under any plan, drawn by the version that is due."""

from functools import partial
from pathlib import Path

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleStore
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.algorithms.one_rank import OneRank, world_of_one
from tests.rlhf_tasks.test_layout_invariance import ALONE, OWN, differences, other_plans, trajectory
from tests.rlhf_tasks.test_parts import of_calls
from tests.tiny_runs import critic_free_config, ppo_config

pytestmark = pytest.mark.dist

CALLS = (*PPO_CALLS, "actor_inference")
PLANS = {
    "one rank": (1, dict.fromkeys(CALLS, ALONE)),
    "generation on a mesh of its own": (
        2,
        {call: "1 offload" if call.endswith("train") else "1" for call in CALLS} | {"actor_generate": "0"},
    ),
    OWN: (
        4,
        {
            "actor_generate": "0-1 t2",
            "actor_inference": "0-1 t2",
            "ref_inference": "0-1 p2 m2",
            "reward_inference": "2",
            "critic_inference": "3",
            "actor_train": "2-3 d2",
            "critic_train": "2-3 p2 m4",
        },
    ),
    "one mesh, dealt by prompts to generate and by whole sequences to learn": (
        2,
        dict.fromkeys(CALLS, "0-1 d2 tokens"),
    ),
}


def by_hand(config) -> list[dict[str, float]]:
    """The metrics of all calls, call by call in this process: without plan, sequencer or versions' checks.

    The samples of iteration t are drawn when the actor has been trained max(0, t - staleness) times; what is told of
    them belongs to iteration t nevertheless.
    """
    run, store, told = OneRank(config, Path(config.output_dir)), SampleStore(), []
    named, drawn = {call.name: call for call in run.calls}, []
    for trained in range(3):
        for t in range(3):
            ids = range(t * config.batch_size, (t + 1) * config.batch_size)
            if max(0, t - config.staleness) == trained:
                store.put(fetch(run.rows, config, ids))
                drawn.append(run.call(named["actor_generate"], t, store, ids))
        ids = range(trained * config.batch_size, (trained + 1) * config.batch_size)
        metrics = {f"actor_generate/{k}": v for k, v in drawn[trained].items()}
        for call in run.calls:
            if call.kind != "generate":
                metrics |= {f"{call.name}/{k}": v for k, v in run.call(call, trained, store, ids).items()}
        run.engines["actor"].version += 1
        told.append(metrics)
    run.close()
    return told


@pytest.mark.parametrize(
    "staleness", [pytest.param(0, marks=pytest.mark.whole), 1, pytest.param(2, marks=pytest.mark.whole)]
)
def test_every_sample_is_drawn_by_the_version_that_is_due(ranks, tmp_path, staleness):
    config = partial(ppo_config, staleness=staleness, optimizer={"learning_rate": 1e-2})
    calls = CALLS if staleness else PPO_CALLS
    found = trajectory(ranks, tmp_path, 1, dict.fromkeys(calls, ALONE), config)
    with world_of_one():
        wanted = by_hand(config(tmp_path, dtype="float64"))
    assert len({seen["actor_train/loss/policy"] for seen in wanted}) == 3
    assert len({seen["actor_generate/completions/mean_length"] for seen in wanted}) > 1
    assert not differences([{k: v for k, v in w.items() if "per_s" not in k} for w in wanted], found)


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_same_seed_gives_the_same_losses_under_any_plan(ranks, tmp_path, staleness):
    config = partial(ppo_config, staleness=staleness, optimizer={"learning_rate": 1e-2})
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"], config)
    ages = [seen["actor_train/staleness/max"] for seen in reference]
    assert ages == [0, 1, min(2, staleness)]
    assert reference[0]["actor_train/importance/mean"] == pytest.approx(1, abs=1e-12)
    assert reference[2]["actor_train/importance/mean"] != pytest.approx(1, abs=1e-4)
    assert all(seen["actor_train/policy/mismatch"] < 1e-12 for seen in reference)
    for name in list(PLANS)[1:]:
        assert not differences(reference, trajectory(ranks, tmp_path, *PLANS[name], config)), name


SEGMENTS = {"max_completion_length": 12, "segment_tokens": 5, "stop": list(range(32, 64))}
"""Some responses end in the iteration that begins them, others two iterations later."""


# Both at once, staleness and segments, are in the default suite of tests/rlhf_tasks/controller/test_in_flight.py.
@other_plans(PLANS)
@pytest.mark.parametrize("staleness", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.whole
def test_the_same_is_true_of_samples_that_are_drawn_in_segments(ranks, tmp_path, staleness, names):
    config = partial(
        ppo_config,
        staleness=staleness,
        sampling=SEGMENTS,
        optimizer={"learning_rate": 1e-2},
        total_iterations=4,
    )
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"], config)
    counts = [
        (seen["actor_generate/segments/waiting"], seen["actor_generate/segments/unfinished"])
        for seen in reference
        if "actor_generate/segments/waiting" in seen
    ]
    assert any(0 < waiting < unfinished == 16 for waiting, unfinished in counts)
    ages = [seen["actor_train/staleness/max"] for seen in reference]
    assert ages[0] == 0 < ages[1]
    assert reference[2]["actor_train/importance/mean"] != pytest.approx(1, abs=1e-4)
    assert all(seen["actor_train/policy/mismatch"] < 1e-12 for seen in reference)
    for name in names:
        n_ranks, plan = PLANS[name]
        if "tokens" in plan["actor_generate"]:
            plan = {**plan, "actor_generate": "0-1 d2"}
        assert not differences(reference, trajectory(ranks, tmp_path, n_ranks, plan, config)), name


@pytest.mark.parametrize(
    ("n_ranks", "generation"),
    [
        pytest.param(2, "0-1 p2", marks=pytest.mark.slow),
        pytest.param(2, "0-1 p2 m3", marks=pytest.mark.whole),
        pytest.param(4, "0-3 d2 p2", marks=pytest.mark.slow),
    ],
)
def test_so_it_is_where_stages_draw_segments(ranks, tmp_path, n_ranks, generation):
    """Each stage finds out from the tokens alone which sequences continue. Few end in a segment, so an iteration has
    several; stop strings and top-k have a state too."""
    sampling = {"max_completion_length": 12, "segment_tokens": 3, "stop": [*range(32, 48), "tt"]}
    sampling |= {"top_k": 40}
    config = partial(ppo_config, sampling=sampling, optimizer={"learning_rate": 1e-2}, total_iterations=4)
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"], config)
    plan = {**dict.fromkeys(CALLS, "1"), "actor_generate": generation}
    found = trajectory(ranks, tmp_path, n_ranks, plan, config)
    assert any(seen["actor_generate/segments/unfinished"] for seen in reference)
    assert not differences(reference, found)


def test_so_it_is_where_a_dp_rank_has_nothing_left_to_draw(ranks, tmp_path):
    config = partial(ppo_config, sampling=SEGMENTS, batch_size=4, optimizer={"learning_rate": 1e-2})
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"], config)
    of_last = reference[1]
    waiting, unfinished = (of_last[f"actor_generate/segments/{what}"] for what in ("waiting", "unfinished"))
    assert unfinished - waiting < 4, "of the four dp ranks, one draws nothing in the last iteration"
    plan = {**dict.fromkeys(CALLS, ALONE), "actor_generate": "0-3 d4"}
    assert not differences(reference, trajectory(ranks, tmp_path, 4, plan, config))


GREEDY = ("greedy_generate", "greedy_reward_inference")
SAMPLING = ("actor_generate", "reward_inference", "ref_inference", "actor_train")
KINDS = {
    "grpo": {
        "type": "grpo",
        "num_generations": 4,
        "chunks": 2,
        "sampling": {"max_completion_length": 12, "top_k": 9},
    },
    "remax": {"type": "remax"},
}


def group_config(folder: Path, kind: str, **changes) -> RunConfig:
    """GRPO in parts and with top-k, or ReMax with its two generations, two iterations ahead."""
    ahead = {"staleness": 2, "optimizer": {"learning_rate": 1e-2}}
    return critic_free_config(folder, **ahead | KINDS[kind] | changes)


@pytest.mark.parametrize(
    "kind", [pytest.param("remax", marks=pytest.mark.whole), pytest.param("grpo", marks=pytest.mark.slow)]
)
def test_so_do_parts_kept_tokens_and_two_generations(ranks, tmp_path, kind):
    calls = (*SAMPLING, *(GREEDY if kind == "remax" else ()))
    apart = dict.fromkeys(calls, "1 m2")
    apart |= {call: "0-1 t2" for call in calls if call.endswith("_generate")}
    config = partial(group_config, kind=kind)
    reference = trajectory(ranks, tmp_path, 1, dict.fromkeys(calls, ALONE), config)
    assert [seen["actor_train/staleness/max"] for seen in reference] == [0, 1, 2]
    found = trajectory(ranks, tmp_path, 2, apart, config)
    assert not differences(of_calls(reference), of_calls(found))
