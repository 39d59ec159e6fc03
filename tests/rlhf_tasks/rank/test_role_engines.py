"""The engines of a rank: which roles may begin with weights that no folder has."""

import shutil
from pathlib import Path

import pytest

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import plan_device_sets
from prefect_rlhf.rlhf_tasks.rank.role_engines import RoleEngines
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
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


def _foreign_groups(rank: int, world: int, config: PPOConfig, plan: ExecutionPlan) -> list[str]:
    """What the engines of rank 1 say when their functions ask for the group of both ranks."""
    groups = ProcessGroups(plan_device_sets(plan), 240.0, CPU)
    engines = RoleEngines(plan, config, groups)
    said = []
    for role in ("actor", "critic") if rank == 1 else ():
        reached = engines.get(role, plan.roles[role].placements[0]).groups
        try:
            said.append(str(reached[(0, 1)] is groups[(0, 1)]))
        except KeyError as error:
            said.append(str(error.args[0]))
    return said


@pytest.mark.dist
def test_a_call_reaches_the_groups_of_its_own_mesh_only(ranks, tmp_path: Path):
    places = dict.fromkeys(PPO_CALLS, "0-1 d2") | {"critic_inference": "1", "critic_train": "1"}
    config = ppo_config(tmp_path, plan=places, cluster={"devices_per_host": 2})
    actor, critic = ranks.run(2, _foreign_groups, config, prepare(config).plan)[1]
    assert actor == "True"
    assert critic.startswith("call critic_inference or critic_train: rank 1 has no group of devices [0, 1]")
