"""Plans to drive the protocol with: a PPO-like one by hand, random ones on overlapping meshes, and some that decide
by what simulated calls measure."""

import random
from collections.abc import Iterable

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import (
    CallAssignment,
    CallKind,
    CallNode,
    Decision,
    ExecutionPlan,
    ModelFunctionCall,
    PlanNode,
    ReallocateNode,
    ReleaseNode,
    RolePlacements,
    SaveNode,
    SaveSamplesNode,
)


def on(devices: Iterable[int]) -> Placement:
    """A data-parallel placement on some devices."""
    mesh = tuple(devices)
    return Placement(mesh, ParallelStrategy(dp=len(mesh)))


def call(name: str, role: str, kind: CallKind, placement: Placement) -> CallNode:
    """A call node without data."""
    function = ModelFunctionCall(name=name, role=role, kind=kind, inputs=(), n_seqs=8)
    return CallNode(name=name, call=function, assignment=CallAssignment(placement=placement))


def plan_of(n_devices: int, trained: dict[str, Placement], nodes: Iterable[PlanNode]) -> ExecutionPlan:
    """A plan whose roles are all trained."""
    return ExecutionPlan(
        algorithm="test",
        n_devices=n_devices,
        devices_per_host=n_devices,
        n_seqs=8,
        roles={role: RolePlacements(trained=True, placements=(where,)) for role, where in trained.items()},
        nodes=tuple(nodes),
    )


def small_plan() -> ExecutionPlan:
    """Three devices: the actor generates on a copy over all and trains on 0 and 1, the critic trains on 2."""
    return placed_plan(everywhere=on([0, 1, 2]), actor=on([0, 1]), critic=on([2]))


def is_much(before: float, metrics: dict[str, float]) -> float:
    """Positive in every second case."""
    return metrics["measured"] - 0.5


def added_up(before: float, metrics: dict[str, float]) -> float:
    """Depends on all iterations before."""
    return before + metrics["measured"]


def deciding(plan: ExecutionPlan, readers: dict[str, str], stops: str, first: float) -> ExecutionPlan:
    """A plan whose calls run by what calls decide, and which ends when what one has measured adds up.

    readers  call -> the call that decides whether it runs: in the same iteration where that comes first
    stops    the call that decides when the run ends; first: minus the sum at which it does
    """
    nodes = list[PlanNode]()
    for node in plan.nodes:
        if isinstance(node, CallNode):
            made = [
                Decision(name=f"runs_{reader}", function=f"{__name__}:is_much")
                for reader, source in readers.items()
                if source == node.name
            ]
            if node.name == stops:
                made.append(Decision(name="stop", function=f"{__name__}:added_up", first=first))
            when = f"runs_{node.name}" if node.name in readers else ""
            node = node.model_copy(
                update={"call": node.call.model_copy(update={"decides": tuple(made), "when": when})}
            )
        nodes.append(node)
    nodes.sort(key=lambda node: isinstance(node, SaveNode))  # they read whether the iteration is the last
    return plan.model_copy(update={"nodes": tuple(nodes)})


def deciding_plan() -> ExecutionPlan:
    """`small_plan`, which decides whether values are computed in the next iteration, by these whether the actor is
    trained, and when it ends: in the first iteration neither happens, in the second both do, and it is the last."""
    readers = {"values": "critic_train", "actor_train": "values"}
    return deciding(small_plan(), readers, stops="critic_train", first=-1.0)


def ahead_plan(lead: int) -> ExecutionPlan:
    """`small_plan` with generation so many iterations ahead: two of the three ranks keep what it draws."""
    plan, nodes = small_plan(), list[PlanNode]()
    for node in plan.nodes:
        if isinstance(node, CallNode) and node.name == "generate":
            node = node.model_copy(update={"lead": lead, "after": ("to_generate",)})
            keep = SaveSamplesNode(name="save_samples", call="generate", placement=node.placement, lead=lead)
            nodes += [node, keep]
        else:
            nodes.append(node)
    return plan.model_copy(update={"nodes": tuple(nodes)})


