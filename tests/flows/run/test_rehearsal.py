"""What a rehearsal makes of a plan's price."""

from pathlib import Path
from typing import Any

import pytest

from flows.run.planning import figures_of, hardware_of, problem_of
from flows.run.prepare import make_plan
from flows.run.rehearsal import ITERATION_CPU_S, NODE_CPU_S, Rehearsable, priced, rehearsed
from planner.pricing.plans import price_plan
from planner.pricing.run_history import RanCall, keep_figures
from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.config.base import TrainingConfig
from rlhf_tasks.rehearsal.costs import Machines
from rlhf_tasks.spec import CallNode
from tests.flows.plan_documents import ppo

CORES = 2


def rehearsable(**changes: Any) -> Rehearsable:
    config = make_config(ppo(total_iterations=40, **changes))
    assert isinstance(config, TrainingConfig)
    hardware = hardware_of(config)
    problem = problem_of(config, hardware)
    plan = make_plan(config, problem)
    return priced(config, hardware, problem, plan, price_plan(plan, problem.model), CORES)


def iteration_s(run: Rehearsable) -> float:
    found = rehearsed(run, hours=24.0, machines=Machines(), noise=0.0, seed=0, leaps=False)
    first, last = found.story.commits[0], found.story.commits[-1]
    return (last.at_s - first.at_s) / (last.step - first.step)


def test_on_cpus_the_runs_own_processes_take_their_seconds_from_the_ranks_cores():
    run = rehearsable()
    own_s = (ITERATION_CPU_S + NODE_CPU_S * len(run.plan.nodes)) / CORES
    assert iteration_s(run) == pytest.approx(run.price.iteration_time_s + own_s, rel=1e-3)


def test_on_gpus_they_have_cores_of_their_own():
    run = rehearsable(planning={"device": "h100-sxm", "prompt_tokens": 16})
    assert iteration_s(run) == pytest.approx(run.price.iteration_time_s, rel=1e-3)


def test_calls_that_figures_of_runs_correct_have_that_time_in_their_price(tmp_path: Path):
    """What a run measured, it measured beside its own processes."""
    before = rehearsable(output_dir=str(tmp_path))
    calls = [node for node in before.plan.nodes if isinstance(node, CallNode)]
    ran = [RanCall(call=node.name, assignment=node.assignment, seconds=0.3) for node in calls]
    keep_figures(figures_of(before.config, before.problem), ran)
    after = rehearsable(output_dir=str(tmp_path))
    assert after.price.iteration_time_s > 0.3
    assert iteration_s(after) == pytest.approx(after.price.iteration_time_s, rel=0.01)
