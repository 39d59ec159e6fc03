"""Whatever dies, a run of PPO continues from its last commit to the very bits of an undisturbed run.

The product's own executor and snapshots on a real cluster of four ranks: all six calls, on meshes and strategies of
their own, so that there are reallocations, redistributions and overlapping iterations to be interrupted. Only
Prefect is left out (tests/flows/run/test_training.py).
"""

import asyncio
import os
import signal
import time

import pytest
from distributed import Client
from distributed.comm import CommClosedError

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from prefect_rlhf.rlhf_tasks.protocol.messages import Aborted, Committed, Faulted
from tests.committed import assert_same_run, generations_of, metrics_of, state_at
from tests.rlhf_tasks.attempts import attend, committed, found, of_type, resume, run_undisturbed, spec_of_job
from tests.rlhf_tasks.faulty_rank import FIRED, STOP, Fault
from tests.tiny_runs import ppo_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

N_RANKS = 4
ITERATIONS = 4
DEADLINE_S = 200.0  # of a node
NOTICED_S = 50.0  # long before that; 5 s are promised, of a machine that is not starved
PLAN = {
    "actor_generate": "0-1 t2",
    "ref_inference": "0-1 p2 m2 offload",
    "reward_inference": "2 offload",
    "critic_inference": "3",
    "actor_train": "0-1 d2 offload",
    "critic_train": "2-3 p2 m4 offload",
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Config and plan of all runs; the roles have state of their own: value normalisation and an adaptive KL."""
    config = ppo_config(
        tmp_path_factory.mktemp("job"),
        plan=PLAN,
        cluster={"devices_per_host": N_RANKS},
        total_iterations=ITERATIONS,
        kl_target=0.1,
        kl_horizon=64,
    )
    return prepare(config)


def spec_of(cluster, job, folder, **options):
    """A run of the job in its own folder, on ranks with faults."""
    faulty = {"executor": "tests.rlhf_tasks.faulty_rank:make_executor", "deadline_floor_s": DEADLINE_S}
    return spec_of_job(cluster, job, folder, ITERATIONS, **{**faulty, **options})


@pytest.fixture(scope="module")
def undisturbed(cluster, job, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    return run_undisturbed(cluster, spec_of(cluster, job, folder))


def test_an_undisturbed_run_changes_every_tensor_and_state(undisturbed):
    tensors, (cursor, versions, roles) = state_at(undisturbed, ITERATIONS)
    before, _ = state_at(undisturbed, ITERATIONS - 1)
    assert cursor == 64
    assert versions == {"actor": ITERATIONS, "critic": ITERATIONS}
    assert len({metrics["kl_coef"] for metrics in metrics_of(undisturbed)}) == ITERATIONS
    assert all(record.state for record in roles.values())
    assert all(tensors[key] != before[key] for key in tensors)


FAULTS = {
    "in a train_step while the next iteration generates": (
        Fault(3, 1, "critic_train", inside_s=0.04, meanwhile=(2, "actor_generate")),
        "rank 3, call critic_train, iteration 2: lost",
    ),
    "between a save and its commit": (
        Fault(2, 2, "save_critic", meanwhile=(3, "reward_inference")),
        "rank 2, call reward_inference, iteration 4: lost",
    ),
}


@pytest.mark.parametrize(
    "place",
    [next(iter(FAULTS)), *(pytest.param(place, marks=pytest.mark.slow) for place in list(FAULTS)[1:])],
)
def test_a_killed_rank_is_named_and_the_run_ends_in_the_same_bits(cluster, job, undisturbed, tmp_path, place):
    fault, words = FAULTS[place]
    folder = tmp_path / "run"
    fault.write(folder)
    start_s = time.time()
    events = asyncio.run(attend(cluster, spec_of(cluster, job, folder)))
    (faulted,) = of_type(events, Faulted)
    assert words in str(faulted.cause)
    noticed_s = start_s + next(s for s, event in events if event is faulted)
    assert noticed_s - float((folder / FIRED).read_text()) < NOTICED_S
    aborted = {event.iteration for event in of_type(events, Aborted)}
    assert fault.iteration in aborted
    assert fault.meanwhile is None or fault.meanwhile[0] in aborted
    assert committed(events) == list(range(ITERATIONS))
    assert min(aborted) >= 1, "it did not continue from a snapshot, it began anew"
    lived = {i: (1, 0 if i < min(aborted) else 1) for i in range(ITERATIONS)}
    assert generations_of(folder) == lived
    assert_same_run(folder, undisturbed)


@pytest.mark.slow
def test_a_rank_that_stops_is_noticed_by_its_deadline(cluster, job, undisturbed, tmp_path):
    folder, deadline_s = tmp_path / "run", 12.0
    Fault(1, 2, "actor_generate", inside_s=0.04, signal=STOP).write(folder)
    start_s = time.time()
    events = asyncio.run(attend(cluster, spec_of(cluster, job, folder, deadline_floor_s=deadline_s)))
    (faulted,) = of_type(events, Faulted)
    assert "call actor_generate, iteration 3: not finished 12 s after" in str(faulted.cause)
    noticed_s = start_s + next(s for s, event in events if event is faulted)
    assert noticed_s - float((folder / FIRED).read_text()) < deadline_s + NOTICED_S
    assert committed(events) == list(range(ITERATIONS))
    assert_same_run(folder, undisturbed)


def test_a_run_whose_flow_left_is_resumed(cluster, job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    events = asyncio.run(attend(cluster, spec_of(cluster, job, folder), until=Committed))
    assert committed(events) == [0]  # iteration 1 is running
    resumed = asyncio.run(attend(cluster, spec_of(cluster, job, folder, attempt=2)))
    assert committed(resumed)[0] >= 1
    assert committed(resumed) == list(range(committed(resumed)[0], ITERATIONS))
    assert generations_of(folder)[ITERATIONS - 1] == (2, 0)
    assert_same_run(folder, undisturbed)


@pytest.mark.slow
def test_a_run_of_which_every_process_was_killed_is_resumed(cluster, job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        pids = client.run(os.getpid)

    async def kill_all_after_a_commit():
        while not step_folder(folder, 1).exists():
            await asyncio.sleep(0.01)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)

    async def run(now):
        await asyncio.gather(attend(now, spec_of(now, job, folder)), kill_all_after_a_commit())

    with found(cluster, folder) as now, pytest.raises(CommClosedError):
        asyncio.run(run(now))
    events = again(cluster, job, folder, gone=set(pids))
    assert committed(events)[0] >= 1
    assert_same_run(folder, undisturbed)


def again(cluster, job, folder, gone):
    """Attempt 2, once the workers of the addresses `gone` are known to be dead: its events."""
    return resume(cluster, folder, gone, lambda now: spec_of(now, job, folder, attempt=2))
