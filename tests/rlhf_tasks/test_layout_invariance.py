"""Any plan gives the same losses: three iterations of all calls, under plans that differ in everything.

The ranks run the product's own executor; only the runtime around it is replaced by a loop in plan order.
"""

import json
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.protocol.decisions import Decisions
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import NodeExecutor
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, NodeKey, NodeResult, PlanNode
from prefect_rlhf.rlhf_tasks.system.durable import replace_file
from tests import rendezvous
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.plans import generation_spec
from tests.rlhf_tasks.settings import DEADLINES
from tests.tiny_runs import learning_config, ppo_config, write_model

ALONE = "0"
OWN = "calls on meshes and strategies of their own"
PLANS = {
    "one rank": (1, dict.fromkeys(PPO_CALLS, ALONE)),
    OWN: (
        4,
        {
            "actor_generate": "0-1 t2",
            "ref_inference": "0-1 p2 m2",
            "reward_inference": "2",
            "critic_inference": "3",
            "actor_train": "0-1 d2",
            "critic_train": "2-3 p2 m4",
        },
    ),
    "one mesh, dealt by prompts to generate and by whole sequences to learn": (
        2,
        dict.fromkeys(PPO_CALLS, "0-1 d2 tokens"),
    ),
    "overlapping meshes, balanced by tokens": (
        4,
        {
            "actor_generate": "0-3 t2 p2",
            "ref_inference": "2-3 d2 tokens",
            "reward_inference": "0-3 d4",
            "critic_inference": "0-1 t2 m3",
            "actor_train": "0-3 d2 t2 tokens offload",
            "critic_train": "0-3 d4 m2 offload",
        },
    ),
}

FROZEN_AND_TRAINED = {
    "one rank": (1, {"frozen": ALONE, "actor_train": ALONE}),
    "a mesh for each": (2, {"frozen": "0", "actor_train": "1 m3"}),
    "one mesh, balanced by tokens": (
        2,
        dict.fromkeys(("frozen", "actor_train"), "0-1 d2 tokens"),
    ),
    "overlapping meshes": (
        4,
        {
            "frozen": "2-3 p2 m2",
            "actor_train": "0-3 d2 t2 m2",
        },
    ),
}
"""Plans of algorithms with one call of a frozen model and one that trains."""
ONE_BASE = {"actor": "actor", "critic": "actor", "reward": "reward"}
"""Role -> folder: actor and critic have adapters on one model."""
FOLLOWS_ALONE = {"ref_inference": ALONE, "actor_train": ALONE}


def other_plans(plans: dict) -> pytest.MarkDecorator:
    """`names` of the plans that are compared with that of one rank. The default suite leaves out `OWN`: there PPO
    without more is tested with it."""
    _, *others = plans
    others.remove(OWN)
    return pytest.mark.parametrize(
        "names", [others, pytest.param([OWN], marks=pytest.mark.slow)], ids=["shared meshes", "own meshes"]
    )


def run_iterations(rank: int, world: int, plan_json: str, config: dict, folder: str) -> list[dict]:
    """Metrics of three iterations as one rank saw them, node by node."""
    dist.destroy_process_group()
    plan = ExecutionPlan.model_validate_json(plan_json)
    executor = NodeExecutor(rank, lambda part: None)
    executor.load(generation_spec(plan, rank, config, folder, rendezvous.port, rendezvous.prefix))
    for role, engine in executor._run._engines.changing():
        has_shares = engine.layout.placement.strategy.weight_shares > 1
        assert (engine.stage.shares is not None) == has_shares, role
    seen = []
    sequencer, decisions = Sequencer(plan, "test", 0, DEADLINES), Decisions(plan)
    for iteration in range(3):
        metrics: dict[str, float] = {}
        for request in sequencer.requests(iteration, in_snapshot=iteration == 2).get(rank, ()):
            node = plan.node(request.key.node)
            if node.name in decisions.readers:
                request = replace(request, decided=awaited(decisions, iteration, node, Path(folder)))
            result = executor.execute(request, node)
            if node.name in decisions.made_after:
                replace_file(Path(folder, f"{iteration} {node.name}"), json.dumps(result.metrics))
            metrics.update({f"{request.key.node}/{name}": value for name, value in result.metrics.items()})
        seen.append(metrics)
    executor._run._writer.close()  # when all parts are written
    executor.close()
    return seen


def awaited(decisions: Decisions, iteration: int, node: PlanNode, folder: Path) -> dict[str, float]:
    """What a node reads, as the controller would send it: other ranks write their calls' metrics into the folder."""
    made, deadline = set(), time.monotonic() + 60
    while (values := decisions.values(iteration, node.name)) is None:
        assert time.monotonic() < deadline, f"{node.name} waits for a decision"
        for name in decisions.made_after:
            if name not in made and (path := folder / f"{iteration} {name}").exists():
                made.add(name)
                key = NodeKey("test", 0, 0, iteration, name)
                metrics = json.loads(path.read_text())
                decisions.make(
                    iteration, name, NodeResult(key=key, rank=0, started_s=0, ended_s=0, metrics=metrics)
                )
        time.sleep(0.01)
    return values


