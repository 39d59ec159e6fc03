"""The engines of a rank: which roles may begin with weights that no folder has."""

import shutil
from pathlib import Path

import pytest

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import plan_device_sets
from prefect_rlhf.rlhf_tasks.rank.role_engines import RoleEngines
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.algorithms.one_rank import CPU, world_of_one
from tests.tiny_runs import ppo_config


def test_every_engine_cuts_micro_batches_as_the_configuration_says(tmp_path: Path):
    plan = dict.fromkeys(PPO_CALLS, "0")
    config = ppo_config(tmp_path, plan=plan, cluster={"devices_per_host": 1}, micro_batch_tokens=64)
    plan = prepare(config).plan
    with world_of_one():
        engines = RoleEngines(plan, config, ProcessGroups(plan_device_sets(plan), 240.0, CPU))
        placement = plan.roles["ref"].placements[0]
        assert {engines.get(role, placement).micro_batch_tokens for role in plan.roles} == {64}


@pytest.mark.parametrize(("given", "means"), [(True, "full"), (False, "none"), ("selective", "selective")])
def test_every_engine_recomputes_what_the_configuration_says(tmp_path: Path, given: bool | str, means: str):
    plan = dict.fromkeys(PPO_CALLS, "0")
    config = ppo_config(tmp_path, plan=plan, cluster={"devices_per_host": 1}, gradient_checkpointing=given)
    plan = prepare(config).plan
    with world_of_one():
        engines = RoleEngines(plan, config, ProcessGroups(plan_device_sets(plan), 240.0, CPU))
        placement = plan.roles["ref"].placements[0]
        assert {engines.get(role, placement).stage.recompute for role in plan.roles} == {means}


def test_a_language_model_may_become_a_critic_but_is_no_reward_model(tmp_path: Path):
    config = ppo_config(tmp_path, plan=dict.fromkeys(PPO_CALLS, "0"), cluster={"devices_per_host": 1})
    plan = prepare(config).plan
    with world_of_one():
        groups = ProcessGroups(plan_device_sets(plan), 240.0, CPU)
        engines = RoleEngines(plan, config, groups)
        assert {role for role, _ in engines.changing()} == {"actor", "critic"}
        shutil.rmtree(tmp_path / "reward")
        shutil.copytree(tmp_path / "actor", tmp_path / "reward")
        with pytest.raises(ValueError, match=r"reward.*score\.weight.*Name a reward model"):
            RoleEngines(plan, config, groups)
