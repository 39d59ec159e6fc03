"""Hand-made execution plans for tests of the runtime, and what their ranks are told."""

from typing import Any

from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec
from prefect_rlhf.rlhf_tasks.spec import (
    CallAssignment,
    CallNode,
    ExecutionPlan,
    ModelFunctionCall,
    RolePlacements,
    SaveNode,
)


def on(*devices):
    return Placement(devices, ParallelStrategy(dp=len(devices)))


def call(name, role, kind, placement, after=()):
    mfc = ModelFunctionCall(name=name, role=role, kind=kind, inputs=(), n_seqs=8)
    return CallNode(name=name, call=mfc, assignment=CallAssignment(placement=placement), after=after)


def plan_of(nodes, trained, n_devices):
    roles = {role: RolePlacements(trained=True, placements=(p,)) for role, p in trained.items()}
    return ExecutionPlan(
        algorithm="fake", n_devices=n_devices, devices_per_host=n_devices, n_seqs=8, roles=roles, nodes=nodes
    )


def generation_spec(
    plan: ExecutionPlan,
    rank: int,
    config: dict[str, Any],
    folder: object,
    port: int,
    prefix: str,
    **changes: Any,
) -> GenerationSpec:
    """The first generation of a new run, whose ranks meet at a store of this machine."""
    usual: dict[str, Any] = {
        "run": "test",
        "attempt": 0,
        "generation": 0,
        "restore_step": None,
        "iterations": 3,
    }
    return GenerationSpec(
        **{**usual, **changes},
        rank=rank,
        n_ranks=plan.n_devices,
        plan=plan,
        config=config,
        run_folder=str(folder),
        store_host="127.0.0.1",
        store_port=port,
        store_prefix=prefix,
        timeout_s=240.0,
    )


def small_plan():
    """Two ranks: generation on both, then actor and critic train on one each, so that iterations overlap."""
    return trained_on(on(0), on(1))


def swapped_plan():
    """The same with actor and critic in each other's place."""
    return trained_on(on(1), on(0))


def trained_on(left, right):
    both = on(0, 1)
    nodes = (
        call("generate", "policy", "generate", both),
        call("actor_train", "actor", "train_step", left, after=("generate",)),
        SaveNode(name="save_actor", role="actor", placement=left, after=("actor_train",)),
        call("critic_train", "critic", "train_step", right, after=("generate",)),
        SaveNode(name="save_critic", role="critic", placement=right, after=("critic_train",)),
    )
    return plan_of(nodes, {"actor": left, "critic": right}, 2)
