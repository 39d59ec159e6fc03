"""Runs that sample ahead of their training: whatever dies, the samples in flight come from the commit, bit by bit.

The product's executor and snapshots on two ranks; generation is dealt by tokens over both.
"""

import asyncio

import pytest
from distributed.comm import CommClosedError

from flows.run.prepare import prepare
from rlhf_tasks.checkpoint.commits import step_folder
from rlhf_tasks.checkpoint.manifest import read_manifest
from rlhf_tasks.protocol.messages import Faulted, PlanChanged
from tests.committed import assert_same_run, metrics_of, state_at
from tests.rlhf_tasks.attempts import attend, committed, found, of_type, resume, run_undisturbed, spec_of_job
from tests.rlhf_tasks.controller.test_kills import armed
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ITERATIONS, AT, STALENESS = 5, 3, 2
PLAN = {
    **TWO_RANKS,
    "actor_generate": {"devices": [0, 1], "dp": 2, "balance": "tokens"},
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
            staleness=STALENESS,
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


def drawn_at(folder, step):
    """The ids of the samples that a commit has for later iterations."""
    tensors, _ = state_at(folder, step)
    ids = [
        held
        for (role, _, name), (_, held) in tensors.items()
        if role == "actor_generate" and name == "old_logprobs/ids"
    ]
    return sorted(int.from_bytes(held[i : i + 8], "little") for held in ids for i in range(0, len(held), 8))


def test_a_commit_has_the_samples_of_the_iterations_to_come(undisturbed):
    assert [line["staleness/max"] for line in metrics_of(undisturbed)] == [0, 1, 2, 2, 2]
    for step in (AT, AT + 1, ITERATIONS):
        assert read_manifest(step_folder(undisturbed, step)).cursor == 16 * step
        assert drawn_at(undisturbed, step) == list(range(16 * step, 16 * min(step + STALENESS, ITERATIONS)))


@pytest.mark.parametrize(
    ("point", "at"), [("answer", AT), pytest.param("generation", AT - 1, marks=pytest.mark.slow)]
)
def test_a_rank_that_is_killed_costs_nothing(cluster, job, undisturbed, tmp_path, point, at):
    folder = tmp_path / "run"
    with armed(cluster, f"{point}:kill@rank1@iter{at}@gen0"):
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


def test_samples_that_one_plan_has_drawn_are_learned_from_under_another(cluster, job, undisturbed, tmp_path):
    folder, later = tmp_path / "run", prepared(tmp_path, LATER).plan
    folder.mkdir()
    with found(cluster, folder) as now:
        events = asyncio.run(attend(now, spec_of(now, job, folder), later=(AT, later)))
    assert [event.planned.iteration for event in of_type(events, PlanChanged)] == [AT]
    for mine, wanted in zip(metrics_of(folder), metrics_of(undisturbed), strict=True):
        assert mine == pytest.approx(wanted, rel=1e-9, abs=1e-11)
