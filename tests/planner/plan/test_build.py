"""Which nodes a plan inserts, and that its order and edges are right."""

from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.planner.plan.build import PlanError, build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster, meshes
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import mini_batch_blocks, partition
from prefect_rlhf.rlhf_tasks.spec import (
    CallAssignment,
    CallNode,
    ExecutionPlan,
    FetchNode,
    ModelFunctionCall,
    OffloadNode,
    OnloadNode,
    ReallocateNode,
    ReleaseNode,
    SaveNode,
    TransferNode,
)


def names(plan: ExecutionPlan, kind: type) -> list[str]:
    return [node.name for node in plan.nodes if isinstance(node, kind)]


@pytest.fixture
def all_alike(make_graph, assign):
    """Every call on the same placement."""
    graph = make_graph()
    return build_plan(
        graph, dict.fromkeys((c.name for c in graph.calls), assign([0, 1], dp=2)), Cluster(1, 2)
    )


def test_nothing_moves_where_all_placements_are_equal(all_alike):
    assert (
        names(all_alike, TransferNode)
        == names(all_alike, ReallocateNode)
        == names(all_alike, ReleaseNode)
        == []
    )
    assert names(all_alike, FetchNode) == ["fetch"]
    assert names(all_alike, SaveNode) == ["save_actor", "save_critic"]
    assert all(len(role.placements) == 1 for role in all_alike.roles.values())


def test_demo_plan_moves_everything(demo_plan):
    assert set(names(demo_plan, ReallocateNode)) == {
        "reallocate_actor_to_actor_generate",
        "reallocate_critic_to_critic_inference",
    }
    assert set(names(demo_plan, ReleaseNode)) == {
        "release_actor_of_actor_generate",
        "release_critic_of_critic_inference",
    }
    strategies = {
        kind: {
            node.placement.strategy
            for node in demo_plan.nodes
            if isinstance(node, CallNode) and node.call.kind == kind
        }
        for kind in ("generate", "inference", "train_step")
    }
    assert all(len(set.union(*pair)) > 1 for pair in combinations(strategies.values(), 2))
    assert not set(demo_plan.node("actor_train").devices) & set(demo_plan.node("critic_train").devices)


def test_demo_plan_generates_beside_the_critic_training_of_the_iteration_before(demo_plan):
    """Neither edges nor the order on its devices make the generation of t+1 wait for critic_train of t."""
    graph = executed(demo_plan, 2)
    assert (0, "critic_train") not in nx.ancestors(graph, (1, "actor_generate"))
    assert (0, "actor_train") in nx.ancestors(graph, (1, "actor_generate"))
    assert not nx.has_path(graph, (0, "actor_train"), (0, "critic_train"))
    assert not nx.has_path(graph, (0, "critic_train"), (0, "actor_train"))


def test_keys_move_once_per_destination_and_by_source(demo_plan):
    transfers = {node.name: node for node in demo_plan.nodes if isinstance(node, TransferNode)}
    # actor_generate (tp 2) and ref_inference (pp 2) have different heads; both feed actor_train (dp 2)
    assert transfers["transfer_actor_generate_to_ref_inference"].keys == ("input_ids", "response_mask")
    assert transfers["transfer_actor_generate_to_reward_inference"].keys == (
        "input_ids",
        "response_mask",
        "truncated",
        "columns",
    )
    arrived = [key for t in transfers.values() if t.consumer == "actor_train" for key in t.keys]
    assert sorted(arrived) == sorted(demo_plan.node("actor_train").call.inputs)
    assert transfers["transfer_actor_generate_to_actor_train"].destination.mini_batches == 2


def test_a_second_reader_at_the_same_place_reuses_what_came(make_graph, assign):
    """ref and reward on one mesh: input_ids come once, for the first of them."""
    graph = make_graph()
    home, away = assign([0]), assign([1])
    places = {c.name: away if c.name in ("ref_inference", "reward_inference") else home for c in graph.calls}
    plan = build_plan(graph, places, Cluster(1, 2))
    to_away = [
        n for n in plan.nodes if isinstance(n, TransferNode) and n.destination.placement == away.placement
    ]
    assert sorted(key for node in to_away for key in node.keys) == [
        "columns",
        "input_ids",
        "response_mask",
        "truncated",
    ]
    assert len(to_away) == 1
    # both outputs come home in one transfer, shared by both trainings
    back = [
        n for n in plan.nodes if isinstance(n, TransferNode) and n.destination.placement == home.placement
    ]
    assert [node.keys for node in back] == [("ref_logprobs", "scores")]