def placed_plan(everywhere: Placement, actor: Placement, critic: Placement) -> ExecutionPlan:
    return plan_of(
        3,
        {"actor": actor, "critic": critic},
        [
            ReallocateNode(name="to_generate", role="actor", source=actor, destination=everywhere),
            call("generate", "actor", "generate", everywhere),
            ReleaseNode(name="release", role="actor", placement=everywhere),
            call("values", "critic", "inference", critic),
            call("actor_train", "actor", "train_step", actor),
            SaveNode(name="save_actor", role="actor", placement=actor),
            call("critic_train", "critic", "train_step", critic),
            SaveNode(name="save_critic", role="critic", placement=critic),
        ],
    )


def ppo_plan(n_ranks: int, n_seqs: int) -> ExecutionPlan:
    """PPO on hosts of eight: generation on all ranks, actor and critic each trained on one half of them."""
    config = make_config(
        {
            "type": "ppo",
            "models": {"actor": "none", "reward": "none"},
            "data": {"train": "none"},
            "sampling": {"max_completion_length": 1},
            "batch_size": n_seqs,
            "total_iterations": 1,
        }
    )
    registered = algorithm("ppo")

    def place(start: int, stop: int, tp: int) -> CallAssignment:
        strategy = ParallelStrategy(dp=(stop - start) // tp, tp=tp)
        return CallAssignment(placement=Placement(tuple(range(start, stop)), strategy))

    half = n_ranks // 2
    assignments = {
        "actor_generate": place(0, n_ranks, 2),
        "reward_inference": place(half, n_ranks, 4),
        "ref_inference": place(0, half, 4),
        "critic_inference": place(half, n_ranks, 8),
        "actor_train": place(0, half, 8),
        "critic_train": place(half, n_ranks, 8),
    }
    graph = DataflowGraph(registered.graph(config), registered.dataset_keys)
    return build_plan(graph, assignments, Cluster(n_ranks // 8, 8))


def random_plan(rng: random.Random, n_devices: int, n_nodes: int) -> ExecutionPlan:
    """Calls, copies and train steps on randomly overlapping meshes, in random order.

    Each role trains once or twice an iteration and is saved after its last train step.
    """
    mesh = lambda: on(rng.sample(range(n_devices), rng.randint(1, n_devices)))  # noqa: E731
    trained = {f"role{i}": mesh() for i in range(rng.randint(1, 3))}
    middle: list[list[PlanNode]] = []
    for role, home in trained.items():
        trains: list[PlanNode] = [
            call(f"{role}_train{i}", role, "train_step", home) for i in range(rng.randint(1, 2))
        ]
        middle.append([*trains, SaveNode(name=f"{role}_save", role=role, placement=home)])
    while sum(map(len, middle)) < n_nodes:
        role, n, where = rng.choice(list(trained)), len(middle), mesh()
        if rng.random() < 0.5 or where == trained[role]:
            middle.append([call(f"call{n}", role, "inference", trained[role])])
        else:
            middle.append(
                [
                    ReallocateNode(name=f"copy{n}", role=role, source=trained[role], destination=where),
                    call(f"on_copy{n}", role, "inference", where),
                    ReleaseNode(name=f"release{n}", role=role, placement=where),
                ]
            )
    nodes: list[PlanNode] = []
    while middle:
        chain = rng.choice(middle)
        nodes.append(chain.pop(0))
        middle = [chain for chain in middle if chain]
    return plan_of(n_devices, trained, nodes)


def random_deciding_plan(rng: random.Random, n_devices: int, n_nodes: int) -> ExecutionPlan:
    """A random plan whose calls run by random ones, themselves among them."""
    plan = random_plan(rng, n_devices, n_nodes)
    calls = [node.name for node in plan.nodes if isinstance(node, CallNode)]
    readers = {rng.choice(calls): rng.choice(calls) for _ in range(3)}
    return deciding(plan, readers, rng.choice(calls), first=-rng.uniform(0, 3))
