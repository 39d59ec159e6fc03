"""Whole runs on two ranks whose service is asked for samples while others are drawn: layouts, a kill, its bits."""

import asyncio
import json

import pytest
from distributed import Client

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.protocol.messages import Faulted
from prefect_rlhf.rlhf_tasks.system import failpoints
from tests.committed import assert_same_run, metrics_of
from tests.loopback import Service, served
from tests.rlhf_tasks.attempts import attend, committed, of_type, run_undisturbed, spec_of_job
from tests.tiny_runs import critic_free_config

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

ITERATIONS = 3
BATCH = 16
EARLY = "throughput/rewards_early"
EACH = dict.fromkeys(("actor_generate", "reward_inference", "ref_inference", "actor_train"), "0-1 d2")


@pytest.fixture(scope="module")
def service():
    """It rewards an answer by its length."""
    with served(
        Service(lambda body: {"rewards": [len(text) / 8 for text in body["completions"]]})
    ) as service:
        yield service


@pytest.fixture(scope="module")
def job_of(service, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    url = f"{service.url}/score"

    def make(**plan):
        return prepare(
            critic_free_config(
                folder,
                type="grpo",
                rewards=[{"url": url, "allow_private": True, "answers_per_request": 1, "cache": True}],
                num_generations=2,
                plan={**EACH, **plan},
                cluster={"devices_per_host": 2},
                total_iterations=ITERATIONS,
                snapshot_every=1,
            )
        )

    return make


@pytest.fixture(scope="module")
def undisturbed(cluster, job_of, service, tmp_path_factory):
    """(folder of a run where each rank scores what it draws, number of requests)."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    run_undisturbed(cluster, spec_of_job(cluster, job_of(), folder, ITERATIONS))
    return folder, len(service.asked)


def early_of(folder):
    return [json.loads(line)[EARLY] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_layouts_ask_early_what_they_can_and_give_the_same_metrics(cluster, job_of, undisturbed, tmp_path):
    folder = tmp_path / "run"
    job = job_of(reward_inference="0")
    run_undisturbed(cluster, spec_of_job(cluster, job, folder, ITERATIONS))
    assert early_of(undisturbed[0]) == [BATCH] * ITERATIONS
    assert early_of(folder) == [BATCH / 2] * ITERATIONS, "rank 1 draws what rank 0 scores"
    for found, expected in zip(metrics_of(folder), metrics_of(undisturbed[0]), strict=True):
        shared = found.keys() & expected.keys() - {"config_hash"}
        assert {"reward", "loss/policy"} <= shared
        assert {k: found[k] for k in shared} == pytest.approx(
            {k: expected[k] for k in shared}, rel=1e-4, abs=1e-6
        )


def test_a_killed_rank_costs_no_bit_and_what_has_a_value_is_not_asked_again(
    cluster, job_of, undisturbed, service, tmp_path
):
    folder, before = tmp_path / "run", len(service.asked)
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        client.run(failpoints.arm, "reward:kill@rank0@iter1@gen0")
        try:
            events = asyncio.run(attend(cluster, spec_of_job(cluster, job_of(), folder, ITERATIONS)))
        finally:
            client.run(failpoints.arm, "", on_error="ignore")
    assert of_type(events, Faulted)
    assert committed(events) == list(range(ITERATIONS))
    assert_same_run(folder, undisturbed[0])
    again = len(service.asked) - before - undisturbed[1]
    assert 0 <= again <= BATCH // 2, "the killed rank had all values of its samples"