def trajectory(
    ranks, tmp_path: Path, n_ranks: int, assignments: dict, make_config=ppo_config
) -> list[dict[str, float]]:
    config = make_config(
        tmp_path,
        dtype="float64",
        plan=assignments,
        cluster={"devices_per_host": n_ranks},
    )
    prepared = prepare(config)
    plan = prepared.plan
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    prepared.rows.keep(folder)
    per_rank = ranks.run(
        n_ranks,
        run_iterations,
        plan.model_dump_json(),
        json.loads(config.model_dump_json()),
        str(folder),
    )
    merged = []
    for iteration in range(3):
        metrics: dict[str, float] = {}
        for seen in per_rank:
            for metric, value in seen[iteration].items():
                assert metrics.setdefault(metric, value) == value, f"ranks disagree on {metric}"
        merged.append({m: v for m, v in metrics.items() if "time" not in m and not m.endswith("_s")})
    return merged


def differences(reference: list[dict[str, float]], other: list[dict[str, float]]) -> list[str]:
    """Every metric that is not equal to a relative 1e-9, with both values."""
    return [
        f"iteration {t} {name}: {expected!r} and {found.get(name)!r}"
        for t, (wanted, found) in enumerate(zip(reference, other, strict=True))
        for name, expected in wanted.items()
        if found.get(name) != pytest.approx(expected, rel=1e-9, abs=1e-11)
    ]


@pytest.mark.dist
def test_the_same_seed_gives_the_same_losses_under_any_plan(ranks, tmp_path):
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"])
    assert reference[2]["actor_train/loss/policy"] != reference[0]["actor_train/loss/policy"]
    for name in list(PLANS)[1:]:
        assert not differences(reference, trajectory(ranks, tmp_path, *PLANS[name])), name


@pytest.mark.dist
def test_sharded_weights_give_the_same_bits(ranks, tmp_path):
    """As whole ones on the same ranks: of roles that train, frozen ones, copies, and where host memory keeps them."""

    def losses(sharded: str, strategies: tuple[str, str] = ("d2 t2", "d4")) -> list[dict[str, float]]:
        of_actor, of_critic = strategies
        calls = {
            "actor_generate": "0-3 d2 t2",
            "ref_inference": f"2-3 d2 m2 {sharded}",
            "reward_inference": f"0-1 d2 offload {sharded}",
            "critic_inference": f"1,0 d2 {sharded}",
            "actor_train": f"0-3 {of_actor} tokens {sharded}",
            "critic_train": f"0-3 {of_critic} m2 offload {sharded}",
        }
        return trajectory(ranks, tmp_path, 4, calls)

    alone = trajectory(ranks, tmp_path, *PLANS["one rank"])
    sharded = losses("sharded")
    assert sharded == losses("")
    assert not differences(alone, sharded)
    # Ranks that divide tokens have shares, too.
    assert not differences(alone, losses("sharded", ("d2 c2", "c4")))


@pytest.mark.dist
@pytest.mark.whole
def test_sharded_weights_below_adapters_and_under_a_reference_that_follows(ranks, tmp_path):
    calls = dict.fromkeys(PPO_CALLS, "0-1 d2 sharded") | {"actor_generate": "0-1 d2"}
    lora = {"lora": {"rank": 4, "alpha": 8.0}}
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    places = {role: str(tmp_path / folder) for role, folder in ONE_BASE.items()}
    for changes in (lora, follows, {**lora, "models": places}):
        config = partial(ppo_config, **changes)
        reference = trajectory(ranks, tmp_path, *PLANS["one rank"], config)
        assert not differences(reference, trajectory(ranks, tmp_path, 2, calls, config)), changes


@pytest.mark.dist
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in list(PLANS)[1:-1]),
        pytest.param(list(PLANS)[-1], marks=pytest.mark.whole),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"lora": {"rank": 4, "alpha": 8.0}}, marks=pytest.mark.slow)],
    ids=["whole", "adapters"],
)
def test_so_do_mixtures_of_experts(ranks, tmp_path, name, changes):
    """An actor whose experts are split in other ways to generate and to learn. Adapters are on q, k, v and o."""
    ppo_config(tmp_path)
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 18}
    write_model(tmp_path / "actor", family="qwen3_moe", **experts)
    config = partial(ppo_config, **changes)
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"], config)
    assert len({seen["actor_train/loss/policy"] for seen in reference}) == 3
    assert not differences(reference, trajectory(ranks, tmp_path, *PLANS[name], config))


@pytest.mark.dist
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("kto", marks=pytest.mark.whole),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "distillation")),
    ],
)
def test_so_do_algorithms_that_learn_against_a_frozen_model(ranks, tmp_path, kind):
    frozen = "teacher_inference" if kind == "distillation" else "ref_inference"

    def losses(name: str) -> list[dict[str, float]]:
        n_ranks, given = FROZEN_AND_TRAINED[name]
        assignments = {frozen if call == "frozen" else call: where for call, where in given.items()}
        if kind == "distillation":
            assignments["actor_generate"] = "0-1 t2" if n_ranks > 1 else ALONE
        return trajectory(ranks, tmp_path, n_ranks, assignments, partial(learning_config, kind=kind))

    reference = losses("one rank")
    loss = f"actor_train/loss/{kind}"
    assert len({metrics[loss] for metrics in reference}) == 3
    for name in list(FROZEN_AND_TRAINED)[1:]:
        assert not differences(reference, losses(name)), name


