"""The profile flow on two real ranks: its file is found again and prices the run's plan."""

import asyncio

import pytest

from prefect_rlhf.flows.plan import rlhf_profile
from prefect_rlhf.flows.run.planning import hardware_of, problem_of, profile_folder
from prefect_rlhf.flows.run.prepare import make_plan
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.figures import read_profiles
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.rlhf_tasks.profiling.measurements import Grid
from tests.tiny_runs import ppo_config

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]


def test_a_measured_profile_prices_the_plan_of_its_run(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.plan.grid_of", lambda *_: Grid((16, 64), (8, 16), (1, 4), (8,)))
    place = {"address": cluster.scheduler_address, "devices_per_host": 2}
    config = ppo_config(tmp_path, cluster=place, planning={"prompt_tokens": 12})
    for weights in tmp_path.glob("*/model.safetensors"):
        weights.unlink()
    analytic = problem_of(config, hardware_of(config)).model
    (file,) = asyncio.run(rlhf_profile(config))
    (profile,) = read_profiles(profile_folder(config) / file.rsplit("/", 1)[-1])
    assert profile.model == analytic.models["actor"].shape
    assert {(o.operation, o.tp) for o in profile.operations} >= {
        (operation, tp)
        for operation in (
            "layer/forward",
            "layer/backward",
            "layer/prefill",
            "layer/decode",
            "scalar/backward",
        )
        for tp in (1, 2)
    }
    assert {e.kind for e in profile.exchanges} == {
        "all_reduce", "all_gather", "reduce_scatter", "send", "share", "redistribute",
    }  # fmt: skip
    assert profile.dispatch_s > 0
    assert profile.process_bytes > 50e6
    problem = problem_of(config, hardware_of(config))
    measured = problem.model
    assert measured.classes.dispatch_s == profile.dispatch_s
    plan = make_plan(config, problem)
    prices = [price_plan(plan, model).iteration_time_s for model in (analytic, measured)]
    assert prices[0] != prices[1] > 0
    assert isinstance(measured, CostModel)