def test_equal_heads_need_no_transfer(make_graph, assign):
    """tp 2 and tp 4 with one dp rank have the same head: the samples are there already."""
    graph = make_graph()
    places = dict.fromkeys((c.name for c in graph.calls), assign([0, 1, 2, 3], tp=4))
    places["ref_inference"] = assign([0, 1], tp=2)
    plan = build_plan(graph, places, Cluster(1, 4))
    assert names(plan, TransferNode) == []


@pytest.mark.parametrize(("n_seqs", "moves"), [(64, False), (66, True)])
def test_mini_batches_matter_only_where_dp_does_not_divide_them(make_graph, assign, n_seqs, moves):
    """66 sequences in 2 mini-batches of 33: dealt to 2 dp ranks they differ from 66 dealt at once."""
    graph = make_graph(n_seqs=n_seqs)
    plan = build_plan(
        graph, dict.fromkeys((c.name for c in graph.calls), assign([0, 1], dp=2)), Cluster(1, 2)
    )
    assert bool(names(plan, TransferNode)) == moves


@pytest.mark.parametrize(("n_seqs", "moves"), [(64, False), (48, True)])
def test_groups_are_dealt_whole(make_graph, assign, n_seqs, moves):
    """48 sequences in groups of 8 and 2 mini-batches: 3 groups each, which 2 dp ranks cannot share evenly."""
    graph = make_graph(n_seqs=n_seqs, group_size=8)
    places = dict.fromkeys((c.name for c in graph.calls), assign([0, 1], dp=2))
    places["ref_inference"] = assign([1])
    plan = build_plan(graph, places, Cluster(1, 2))
    assert ("transfer_actor_generate_to_actor_train" in names(plan, TransferNode)) == moves
    sides = [node.side for node in plan.nodes if isinstance(node, FetchNode | CallNode)]
    sides += [s for n in plan.nodes if isinstance(n, TransferNode) for s in (n.source, n.destination)]
    assert {side.group_size for side in sides} == {8}
    with pytest.raises(
        PlanError, match=rf"a batch of {n_seqs // 8} groups of 8 sequences is smaller than dp="
    ):
        build_plan(graph, {**places, "actor_train": assign(list(range(8)), dp=8)}, Cluster(1, 8))
    fullest = 16
    build_plan(graph, {**places, "actor_train": assign([0, 1], dp=2, micro_batches=fullest)}, Cluster(1, 2))
    with pytest.raises(PlanError, match=f"Choose at most {fullest} micro-batches"):
        build_plan(
            graph, {**places, "actor_train": assign([0, 1], dp=2, micro_batches=fullest + 1)}, Cluster(1, 2)
        )


def test_dealing_by_tokens_moves_samples(make_graph, assign):
    graph = make_graph()
    places = dict.fromkeys((c.name for c in graph.calls), assign([0, 1], dp=2))
    places["actor_train"] = assign([0, 1], dp=2, balance="tokens")
    plan = build_plan(graph, places, Cluster(1, 2))
    assert {node.consumer for node in plan.nodes if isinstance(node, TransferNode)} == {"actor_train"}


def test_samples_move_between_equal_placements_when_other_lengths_deal_them(make_graph, assign):
    """Rows are read by count, prompts' lengths deal generation, whole sequences' what follows."""
    graph = make_graph(mini_batches=1)
    place = assign([0, 1], dp=2, balance="tokens")
    plan = build_plan(graph, dict.fromkeys((c.name for c in graph.calls), place), Cluster(1, 2))
    transfers = {node.name: node for node in plan.nodes if isinstance(node, TransferNode)}
    assert {name: set(node.keys) for name, node in transfers.items()} == {
        "transfer_fetch_to_actor_generate": {"prompt_ids"},
        "transfer_actor_generate_to_reward_inference": {"input_ids", "response_mask", "truncated"},
        "transfer_fetch_to_reward_inference": {"columns"},
        "transfer_actor_generate_to_actor_train": {"old_logprobs"},
    }
    assert transfers["transfer_fetch_to_actor_generate"].source == plan.node("fetch").side
    assert plan.node("fetch").side.balance == "count"
    # Sequences come first: their lengths deal the columns, which have been there since the fetch.
    for name in ("transfer_fetch_to_reward_inference", "transfer_actor_generate_to_actor_train"):
        assert "transfer_actor_generate_to_reward_inference" in transfers[name].after


@pytest.mark.parametrize("n_seqs", [64, 66])
def test_rows_are_read_where_their_call_wants_them(make_graph, assign, n_seqs):
    graph = make_graph("sft", n_seqs=n_seqs)
    for balance in ("count", "tokens"):
        place = assign([0, 1], dp=2, balance=balance)
        plan = build_plan(graph, {"actor_train": place}, Cluster(1, 2))
        assert bool(names(plan, TransferNode)) == (balance == "tokens")
        assert plan.node("fetch").side.mini_batches == 2


