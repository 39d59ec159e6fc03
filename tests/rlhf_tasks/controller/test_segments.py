"""Runs that draw in segments: whatever dies, the sequences in flight come from the commit and go on, bit by bit.

The product's executor and snapshots on two ranks; generation is dealt over both, one iteration ahead.
"""

import asyncio

import pytest
from distributed.comm import CommClosedError

from flows.run.prepare import prepare
from rlhf_tasks.protocol.messages import Faulted, PlanChanged
from tests.committed import assert_same_run, metrics_of, state_at
from tests.rlhf_tasks.attempts import attend, committed, found, of_type, resume, run_undisturbed, spec_of_job
from tests.rlhf_tasks.controller.test_kills import armed
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ITERATIONS, AT = 5, 2
PLAN = {
    **TWO_RANKS,
    "actor_generate": {"devices": [0, 1], "dp": 2},
    "actor_inference": {"devices": [1]},
}
LATER = {**PLAN, "actor_generate": {"devices": [1]}, "actor_train": {"devices": [0, 1], "tp": 2}}


def prepared(base, plan):
    return prepare(
        ppo_config(
            base,
            plan=plan,
            cluster={"devices_per_host": 2},
            total_iterations=ITERATIONS,
            staleness=1,
            sampling={
                "max_completion_length": 12,
                "segment_tokens": 5,
                "stop_token_ids": list(range(32, 64)),
            },
            dtype="float64",
            keep_last=3,
            optimizer={"learning_rate": 1e-2},
        )
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("job"), PLAN)


def spec_of(cluster, job, folder, **options):
    return spec_of_job(cluster, job, folder, ITERATIONS, **options)


@pytest.fixture(scope="module")
def undisturbed(cluster, job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    return run_undisturbed(cluster, spec_of(cluster, job, folder))


def unfinished_at(folder, step):
    """The numbers of the samples that a commit has unfinished; -1 for a free place."""
    tensors, _ = state_at(folder, step)
    held = [
        data
        for (role, _, name), (_, data) in tensors.items()
        if role == "actor_generate" and name == "left_number/values"
    ]
    return [
        int.from_bytes(data[i : i + 8], "little", signed=True)
        for data in held
        for i in range(0, len(data), 8)
    ]


def test_a_commit_has_the_sequences_that_have_not_ended_and_the_last_iteration_leaves_none(undisturbed):
    numbers = unfinished_at(undisturbed, AT + 1)
    assert len(numbers) == 32
    assert sum(number >= 0 for number in numbers) == 16
    told = [line["segments/unfinished"] for line in metrics_of(undisturbed) if "segments/unfinished" in line]
    assert told[-1] == 0 < max(told)


def test_a_rank_that_is_killed_costs_nothing(cluster, job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    with armed(cluster, f"generation:kill@rank1@iter{AT}@gen0"):
        events = asyncio.run(attend(cluster, spec_of(cluster, job, folder)))
    assert of_type(events, Faulted)
    assert committed(events) == list(range(ITERATIONS))
    assert_same_run(folder, undisturbed)
    assert state_at(folder, AT + 1) == state_at(undisturbed, AT + 1)


def test_nor_does_a_whole_run_that_is_killed_and_resumed(cluster, job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        found(cluster, folder) as now,
        armed(now, f"manifest_synced:kill@iter{AT}@attempt1"),
        pytest.raises(CommClosedError),
    ):
        asyncio.run(attend(now, spec_of(now, job, folder)))
    gone = {now.controller.address}
    events = resume(cluster, folder, gone, lambda now: spec_of(now, job, folder, attempt=2))
    assert committed(events) == list(range(AT, ITERATIONS))
    assert_same_run(folder, undisturbed)
    assert state_at(folder, AT + 1) == state_at(undisturbed, AT + 1)


def test_what_one_plan_has_begun_goes_on_under_another(cluster, job, undisturbed, tmp_path):
    folder, later = tmp_path / "run", prepared(tmp_path, LATER).plan
    folder.mkdir()
    with found(cluster, folder) as now:
        events = asyncio.run(attend(now, spec_of(now, job, folder), later=(AT, later)))
    assert [event.planned.iteration for event in of_type(events, PlanChanged)] == [AT]
    for mine, wanted in zip(metrics_of(folder), metrics_of(undisturbed), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-9, abs=1e-11)
