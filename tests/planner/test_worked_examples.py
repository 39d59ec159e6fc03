"""Examples worked by hand: what eight GPUs hold under a manual plan of PPO, and how many ways a call has."""

import pytest

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.mesh import Cluster, meshes
from prefect_rlhf.planner.pricing.options import candidate_meshes, strategies
from prefect_rlhf.planner.pricing.plans import plan_memory
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.rlhf_tasks.spec import ReallocateNode

# Llama-2 7B on two tp ranks: halves of all matrices, whole norms.
MATRICES_OF_A_LAYER = 4 * 4096 * 4096 + 3 * 4096 * 11008
LAYERS = 32 * (MATRICES_OF_A_LAYER // 2 + 2 * 4096) + 4096
EMBEDDING = HEAD = 32000 * 4096 // 2
ACTOR = LAYERS + EMBEDDING + HEAD  # 3,369,340,928
SCALAR = LAYERS + EMBEDDING + 4096  # a value or score from 4,096 numbers


@pytest.fixture
def manual(make_graph, assign):
    """Generation of the actor on all GPUs, its training on four, the critic on the others; ref and reward on two."""
    return build_plan(
        make_graph(n_seqs=64),
        {
            "actor_generate": assign(range(8), dp=4, tp=2),
            "actor_train": assign(range(4), dp=2, tp=2, micro_batches=4),
            "critic_inference": assign(range(4, 8), dp=2, tp=2),
            "critic_train": assign(range(4, 8), dp=2, tp=2, micro_batches=4),
            "ref_inference": assign([4, 5], tp=2),
            "reward_inference": assign([6, 7], tp=2),
        },
        Cluster(1, 8),
    )


def test_what_each_of_eight_gpus_holds_while_the_actor_generates(manual, ppo_cost):
    peaks = plan_memory(manual, ppo_cost(Cluster(1, 8))).peaks
    for gpu, peak in peaks.items():
        parts = dict(peak.parts)
        trained = parts.pop(f"{'actor' if gpu < 4 else 'critic'}: parameters, gradients, optimizer")
        # bfloat16 weights, and of gradients (4 bytes) and AdamW's state (12 bytes) the half of two dp ranks. Beyond
        # these, gradients of at most three layers, embedding or head wait to be reduced.
        count = ACTOR if gpu < 4 else SCALAR
        waiting = trained - count * (2 + (4 + 12) / 2)
        assert 0 < waiting <= 4 * (3 * (MATRICES_OF_A_LAYER // 2 + 2 * 4096) + EMBEDDING)
        assert peak.node == "actor_generate"
        assert parts.pop("actor_generate: KV cache") > 0
        residents = {4: {"ref: frozen parameters": 2 * ACTOR}, 6: {"reward: frozen parameters": 2 * SCALAR}}
        assert parts == {"actor: copy": 2 * ACTOR, **residents.get(gpu // 2 * 2, {})}
    assert list(peaks) == list(range(8))


def test_its_only_reallocation_brings_the_actor_to_all_gpus(manual):
    (node,) = [node for node in manual.nodes if isinstance(node, ReallocateNode)]
    assert (node.source.devices, node.destination.devices) == (tuple(range(4)), tuple(range(8)))
    for gpus, kinds in [
        (range(4), {"actor_generate", "actor_train", "save_actor"}),
        (range(4, 6), {"actor_generate", "critic_inference", "critic_train", "ref_inference", "save_critic"}),
        (
            range(6, 8),
            {"actor_generate", "critic_inference", "critic_train", "reward_inference", "save_critic"},
        ),
    ]:
        for gpu in gpus:
            names = {node.name for node in manual.on(gpu)}
            inserted = ("fetch", "transfer", "reallocate", "release")
            assert {name for name in names if not name.startswith(inserted)} == kinds
            assert {"reallocate_actor_to_actor_generate", "release_actor_of_actor_generate"} <= names


def test_a_call_has_870_ways_on_8_hosts_of_8_and_93_whose_tp_groups_would_cross_hosts(
    make_graph, ppo_cost, llama
):
    """By hand: 64 meshes of one device with 1 strategy, 32 of two with 3, 16 of four with 6, 8 of a host with 10, and
    of 2 to 8 whole hosts 7 x 14, 6 x 27, 5 x 18, 4 x 24, 3 x 37, 2 x 24 and 22: 963 with any tp of at most 8.

    A tp of 3, 5, 6 or 7 divides only 3, 5, 6 and 7 hosts, and some of its groups then lie on two: 6 x 7, 4 x 4, 3 x 9
    and 2 x 4 of these. They are no options. On A100s at most six of a call's would be, by their price as if all their
    links were inside a host, up to 5% faster than the best option of the same mesh.
    """
    cluster, deep = Cluster(8, 8), llama(num_hidden_layers=64, num_attention_heads=64)
    problem = Problem(make_graph(n_seqs=4096), ppo_cost(cluster, deep), max_tp=8)
    call = problem.graph.call("ref_inference")
    own = sum(len(list(strategies(problem, call, mesh.size))) for mesh in candidate_meshes(cluster))
    any_tp = sum(
        mesh.size % (tp * pp) == 0
        for mesh in meshes(cluster)
        for tp in range(1, 9)
        for pp in range(1, mesh.size // tp + 1)
        if mesh.size % tp == 0
    )
    assert (own, any_tp) == (870, 963)
    assert any_tp - own == 6 * 7 + 4 * 4 + 3 * 9 + 2 * 4
