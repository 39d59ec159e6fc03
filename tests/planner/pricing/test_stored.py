"""Bytes that ranks read and write, against the sizes of the models."""

from pathlib import Path

import pytest

import deployments
from flows.run.planning import hardware_of, problem_of, shapes_of
from flows.run.run_folder import disk_need
from planner.plan.build import build_plan
from planner.pricing.stored import loaded_bytes, saved_bytes
from planner.search.baselines import heuristic_plan
from rlhf_tasks.algorithms.configurations import load_config
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.spec import CallAssignment

EXAMPLES = Path(deployments.__file__).with_name("examples")
SEVEN_B = 6.74e9 * 2  # bytes of Llama-2 7B in bfloat16


def problem(name, *overrides):
    config = load_config(EXAMPLES / f"{name}.yaml", overrides)
    return config, problem_of(config, hardware_of(config))


@pytest.mark.parametrize("name", ["plan-ppo-7b-7b", "plan-ppo-34b-7b", "plan-ppo-70b-7b", "plan-grpo-72b"])
def test_the_parts_of_a_snapshot_add_up_to_a_commit(name):
    config, asked = problem(name)
    plan = heuristic_plan(asked.graph, asked.model).plan
    parts = saved_bytes(plan, asked.model)
    total = sum(sum(by_device.values()) for by_device in parts.values())
    need = disk_need(config, shapes_of(config), 1000, 2)
    assert total == pytest.approx(need.commit_bytes, rel=2e-3)
    assert set(parts) == {node.name for node in plan.nodes if node.name.startswith("save_")}
    for node in plan.nodes:
        if node.name in parts:
            assert set(parts[node.name]) == set(node.devices)


def everywhere(asked, n_devices, strategy):
    """A plan with all calls on all devices."""
    assignment = CallAssignment(placement=Placement(tuple(range(n_devices)), strategy))
    return build_plan(asked.graph, {call.name: assignment for call in asked.graph.calls}, asked.cluster)


@pytest.mark.parametrize("strategy", [ParallelStrategy(8), ParallelStrategy(2, 4), ParallelStrategy(1, 2, 4)])
def test_a_host_reads_each_model_once_however_it_is_laid_out(strategy):
    _, asked = problem("plan-ppo-7b-7b")
    read = loaded_bytes(everywhere(asked, 8, strategy), asked.model)
    assert set(read) == set(range(8))
    assert sum(read.values()) == pytest.approx(4 * SEVEN_B, rel=0.03)  # rewards and critics have no lm head


def test_each_host_reads_its_own():
    _, asked = problem("plan-ppo-7b-7b", "cluster.n_hosts=2")
    replicated = loaded_bytes(everywhere(asked, 16, ParallelStrategy(16)), asked.model)
    split = loaded_bytes(everywhere(asked, 16, ParallelStrategy(1, 8, 2)), asked.model)
    assert sum(replicated.values()) == pytest.approx(8 * SEVEN_B, rel=0.03)
    assert sum(split.values()) == pytest.approx(4 * SEVEN_B, rel=0.03)