def test_training_placement_stands_first(demo_plan, demo_assignments):
    actor = demo_plan.roles["actor"]
    assert actor.trained
    assert actor.placements == (
        demo_assignments["actor_train"].placement,
        demo_assignments["actor_generate"].placement,
    )
    assert demo_plan.roles["ref"].trained is False


def test_version_edges(demo_plan):
    reallocate = demo_plan.node("reallocate_actor_to_actor_generate")
    assert reallocate.after_previous == ("actor_train",)
    assert demo_plan.node("actor_train").after_previous == ("save_actor",)
    assert set(demo_plan.node("actor_generate").after) == {"fetch", "reallocate_actor_to_actor_generate"}


def test_two_readers_share_one_copy(assign):
    def call(name, kind="inference", role="actor", inputs=("x",), outputs=()):
        return ModelFunctionCall(name=name, role=role, kind=kind, inputs=inputs, outputs=outputs, n_seqs=8)

    graph = DataflowGraph(
        [
            call("a", outputs=("y",)),
            call("b", inputs=("y",), outputs=("z",)),
            call("t", "train_step", inputs=("z",)),
        ],
        ("x",),
    )
    plan = build_plan(graph, {"a": assign([1]), "b": assign([1]), "t": assign([0])}, Cluster(1, 2))
    assert names(plan, ReallocateNode) == ["reallocate_actor_to_a"]
    assert plan.node("release_actor_of_a").after == ("b",)


def test_a_reader_of_the_new_version_gets_its_own_copy(assign):
    def call(name, kind="inference", inputs=("x",), outputs=()):
        return ModelFunctionCall(name=name, role="actor", kind=kind, inputs=inputs, outputs=outputs, n_seqs=8)

    graph = DataflowGraph(
        [
            call("old", outputs=("y",)),
            call("train", "train_step", inputs=("y",), outputs=("z",)),
            call("new", inputs=("z",)),
        ],
        ("x",),
    )
    plan = build_plan(graph, {"old": assign([1]), "new": assign([1]), "train": assign([0])}, Cluster(1, 2))
    assert plan.node("reallocate_actor_to_new").after == ("train",)
    assert plan.node("reallocate_actor_to_old").after_previous == ("train",)
    order = [node.name for node in plan.nodes]
    assert order.index("release_actor_of_old") < order.index("reallocate_actor_to_new")


def test_json_round_trip(demo_plan):
    assert ExecutionPlan.model_validate_json(demo_plan.model_dump_json()) == demo_plan


def test_same_input_same_plan(make_graph, demo_assignments, demo_plan):
    assert build_plan(make_graph(n_seqs=256), demo_assignments, Cluster(1, 4)) == demo_plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"critic": [0]}, "The plan names critic; the calls of ppo are actor_generate"),
        ({"actor_train": None}, "says nothing about actor_train"),
        (
            {"actor_train": [2, 3]},
            r"'actor_train': devices \[2, 3\] are outside the cluster, which has devices 0 to 1",
        ),
        ({"actor_train": [0, 1]}, "a batch of 3 sequences is smaller than dp=2 x 2 mini-batches = 4"),
    ],
)
def test_refused_with_the_reason(make_graph, assign, change, message):
    graph = make_graph(n_seqs=3)
    places = {c.name: assign([0]) for c in graph.calls}
    for name, devices in change.items():
        places[name] = assign(devices, dp=len(devices)) if devices else None
    places = {name: place for name, place in places.items() if place}
    with pytest.raises(PlanError, match=message):
        build_plan(graph, places, Cluster(1, 2))


def test_a_generation_with_sharded_weights_is_refused(make_graph, assign):
    graph = make_graph()
    sharded = assign([0, 1], dp=2).model_copy(
        update={"placement": Placement((0, 1), ParallelStrategy(dp=2, shard="parameters"))}
    )
    with pytest.raises(PlanError, match="'actor_generate': a generation reads all weights for each token"):
        build_plan(graph, {call.name: sharded for call in graph.calls}, Cluster(1, 2))


@pytest.mark.parametrize(("n_seqs", "most"), [(64, 16), (66, 17), (65, 17)])
def test_more_micro_batches_than_sequences_are_refused(make_graph, assign, n_seqs, most):
    """As many as the fullest dp rank of two has sequences of the fullest of two mini-batches."""
    graph = make_graph(n_seqs=n_seqs)
    places = {c.name: assign([0, 1], dp=2) for c in graph.calls}
    blocks = mini_batch_blocks(range(n_seqs), 2)
    assert most == max(len(share) for block in blocks for share in partition(block, 2))
    build_plan(graph, {**places, "actor_train": assign([0, 1], dp=2, micro_batches=most)}, Cluster(1, 2))
    with pytest.raises(
        PlanError,
        match=rf"'actor_train': micro_batches={most + 1}, .* {most} of a mini-batch's .* at most {most} micro-",
    ):
        build_plan(
            graph, {**places, "actor_train": assign([0, 1], dp=2, micro_batches=most + 1)}, Cluster(1, 2)
        )


