"""PPO with ref and reward in host memory between their calls, or with the optimizers there and actor and critic while
they are idle, gives the bits of PPO with all of them resident.

The copies here are the most awkward ones that are allowed (tests/rlhf_tasks/lazy_copies.py).
"""

import json
import shutil
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.checkpoint.journals import BEFORE
from prefect_rlhf.rlhf_tasks.data.token_file import ROWS
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.rank import role_engines
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import NodeExecutor
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, NodeResult, OffloadNode, OnloadNode
from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError
from tests import rendezvous
from tests.rlhf_tasks.lazy_copies import LazyCopier
from tests.rlhf_tasks.plans import generation_spec
from tests.rlhf_tasks.rank.test_evaluation import commit, run
from tests.rlhf_tasks.settings import DEADLINES
from tests.tiny_runs import ppo_config, write_prompts

MESH = "0-1 d2"
PLAN = {
    "actor_generate": MESH,
    "ref_inference": "0-1 t2",
    "reward_inference": "0-1 p2 m2",
    "critic_inference": "1",
    "actor_train": MESH,
    "critic_train": "0-1 p2",
}
"""The values are inferred of a copy of what an onload has brought."""
SPLIT = {
    **PLAN,
    "actor_generate": "0 m2",
    "critic_inference": "0-1 t2",
    "actor_train": "0-1 t2",
    "critic_train": "0-1 t2",
}
"""The actor generates with a copy, and the critic infers the values where it trains."""


def run_iterations(
    rank: int, world: int, plan_json: str, config: dict, folder: str
) -> tuple[list[dict], int]:
    """Metrics of three iterations as one rank saw them, node by node, and the number of copies that were started."""
    dist.destroy_process_group()
    real, copies = role_engines.copier, LazyCopier()
    role_engines.copier = lambda device: copies
    try:
        plan = ExecutionPlan.model_validate_json(plan_json)
        executor = NodeExecutor(rank, lambda part: None)
        executor.load(generation_spec(plan, rank, config, folder, rendezvous.port, rendezvous.prefix))
        seen = []
        for iteration in range(3):
            metrics: dict[str, float] = {}
            for request in (
                Sequencer(plan, "test", 0, DEADLINES).requests(iteration, in_snapshot=False).get(rank, ())
            ):
                result = executor.execute(request, plan.node(request.key.node))
                metrics.update(
                    {f"{request.key.node}/{name}": value for name, value in result.metrics.items()}
                )
            seen.append(_timeless(metrics))
        executor.close()
        return seen, copies.started
    finally:
        role_engines.copier = real


def new_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "time" not in name and "per_s" not in name}


FROZEN = ("ref_inference", "reward_inference")
TRAINED = ("actor_train", "critic_train")


def planned(folder: Path, assignments: dict, n_ranks: int, offloaded: Collection[str]):
    """(config, plan) of a run some of whose calls are offloaded."""
    places = {call: f"{place} offload" if call in offloaded else place for call, place in assignments.items()}
    config = ppo_config(folder, plan=places, cluster={"devices_per_host": n_ranks})
    prepared = prepare(config)
    prepared.rows.keep(folder)
    return config, prepared.plan


@pytest.mark.dist
@pytest.mark.parametrize(
    "assignments",
    [PLAN, pytest.param(SPLIT, marks=pytest.mark.whole)],
    ids=["replicas and stages", "tensor parallel"],
)
def test_an_offloaded_run_has_the_bits_of_a_resident_one(ranks, tmp_path, assignments):
    metrics, started = [], []
    for number, offloaded in enumerate(((), FROZEN, TRAINED)):
        config, plan = planned(tmp_path, assignments, 2, offloaded)
        roles = {node.role for node in plan.nodes if isinstance(node, OnloadNode)}
        assert roles == {call.partition("_")[0] for call in offloaded}
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        shutil.copy(tmp_path / ROWS, folder)
        arguments = plan.model_dump_json(), json.loads(config.model_dump_json()), str(folder)
        seen, copies = zip(*ranks.run(2, run_iterations, *arguments), strict=True)
        metrics.append(seen)
        started.append(copies)
    n_steps = 2 * 3 * config.num_mini_batches  # of two roles in three iterations
    assert started[0] == (0, 0)
    assert min(started[1]) > 0
    assert min(started[2]) >= 2 * n_steps + 2 * 3, (
        "the state comes in every step and goes back, parameters come once"
    )
    assert metrics[0] == metrics[1] == metrics[2]
    losses = [seen["critic_train/loss/value"] for seen in metrics[0][0]]
    assert len(set(losses)) == 3


