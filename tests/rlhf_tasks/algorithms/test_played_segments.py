"""Episodes that wait for the next iteration: what a whole draw gives, whether their environments live on or not."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import ANSWERED, DRAWN_BY, NUMBER
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.user_code.environments import EnvironmentProcess
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from tests.rlhf_tasks import test_tools
from tests.rlhf_tasks.algorithms.one_rank import OneRank, runs_of_one
from tests.rlhf_tasks.test_environments import MOODY, PLAYED, folder, grpo_config, lines
from tests.rlhf_tasks.test_layout_invariance import PLANS, differences, other_plans, trajectory
from tests.tiny_runs import ppo_config

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.dist

ITERATIONS, BATCH = 5, 16
FORGETFUL = PLAYED["factory"].replace("Echo", "Forgetful")
WHOLE = {"max_completion_length": 50}
SEGMENTS = {**WHOLE, "segment_tokens": 4}
LONG = {**PLAYED, "max_turn_tokens": 4, "kwargs": {"most": 6}}


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Any:
    """Begin a run of GRPO in segments on this process."""
    config = partial(
        grpo_config, total_iterations=ITERATIONS, environment=LONG, sampling=SEGMENTS, num_generations=2
    )
    with runs_of_one(config, folder, tmp_path) as begin:
        yield begin


def iterate(run: OneRank, t: int) -> dict[int, SampleBatch]:
    """What an iteration delivers: sample -> its data. Nothing is trained, but versions count up."""
    generate = next(call for call in run.calls if call.kind == "generate")
    store, ids = SampleStore(), range(t * BATCH, (t + 1) * BATCH)
    store.put(fetch(run.rows, run.config, ids))
    run.call(generate, t, store, ids)
    run.engines["actor"].version += 1
    batch = store.get(list(ids), generate.outputs)
    numbers = batch[NUMBER].values.tolist() if generate.segment_tokens else ids
    return {number: batch.take([place]) for place, number in enumerate(numbers)}


def delivered(run: OneRank) -> list[dict[int, SampleBatch]]:
    return [iterate(run, t) for t in range(ITERATIONS)]


def assert_same(found: dict[int, SampleBatch], wanted: dict[int, SampleBatch]) -> None:
    assert sorted(found) == sorted(wanted)
    for number, batch in found.items():
        for key in set(wanted[number].data) - {"old_logprobs"}:
            assert torch.equal(batch[key].values, wanted[number][key].values), (number, key)
        old, wanted_old = batch["old_logprobs"].values, wanted[number]["old_logprobs"].values
        assert torch.allclose(old, wanted_old, atol=1e-9)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_episode_is_what_it_is_when_it_is_played_at_once(run: Any, micro_batches: int):
    at_once = {n: one for of in delivered(run(sampling=WHOLE)) for n, one in of.items()}
    in_segments = run()
    in_segments.micro_batches["actor_generate"] = micro_batches
    batches = delivered(in_segments)
    assert all(len(batch) == BATCH for batch in batches)
    assert [n for batch in batches for n in batch] != sorted(at_once), "the short ones come first"
    found = {n: one for batch in batches for n, one in batch.items()}
    assert_same(found, at_once)
    turns = [len(one[ANSWERED].values) // 2 for one in found.values()]
    assert (min(turns), max(turns)) == (1, 6)
    ages = [len(set(one[DRAWN_BY].values[one["response_mask"].values].tolist())) for one in found.values()]
    assert max(ages) > 1, "some were drawn by several versions"
    for one in found.values():
        assert torch.equal(one[DRAWN_BY].values < 0, ~one["response_mask"].values)


def test_environments_of_episodes_that_continue_live_on(run: Any, tmp_path: Path):
    log = tmp_path / "begun"
    delivered(run(environment={**LONG, "kwargs": {"most": 6, "counted": str(log)}}))
    assert len(lines(log)) == ITERATIONS * BATCH


def test_those_of_a_process_that_is_gone_are_given_their_turns_again(run: Any, tmp_path: Path):
    wanted, log = delivered(run()), tmp_path / "begun"
    again = run(environment={**LONG, "kwargs": {"most": 6, "counted": str(log)}})
    for t in range(ITERATIONS):
        assert_same(iterate(again, t), wanted[t])
        again.environment.close()
        again.environment = EnvironmentProcess(again.config)
    assert len(lines(log)) > ITERATIONS * BATCH


def test_one_that_answers_otherwise_when_it_is_played_again_is_told_in_a_sentence(run: Any):
    forgetful = run(environment={**LONG, "factory": FORGETFUL})
    iterate(forgetful, 0)
    forgetful.environment.close()
    forgetful.environment = EnvironmentProcess(forgetful.config)
    with pytest.raises(
        RewardError, match=r"played again, it answered turn 1 of an episode otherwise than before"
    ):
        iterate(forgetful, 1)


def test_calls_of_tools_are_counted_over_all_iterations_of_an_episode(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
):
    """Turns of at most 6 tokens; three of them at most."""
    base, sampling = tmp_path_factory.mktemp("tools"), test_tools.TOOLS["sampling"]
    config = partial(test_tools.config_of, total_iterations=ITERATIONS, num_generations=2)
    with runs_of_one(config, base, tmp_path) as begin:
        at_once = {n: one for of in delivered(begin()) for n, one in of.items()}
        batches = delivered(begin(sampling={**sampling, "segment_tokens": 6}))
    found = {n: one for batch in batches for n, one in batch.items()}
    assert [*found] != sorted(found), "the short ones come first"
    assert_same(found, at_once)
    assert {tuple(one["tool_calls"].values.tolist()) for one in found.values()} > {(0, 0, 0)}


def test_failed_episodes_are_skipped_in_segments_too(run: Any):
    batches = delivered(run(environment={**LONG, "factory": MOODY}, on_reward_error="skip"))
    faults = [one["environment_fault"].texts()[0] for batch in batches for one in batch.values()]
    assert 0 < sum(map(bool, faults)) < len(faults)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"max_turn_tokens": 5}, r"a segment is a turn\. Set max_turn_tokens to at most segment_tokens"),
        ({"max_turn_tokens": None}, r"environment\.max_turn_tokens=None: of responses of several turns"),
        ({"together": False}, r"environment\.together=false waits for nobody in vain"),
    ],
)
def test_turns_that_are_longer_than_segments_or_wait_for_nobody_are_refused(
    folder: Path, environment: dict[str, Any], sentence: str
):
    with pytest.raises(ConfigError, match=sentence):
        grpo_config(folder, sampling=SEGMENTS, environment={**LONG, **environment})


@other_plans(PLANS)
@pytest.mark.whole
def test_the_same_seed_gives_the_same_losses_under_any_plan(ranks: Any, tmp_path: Path, names: Any):
    config: Any = partial(ppo_config, environment=LONG, sampling=SEGMENTS)
    more = {"actor_inference": "0"}
    reference = trajectory(ranks, tmp_path, 1, {**PLANS["one rank"][1], **more}, config)
    assert any(seen["actor_generate/segments/unfinished"] for seen in reference)
    for name in names:
        n_ranks, plan = PLANS[name]
        if "tokens" in plan["actor_generate"]:
            plan = {**plan, "actor_generate": "0-1 d2"}
        found = trajectory(ranks, tmp_path, n_ranks, {**plan, **more}, config)
        assert not differences(reference, found), name
    in_stages = {**PLANS["one rank"][1], **more, "actor_generate": "0-1 p2 m3"}
    assert not differences(reference, trajectory(ranks, tmp_path, 2, in_stages, config))