def executed(plan: ExecutionPlan, iterations: int) -> nx.DiGraph:
    """What orders execution: the edges of the plan, and every device's sequence of nodes."""
    graph = nx.DiGraph()
    last: dict[int, tuple[int, str]] = {}
    for t in range(iterations):
        for node in plan.nodes:
            graph.add_node((t, node.name))
            graph.add_edges_from(((t, before), (t, node.name)) for before in node.after)
            if t:
                graph.add_edges_from(((t - 1, before), (t, node.name)) for before in node.after_previous)
            for device in node.devices:
                if device in last:
                    graph.add_edge(last[device], (t, node.name))
                last[device] = (t, node.name)
    return graph


CLUSTER = Cluster(2, 2)


PLACES = [
    CallAssignment(
        placement=Placement(mesh.devices, ParallelStrategy(dp, tp, mesh.size // dp // tp)), balance=balance
    )
    for mesh in meshes(CLUSTER)
    for dp in (1, 2, 4)
    for tp in (1, 2)
    if mesh.size % (dp * tp) == 0
    for balance in ("count", "tokens")
]


OFFLOADED = [set(), {"ref_inference"}, {"ref_inference", "reward_inference"}]


class _Sizes:
    batch_size, group_size, num_mini_batches, scoring_role = 24, 2, 3, "ref"
    on_reward_error = "stop"
    scores_tokens = False
    roles = {"actor": None, "critic": None, "ref": None}.copy
    records_kept, truncated_responses = True, "bootstrap"


GRAPH = DataflowGraph(algorithm("ppo").graph(_Sizes), algorithm("ppo").dataset_keys, name="ppo")


@settings(max_examples=25)
@given(st.lists(st.sampled_from(PLACES), min_size=6, max_size=6), st.sampled_from(OFFLOADED))
def test_every_plan_is_executable(places, offloaded):
    """The order is topological; each call finds its keys on its heads and the right version of its
    parameters, which are not in host memory."""
    assigned = {
        c.name: p.model_copy(update={"offload": c.name in offloaded})
        for c, p in zip(GRAPH.calls, places, strict=True)
    }
    plan = build_plan(GRAPH, assigned, CLUSTER)
    assert nx.is_directed_acyclic_graph(executed(plan, 3))
    done: set[str] = set()
    arrived: dict[str, set[str]] = {}  # consumer -> keys that transfers brought to it
    copies: dict[tuple[str, Placement], int] = {}
    onloaded: set[tuple[str, Placement]] = set()
    versions = dict.fromkeys(plan.roles, 0)
    for iteration in range(2):
        done.clear()
        for node in plan.nodes:
            assert set(node.after) <= done, node.name
            match node:
                case CallNode():
                    role = plan.roles[node.call.role]
                    own = not role.trained or role.placements[0] == node.placement
                    version = versions[node.call.role] if own else copies[node.call.role, node.placement]
                    assert version == (iteration if role.trained else 0)
                    away = node.placement in role.offloaded
                    assert away == (node.call.name in offloaded)
                    assert not away or (node.call.role, node.placement) in onloaded
                    versions[node.call.role] += node.trains
                case ReallocateNode():
                    assert node.source == plan.roles[node.role].placements[0]
                    copies[node.role, node.destination] = versions[node.role]
                case ReleaseNode():
                    del copies[node.role, node.placement]
                case OnloadNode():
                    onloaded.add((node.role, node.placement))
                case OffloadNode():
                    onloaded.remove((node.role, node.placement))
                case TransferNode():
                    arrived.setdefault(node.consumer, set()).update(node.keys)
                case SaveNode():
                    assert versions[node.role] == iteration + 1
            done.add(node.name)
        assert not copies
        assert not onloaded
    for call in GRAPH.calls:
        here = places[[c.name for c in GRAPH.calls].index(call.name)]
        for key in call.inputs:
            source = GRAPH.producer(key) or GRAPH.source.name
            there = places[[c.name for c in GRAPH.calls].index(source)]
            others = [c.name for c in GRAPH.calls if c.name != call.name and key in arrived.get(c.name, ())]
            assert (
                key in arrived.get(call.name, ())
                or here.placement.heads == there.placement.heads
                or any(plan.node(name).placement.heads == here.placement.heads for name in others)
            ), (call.name, key)
