"""A process that is killed at any failpoint costs a run nothing: it continues to the bits of an undisturbed one.

The product's executor and snapshots on two ranks, with all six calls, reallocations, redistributions and offloading.
"""

import asyncio
from contextlib import contextmanager

import pytest
from distributed import Client
from distributed.comm import CommClosedError

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.protocol.messages import Faulted, GaveUp
from prefect_rlhf.rlhf_tasks.system import failpoints
from prefect_rlhf.rlhf_tasks.system.failpoints import CONTROLLER, RANK, Point
from tests.committed import assert_same_run, metrics_of
from tests.rlhf_tasks.attempts import attend, committed, found, of_type, resume, run_undisturbed, spec_of_job
from tests.tiny_runs import TWO_RANKS, ppo_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RANKS = (0, 1)
ITERATIONS = 4
AT = 2  # the iteration in which a process is killed
OFFLOADED = {
    **TWO_RANKS,
    "ref_inference": "0 offload",
    "reward_inference": "1 offload",
}
HEADS = {Point.FETCH: (0,), Point.REWARD: (1,)}  # of the calls that only heads do something in
CORE = {  # of the default suite; all others are for the long one
    (Point.OPTIMIZER_STEP, 0),
    (Point.MANIFEST_SYNCED, None),
}
FIRST_FAULT = f"answer:raise@rank0@iter{AT}@gen0"  # so that a commit is restored
ARMED = {
    Point.RESET: "{name}:kill@gen0@rank{rank}",
    Point.JOIN: "{name}:kill@gen0@rank{rank}",
    Point.JOINED: "{name}:kill@gen0@rank{rank}",
    Point.LOADED: "{name}:kill@gen0@rank{rank}",
    Point.RESTORE: FIRST_FAULT + ",{name}:kill@gen1@rank{rank}",
    Point.LEASE: "{name}:kill@attempt1",
    Point.SWEEP: "{name}:kill@attempt1",
    Point.PRUNE: "{name}:kill@attempt1",
    Point.RESETTING: "{name}:kill@attempt1@gen0",
}
"""How a place is armed that is not of one iteration."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Config and plan of all runs."""
    return prepare(config_of(tmp_path_factory.mktemp("job"), OFFLOADED))


def config_of(base, plan):
    return ppo_config(
        base,
        plan=plan,
        cluster={"devices_per_host": len(RANKS)},
        total_iterations=ITERATIONS,
        kl_target=0.1,
        kl_horizon=64,
    )


def spec_of(cluster, job, folder, **options):
    return spec_of_job(cluster, job, folder, ITERATIONS, **options)


@pytest.fixture(scope="module")
def undisturbed(cluster, job, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    return run_undisturbed(cluster, spec_of(cluster, job, folder))


@contextmanager
def armed(cluster, text):
    """All processes of the cluster are armed; those that take the place of a killed one are not."""
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        client.run(failpoints.arm, text)
        try:
            yield
        finally:
            # The scheduler may not know yet that a killed worker is gone, which then refuses or times out.
            client.run(failpoints.arm, "", on_error="ignore")


def text_of(point, rank=None):
    default = (
        "{name}:kill@rank{rank}@iter{at}@gen0" if point.process == RANK else "{name}:kill@iter{at}@attempt1"
    )
    return ARMED.get(point, default).format(name=point.label, rank=rank, at=AT)


def places():
    """Every place of ranks and controller, with the rank that is killed there."""
    for point in Point:
        if point.process == RANK:
            on = HEADS.get(point, RANKS)
            yield from ((point, rank) for rank in on)
        elif point.process == CONTROLLER:
            yield point, None


def marked(places):
    return [
        pytest.param(
            *place,
            id=place[0].label + ("" if place[1] is None else f"-rank{place[1]}"),
            marks=[] if place in CORE else [pytest.mark.slow],
        )
        for place in places
    ]


@pytest.mark.parametrize(("point", "rank"), marked(p for p in places() if p[0].process == RANK))
def test_a_rank_killed_there_is_replaced_and_the_run_ends_in_the_same_bits(
    cluster, job, undisturbed, tmp_path, point, rank
):
    folder = tmp_path / "run"
    with armed(cluster, text_of(point, rank)):
        events = asyncio.run(attend(cluster, spec_of(cluster, job, folder)))
    faults = of_type(events, Faulted)
    if point is not Point.RESET:  # a rank that is lost while all reset is awaited, without a fault
        assert any(f"rank {rank}" in str(fault.cause) and "lost" in str(fault.cause) for fault in faults), (
            faults
        )
    assert committed(events) == list(range(ITERATIONS))
    assert_same_run(folder, undisturbed)


@pytest.mark.parametrize(("point", "rank"), marked(p for p in places() if p[0].process == CONTROLLER))
def test_a_controller_killed_there_is_replaced_and_the_run_resumed_to_the_same_bits(
    cluster, job, undisturbed, tmp_path, point, rank
):
    folder = tmp_path / "run"
    folder.mkdir()
    with found(cluster, folder) as now, armed(now, text_of(point)), pytest.raises(CommClosedError):
        asyncio.run(attend(now, spec_of(now, job, folder)))
    gone = {now.controller.address}
    events = resume(cluster, folder, gone, lambda now: spec_of(now, job, folder, attempt=2))
    assert committed(events)[-1] == ITERATIONS - 1
    if point in (Point.METRICS, Point.JOURNALS, Point.MANIFEST_SYNCED):
        assert committed(events)[0] == AT, "the step was not committed"
    if point in (Point.RENAMED, Point.COMMITTED):
        assert committed(events)[0] == AT + 1, "the step was committed"
    assert len(metrics_of(folder)) == ITERATIONS
    assert_same_run(folder, undisturbed)


FULL = {
    "shard_written:full@rank1@iter{at}@gen0": "critic.rank-00001.gen-0.safetensors",
    "metrics:full@iter{at}@attempt1": "metrics.jsonl",
    "manifest_written:full@iter{at}@attempt1": "manifest.json",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", FULL)
def test_a_full_disk_ends_the_run_at_once_with_file_and_bytes_and_it_goes_on_when_there_is_room(
    cluster, job, undisturbed, tmp_path, text
):
    folder = tmp_path / "run"
    folder.mkdir()
    with found(cluster, folder) as now, armed(now, text.format(at=AT)):
        events = asyncio.run(attend(now, spec_of(now, job, folder)))
    end = events[-1][1]
    assert isinstance(end, GaveUp)
    assert (of_type(events, Faulted), end.committed_step) == ([], AT), "no rank was rebuilt"
    assert "no space left: " in end.reason
    assert f"{FULL[text]} needs " in end.reason
    with found(cluster, folder) as now:
        events = asyncio.run(attend(now, spec_of(now, job, folder, attempt=2)))
    assert committed(events) == list(range(AT, ITERATIONS))
    assert_same_run(folder, undisturbed)
