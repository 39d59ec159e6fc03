"""What a rank refuses because the plan says otherwise: a check that is left out is red here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.rank import role_engines
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import NodeExecutor, plan_device_sets
from prefect_rlhf.rlhf_tasks.rank.role_engines import RoleEngines
from prefect_rlhf.rlhf_tasks.spec import ReallocateNode
from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.algorithms.one_rank import CPU, world_of_one
from tests.rlhf_tasks.plans import generation_spec
from tests.rlhf_tasks.settings import DEADLINES
from tests.tiny_runs import ppo_config, write_prompts


def on_one_device(folder: Path):
    """(configuration, plan) of PPO with all calls on device 0."""
    places = dict.fromkeys(PPO_CALLS, "0")
    config = ppo_config(folder, plan=places, cluster={"devices_per_host": 1})
    prepared = prepare(config)
    prepared.rows.keep(folder)
    return config, prepared.plan


@pytest.fixture
def engines(tmp_path):
    """The engines of PPO on one device, with the actor's placement."""
    config, plan = on_one_device(tmp_path)
    with world_of_one():
        yield RoleEngines(plan, config, ProcessGroups(plan_device_sets(plan), 240.0, CPU)), plan


def test_a_call_is_refused_where_the_engine_has_another_version(tmp_path):
    """Between two train calls a request says one version more than the engine has."""
    config, plan = on_one_device(tmp_path)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    executor = NodeExecutor(0, lambda part: None)
    document = json.loads(config.model_dump_json())
    executor.load(generation_spec(plan, 0, document, str(tmp_path), store.port, "versions"))
    fetch, generate = (
        next(
            r
            for r in Sequencer(plan, "test", 0, DEADLINES).requests(0, in_snapshot=False)[0]
            if r.key.node == name
        )
        for name in ("fetch", "actor_generate")
    )
    executor.execute(fetch, plan.node("fetch"))
    later = replace(generate, versions={**generate.versions, "actor": 1})
    with pytest.raises(InvariantError, match="actor_generate: actor has version 0, the plan says 1"):
        executor.execute(later, plan.node("actor_generate"))
    executor.execute(generate, plan.node("actor_generate"))
    executor.close()


def test_an_evaluation_is_refused_of_another_version(tmp_path):
    """It is due after the first iteration, whose train_step has not run."""
    held_out = str(write_prompts(tmp_path / "held_out.jsonl", 3))
    one = {"devices_per_host": 1}
    config = ppo_config(tmp_path, total_iterations=1, evaluation={"data": held_out}, cluster=one)
    prepared = prepare(config)
    plan = prepared.plan
    prepared.keep_rows(tmp_path)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    executor = NodeExecutor(0, lambda part: None)
    document = json.loads(prepared.config.model_dump_json())
    executor.load(generation_spec(plan, 0, document, str(tmp_path), store.port, "evaluated"))
    (request,) = (
        r
        for r in Sequencer(plan, "test", 0, DEADLINES).requests(0, in_snapshot=False)[0]
        if r.key.node == "evaluate_actor"
    )
    with pytest.raises(InvariantError, match="evaluate_actor: actor has version 0, the plan says 1"):
        executor.execute(request, plan.node("evaluate_actor"))
    executor.close()


def test_a_copy_is_made_of_the_version_that_the_plan_says(engines):
    held, plan = engines
    here = plan.roles["actor"].placements[0]
    node = ReallocateNode(
        name="reallocate_actor_to_here",
        after=(),
        after_previous=(),
        role="actor",
        source=here,
        destination=here,
    )
    with pytest.raises(InvariantError, match="the source has version 0, the plan says 3"):
        held.reallocate(node, 3)


def test_what_arrives_has_the_version_that_the_plan_says(engines, monkeypatch):
    held, plan = engines
    here = plan.roles["actor"].placements[0]
    sent = role_engines.reallocate
    monkeypatch.setattr(
        role_engines, "reallocate", lambda *given, **named: sent(*given, **{**named, "version": 2})
    )
    node = ReallocateNode(
        name="reallocate_actor_to_here",
        after=(),
        after_previous=(),
        role="actor",
        source=here,
        destination=here,
    )
    with pytest.raises(InvariantError, match="version 2 was received, the plan says 0"):
        held.reallocate(node, 0)


def test_a_run_begins_with_a_decided_dtype(tmp_path):
    config, plan = on_one_device(tmp_path)
    undecided = config.model_copy(update={"dtype": "auto"})
    with world_of_one(), pytest.raises(InvariantError, match="dtype is auto: it must be decided"):
        RoleEngines(plan, undecided, ProcessGroups(plan_device_sets(plan), 240.0, CPU))


def test_a_role_is_found_only_where_the_plan_has_put_it(engines):
    held, plan = engines
    elsewhere = Placement(devices=(1,), strategy=plan.roles["actor"].placements[0].strategy)
    with pytest.raises(InvariantError, match="role 'actor' has never been on"):
        held.get("actor", elsewhere)


def test_a_trained_role_is_never_released(engines):
    held, plan = engines
    with pytest.raises(InvariantError, match=r"role 'actor' on .* is trained: it is not a copy"):
        held.release("actor", plan.roles["actor"].placements[0])


def test_a_released_copy_is_gone(engines):
    held, plan = engines
    here = plan.roles["ref"].placements[0]
    held.release("ref", here)
    with pytest.raises(InvariantError, match=r"the copy of role 'ref' on .* was released"):
        held.get("ref", here)