def test_parameters_are_on_the_device_only_from_the_onload_to_the_offload(tmp_path):
    """Those of the critic: nothing but the plan's nodes brings them."""
    config, plan = planned(tmp_path, dict.fromkeys(PLAN, "0"), 1, TRAINED)
    store, executor = new_store(), NodeExecutor(0, lambda part: None)
    executor.load(
        generation_spec(plan, 0, json.loads(config.model_dump_json()), str(tmp_path), store.port, "held")
    )
    engines = executor._run._engines
    (critic,) = (engine for role, engine in engines.changing() if role == "critic")
    elements = sum(piece.tensor.numel() for piece in critic.master.shard_state() if piece.kind == "master")
    there, freed = False, []
    for iteration in range(2):
        for request in Sequencer(plan, "test", 0, DEADLINES).requests(iteration, in_snapshot=False)[0]:
            name = request.key.node
            assert critic.master.weights.numel() == (elements if there else 0), f"before {name}"
            assert all(bool(parameter.numel()) == there for parameter in critic.stage.parameters()), (
                f"before {name}"
            )
            weights = weakref.ref(critic.master.weights)
            executor.execute(request, plan.node(name))
            there = (there or name.startswith("onload_critic")) and not name.startswith("offload_critic")
            if name.startswith("offload_critic"):
                freed.append(weights() is None)
    assert freed == [True, True]
    assert not there
    executor.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": {"every": 1, "on_start": True, "temperature": 1.0}},
        pytest.param({"lora": {"rank": 4, "alpha": 8.0}}, marks=pytest.mark.whole),
        pytest.param({"sync_ref_model": True, "ref_model_sync_steps": 1}, marks=pytest.mark.whole),
    ],
    ids=["evaluated", "adapters", "followed"],
)
def test_a_run_that_is_resumed_at_a_commit_has_the_bits_of_one_that_was_resident_all_along(tmp_path, changes):
    """Evaluations, before the first iteration too, and a reference that follows read what comes and goes."""
    if "evaluation" in changes:
        held_out = str(write_prompts(tmp_path / "held_out.jsonl", 3))
        changes = {"evaluation": {**changes["evaluation"], "data": held_out}}
    seen = []
    for offload in (False, True):
        places = {call: "0 offload" if offload and call in TRAINED else "0" for call in PLAN}
        config = ppo_config(
            tmp_path, plan=places, cluster={"devices_per_host": 1}, total_iterations=4, **changes
        )
        prepared, folder = prepare(config), tmp_path / f"offload-{offload}"
        folder.mkdir()
        prepared.keep_rows(folder)
        if offload:
            results, parts = run(prepared, folder, range(2))
            commit(prepared, folder, 2, results, parts)
            results |= run(prepared, folder, range(2, 4))[0]
        else:
            results, _ = run(prepared, folder, range(4))
        seen.append({t: _told(nodes) for t, nodes in results.items()})
    assert seen[0] == seen[1]
    assert len({nodes["critic_train"]["loss/value"] for nodes in seen[0].values()}) == 4


def _told(nodes: Mapping[str, Mapping[int, NodeResult]]) -> dict[str, dict]:
    """What the nodes of an iteration have told that both plans have."""
    found = {}
    for name, ranks in nodes.items():
        if not name.startswith(("onload", "offload")):
            found[name] = {**_timeless(ranks[0].metrics), **_timeless(ranks[0].details.get(BEFORE, {}))}
    return found


def test_where_a_stored_plan_has_no_onload_parameters_stay(tmp_path):
    """A run that began when train_steps offloaded the optimizer alone continues by its plan."""
    config, plan = planned(tmp_path, dict.fromkeys(PLAN, "0"), 1, TRAINED)
    moved = {node.name for node in plan.nodes if isinstance(node, OnloadNode | OffloadNode)}
    kept = [
        node.model_copy(update={"after": tuple(name for name in node.after if name not in moved)})
        for node in plan.nodes
        if node.name not in moved
    ]
    losses = []
    for number, given in enumerate((plan, plan.model_copy(update={"nodes": tuple(kept)}))):
        store, executor = new_store(), NodeExecutor(0, lambda part: None)
        document = json.loads(config.model_dump_json())
        executor.load(generation_spec(given, 0, document, str(tmp_path), store.port, f"plan {number}"))
        for request in Sequencer(given, "test", 0, DEADLINES).requests(0, in_snapshot=False)[0]:
            result = executor.execute(request, given.node(request.key.node))
            if request.key.node == "critic_train":
                losses.append(_timeless(result.metrics))
        executor.close()
    assert len(moved) == 4
    assert losses[0] == losses[1]


def test_a_generation_ends_while_a_copy_runs_and_the_next_one_begins_anew(tmp_path):
    config, plan = planned(tmp_path, dict.fromkeys(PLAN, "0"), 1, FROZEN + TRAINED)
    store = new_store()
    executor, losses = NodeExecutor(0, lambda part: None), []
    for n in range(3):
        document = json.loads(config.model_dump_json())
        executor.load(generation_spec(plan, 0, document, str(tmp_path), store.port, f"generation {n}"))
        for request in Sequencer(plan, "test", 0, DEADLINES).requests(0, in_snapshot=False)[0]:
            node = plan.node(request.key.node)
            metrics = executor.execute(request, node).metrics
            if node.name == "critic_train":
                losses.append(metrics)
            if n == 1 and isinstance(node, OnloadNode):
                executor.abort()
                break
        executor.close()
    assert len(losses) == 2
    assert _timeless(losses[0]) == _timeless(losses[1])


@pytest.mark.parametrize(
    ("offloaded", "readers"),
    [(FROZEN, ("ref_inference", "reward_inference")), (("critic_train",), ("critic_inference",))],
)
def test_a_model_is_refused_while_it_is_offloaded(tmp_path, offloaded, readers):
    """With onloads left out, the first call that needs one says so."""
    config, plan = planned(tmp_path, dict.fromkeys(PLAN, "0"), 1, offloaded)
    store = new_store()
    executor = NodeExecutor(0, lambda part: None)
    document = json.loads(config.model_dump_json())
    executor.load(generation_spec(plan, 0, document, str(tmp_path), store.port, "refused"))
    requests = Sequencer(plan, "test", 0, DEADLINES).requests(0, in_snapshot=False)[0]
    names = [request.key.node for request in requests if not request.key.node.startswith("onload")]
    scored = next(i for i, name in enumerate(names) if name in readers)
    by_name = {request.key.node: request for request in requests}
    for name in names[:scored]:
        executor.execute(by_name[name], plan.node(name))
    with pytest.raises(InvariantError, match=r"role '\w+' on .* is offloaded: onload it first"):
        executor.execute(by_name[names[scored]], plan.node(names[scored]))
    executor.close()