def masters(folder: Path, step: int, role: str) -> dict[str, Tensor]:
    """Parameter -> the master weights of a role as a step has them, in a run of one rank."""
    (saved,) = folder.glob(f"*/step-{step:08d}.tmp-0/{role}.*.safetensors")
    with safe_open(saved, "pt") as file:
        named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert role == "actor" or all("master" in name for name in named), "no moments"
    return {name: tensor for name, tensor in named.items() if "master" in name}


@pytest.mark.dist
@pytest.mark.parametrize(
    "kind", [pytest.param("kto", marks=pytest.mark.whole), pytest.param("dpo", marks=pytest.mark.slow)]
)
def test_a_reference_that_follows_the_actor_is_the_same_under_any_plan(ranks, tmp_path, kind):
    """It changes in the first two of three iterations' ends; that of the last nobody reads."""

    def losses(name: str, folder: Path, **changes) -> list[dict[str, float]]:
        n_ranks, given = FROZEN_AND_TRAINED[name]
        assignments = {"ref_inference" if call == "frozen" else call: at for call, at in given.items()}
        follows = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3, **changes}
        return trajectory(ranks, folder, n_ranks, assignments, partial(learning_config, kind=kind, **follows))

    folders = {name: tmp_path / name.replace(" ", "-") for name in (*FROZEN_AND_TRAINED, "frozen", "rare")}
    for folder in folders.values():
        folder.mkdir()
    reference = losses("one rank", folders["one rank"])
    loss = f"actor_train/loss/{kind}"
    frozen = losses("one rank", folders["frozen"], sync_ref_model=False)
    rare = losses("one rank", folders["rare"], ref_model_sync_steps=2)
    assert [a[loss] == b[loss] for a, b in zip(reference, frozen, strict=True)] == [True, False, False]
    assert [a[loss] == b[loss] for a, b in zip(rare, frozen, strict=True)] == [True, True, False]
    before, after = (masters(folders["rare"], step, "ref") for step in (0, 3))
    assert any(not weights.equal(after[name]) for name, weights in before.items())
    for name in list(FROZEN_AND_TRAINED)[1:]:
        assert not differences(reference, losses(name, folders[name])), name


@pytest.mark.dist
def test_the_reference_becomes_the_share_that_it_is_told_of_the_actor_and_of_itself(ranks, tmp_path):
    """ref <- 0.3 actor + 0.7 ref, after the last of three iterations alone: from what the steps hold."""
    config = partial(
        learning_config, kind="kto", sync_ref_model=True, ref_model_sync_steps=3, ref_model_mixup_alpha=0.3
    )
    trajectory(ranks, tmp_path, *FROZEN_AND_TRAINED["one rank"][:1], FOLLOWS_ALONE, config)
    start, ref = masters(tmp_path, 0, "ref"), masters(tmp_path, 3, "ref")
    actor = masters(tmp_path, 3, "actor")
    assert ref.keys() == actor.keys()
    for name, weights in ref.items():
        assert not weights.equal(start[name])
        wanted = 0.3 * actor[name] + 0.7 * start[name]
        assert weights.tolist() == pytest.approx(wanted.tolist(), rel=1e-14, abs=1e-16), name


@pytest.mark.dist
@pytest.mark.parametrize("name", [pytest.param(OTHER, marks=pytest.mark.slow) for OTHER in list(PLANS)[1:]])
def test_so_is_that_of_ppo(ranks, tmp_path, name):
    follows = partial(ppo_config, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"], follows)
    assert not differences(reference, trajectory(ranks, tmp_path, *PLANS[name], follows))


_, *OTHERS = PLANS


@pytest.mark.dist
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS[:-1]), OTHERS[-1]]
)
@pytest.mark.whole
def test_adapters_train_alike_under_any_plan_and_are_all_that_is_saved(ranks, tmp_path, name):
    """Actor and critic have adapters. On one rank they share their weights with reference and reward model."""
    adapted = partial(ppo_config, lora={"rank": 4, "alpha": 8.0}, optimizer={"learning_rate": 1e-2})
    reference = trajectory(ranks, tmp_path, *PLANS["one rank"], adapted)
    kl = [seen["actor_train/kl"] for seen in reference]
    assert kl[0] == pytest.approx(0, abs=1e-12)
    assert kl[2] > 1e-4, "the reference has not the adapters"
    (saved,) = tmp_path.glob("*/step-00000003.tmp-0/actor.*.safetensors")
    with safe_open(saved, "pt") as file:
        names = list(file.keys())
    assert len(names) == 3 * 2 * 7 * 2, "master weights and moments of A and B of seven modules in two layers"
    assert all("lora_" in name for name in names)
    assert not differences(reference, trajectory(ranks, tmp_path, *PLANS[name], adapted))
