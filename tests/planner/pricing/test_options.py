"""Which options a call has, and what is said when it has none."""

from dataclasses import replace
from operator import le

import pytest

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster, meshes
from prefect_rlhf.planner.plan.workload import OtherEngine
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.options import (
    all_options,
    call_options,
    candidate_meshes,
    cut_points,
    micro_batch_counts,
)
from prefect_rlhf.planner.pricing.plans import kept_on_hosts
from prefect_rlhf.planner.pricing.problem import Problem, ProblemError
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import CallAssignment

ONE_HOST = Cluster(1, 8)


@pytest.fixture
def problem(make_graph, ppo_cost):
    def make(cluster: Cluster = ONE_HOST, max_tp=None, n_seqs=64, **device) -> Problem:
        changed = preset("a100-80g-sxm").model_copy(update=device)
        return Problem(make_graph(n_seqs=n_seqs), ppo_cost(cluster, device=changed), max_tp)

    return make


def test_small_clusters_have_all_meshes():
    assert list(candidate_meshes(Cluster(16, 4))) == list(meshes(Cluster(16, 4)))


def test_large_clusters_have_sixteenths_and_small_meshes_at_the_start():
    cuts = cut_points(2048)
    assert cuts == tuple(range(0, 2049, 128))
    found = {
        (mesh.first // 8, mesh.size // 8) for mesh in candidate_meshes(Cluster(2048, 8)) if mesh.size >= 8
    }
    large = {(a, b - a) for a in cuts for b in cuts if a < b}
    small = {(0, n) for n in (1, 2, 4, 8, 16, 32, 64)} | {(n, n) for n in (1, 2, 4, 8, 16, 32, 64)}
    assert found == large | small
    parts = [(mesh.first, mesh.size) for mesh in candidate_meshes(Cluster(2048, 8)) if mesh.size < 8]
    assert parts == [(i, 1) for i in range(8)] + [(i, 2) for i in range(0, 8, 2)] + [(0, 4), (4, 4)]


def test_a_cluster_of_17_hosts_can_be_used_wholly_and_by_single_hosts():
    found = list(candidate_meshes(Cluster(17, 2)))
    assert len(found) == len(set(found))
    assert {(0, 2), (0, 34), (2, 2)} <= {(mesh.first, mesh.size) for mesh in found}


@pytest.mark.parametrize(
    ("heads", "divided"),
    [((32, 8), {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)}), ((9, 3), {(1, 1)}), ((12, 3), {(1, 1)})],
    ids=str,
)
def test_a_generation_by_vllm_has_what_it_can_divide_on_a_host(make_graph, ppo_cost, llama, heads, divided):
    """(tp, pp) of a host of 4 devices: only here has 2 x pp a replica on one host. Other calls are as they were."""
    shape, graph = llama(num_attention_heads=heads[0], num_key_value_heads=heads[1]), make_graph(n_seqs=64)
    cost = ppo_cost(Cluster(2, 4), shape=shape, other=OtherEngine(copies=2, kv_bytes=10**9))
    asked, ours = Problem(graph, cost), Problem(graph, ppo_cost(Cluster(2, 4), shape=shape))
    options = dict(zip([call.name for call in graph.calls], all_options(asked), strict=True))
    of_vllm = {(o.size, o.strategy.tp, o.strategy.pp) for o in options["actor_generate"]}
    assert {(tp, pp) for size, tp, pp in of_vllm if size <= 4} == divided
    assert {(tp, pp) for size, tp, pp in of_vllm if size == 8} == {(tp, pp) for tp, pp in divided if pp == 1}
    assert {o.strategy for o in options["actor_train"]} == {o.strategy for o in all_options(ours)[4]}


@pytest.mark.parametrize(
    ("strategy", "heads", "columns"),
    [
        (ParallelStrategy(tp=4), (6, 2), 96),
        (ParallelStrategy(tp=4), (9, 3), 96),
        (ParallelStrategy(tp=2, pp=2), (12, 3), 96),
        (ParallelStrategy(tp=2, pp=2), (8, 8), 90),
        (ParallelStrategy(dp=4, pp=2), (8, 8), 96),
    ],
    ids=str,
)
def test_a_plan_by_hand_that_vllm_cannot_divide_is_refused(
    make_graph, ppo_cost, llama, strategy, heads, columns
):
    of_heads = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    shape, graph = llama(intermediate_size=columns, **of_heads), make_graph(n_seqs=64)
    cost = ppo_cost(Cluster(2, 4), shape=shape, other=OtherEngine(copies=2, kv_bytes=10**9))
    given = CallAssignment(placement=Placement(tuple(range(strategy.size)), strategy))
    plan = build_plan(graph, {call.name: given for call in graph.calls}, Cluster(2, 4))
    said = (
        rf"Call 'actor_generate': vLLM divides the model over the tp x pp = {strategy.tp * strategy.pp} devices of a "
        rf"replica, which must be of one host of 4, and it has {heads[0]} heads, {heads[1]} of keys and "
        rf"values, and {columns} columns\."
    )
    with pytest.raises(ProblemError, match=said):
        Problem(graph, cost).refuse(plan)


def test_a_replica_on_several_hosts_is_refused_where_its_head_writes_the_weights_for_a_server(
    make_graph, ppo_cost
):
    """The head reads the memory of the other ranks, which is of one host."""
    graph, cost = make_graph(n_seqs=64), ppo_cost(Cluster(2, 4), other=OtherEngine(copies=2))
    problem, generate = Problem(graph, cost), graph.call("actor_generate")

    def given(**degrees: int) -> CallAssignment:
        return CallAssignment(placement=Placement(tuple(range(8)), ParallelStrategy(**degrees)))

    for inside in ({"dp": 2, "tp": 4}, {"dp": 8}):
        problem.refuse(build_plan(graph, {call.name: given(**inside) for call in graph.calls}, Cluster(2, 4)))
    spans = build_plan(graph, {call.name: given(tp=4, pp=2) for call in graph.calls}, Cluster(2, 4))
    said = (
        r"Call 'actor_generate': the weights that a server loads are written by the tp x pp = 8 devices of a "
        r"replica, which must be of one host of 4\. Choose a plan with a larger dp\."
    )
    with pytest.raises(ProblemError, match=said):
        problem.refuse(spans)
    assert not any(
        pair.resident.strategy.tp * pair.resident.strategy.pp > 4 for pair in call_options(problem, generate)
    )


def test_options_keep_in_their_hosts_memory_what_their_plan_keeps_there(problem):
    """Of a reference that follows the actor, too: it changes, so commits have it."""
    asked, whole = problem(), ParallelStrategy(dp=2, tp=4)
    graph = DataflowGraph(asked.graph.calls, asked.graph.dataset_keys, name="ppo", follows={"ref": "actor"})
    asked = replace(asked, graph=graph)
    chosen = {
        call.name: next(
            pair.resident for pair in call_options(asked, call) if pair.resident.strategy == whole
        )
        for call in graph.calls
    }
    plan = build_plan(graph, {name: option.assignment for name, option in chosen.items()}, ONE_HOST)
    (parts,) = kept_on_hosts(plan, asked.model).values()
    assert {part.split(":")[0] for part in parts} == {"actor", "critic", "ref"}
    assert sum(8 * option.host[0] for option in chosen.values()) == pytest.approx(sum(parts.values()))


def test_every_strategy_fills_its_mesh_and_keeps_the_limits(problem):
    asked = problem(max_tp=4)
    for call in asked.graph.calls:
        for option, _ in call_options(asked, call):
            s = option.strategy
            assert s.size == option.size
            assert s.tp <= 4
            assert s.pp <= 32
            assert s.dp * call.mini_batches <= call.n_seqs
            assert 1 <= option.micro_batches <= max(1, call.n_seqs // (call.mini_batches * s.dp))


def test_no_dp_rank_is_without_a_group(make_graph, problem):
    asked = problem(Cluster(2, 8))
    grouped = replace(asked, graph=make_graph(n_seqs=asked.graph.n_seqs, group_size=16))
    for call in grouped.graph.calls:
        options = [pair.resident for pair in call_options(grouped, call)]
        assert max(option.strategy.dp for option in options) <= call.n_groups // call.mini_batches
        assert max(option.strategy.dp for option in options) > 1 or call.n_groups == call.mini_batches


def test_options_keep_their_price_wherever_their_mesh_lies(problem):
    asked = problem(Cluster(2, 8))
    for call in asked.graph.calls:
        for option, _ in call_options(asked, call)[::7]:
            cost = asked.model.call(call, option.assignment)
            assert option.seconds == cost.seconds
            assert option.active == cost.active_bytes


def test_micro_batches_are_whole_and_within_the_share(problem):
    train = problem().graph.call("actor_train")
    assert micro_batch_counts(train, ParallelStrategy(2, 1, 3)) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert micro_batch_counts(problem().graph.call("actor_generate"), ParallelStrategy(2, 1, 3)) == [
        1,
        2,
        4,
        8,
    ]


def test_what_is_left_out_is_matched_in_time_and_memory(problem):
    """For every count that fits, an option at least as fast and as small is there; of a generation, one as fast."""
    asked = problem(Cluster(1, 4))
    for call in asked.graph.calls:
        kept = [pair.resident for pair in call_options(asked, call)]
        for strategy in {option.strategy for option in kept}:
            alike = [option for option in kept if option.strategy == strategy and option.first == 0]
            for count in micro_batch_counts(call, strategy):
                given = alike[0].assignment.model_copy(update={"micro_batches": count})
                cost = asked.model.call(call, given)
                fits = max(alike[0].resident) + max(alike[0].copy) + max(cost.active_bytes) <= 80e9
                matched = [
                    o
                    for o in alike
                    if o.seconds <= cost.seconds
                    and (call.kind == "generate" or all(map(le, o.active, cost.active_bytes)))
                ]
                assert matched or not fits


@pytest.mark.parametrize(
    ("name", "cluster", "memory_bytes", "remedy"),
    [
        ("ref_inference", ONE_HOST, 10**9, "A larger tp or pp would"),
        (
            "actor_generate",
            Cluster(1, 1),
            20 * 10**9,
            "A larger dp, tp or pp, a smaller batch_size or fewer new",
        ),
        ("actor_train", ONE_HOST, 10**9, r"A larger tp, pp or dp \(ZeRO shards gradients and optimizer\)"),
    ],
)
def test_no_option_fits(problem, name, cluster, memory_bytes, remedy):
    """The sentence names what would lower the largest part: of a copy tp and pp alone, of a KV cache dp as well."""
    asked = problem(cluster, n_seqs=4096, memory_bytes=memory_bytes)
    with pytest.raises(
        ProblemError, match=f"'{name}' fits no mesh of a cluster of .* lacks .* bytes. {remedy}"
    ):
        call_options(asked, asked.graph.call(name))


def test_a_problem_without_a_model_or_with_a_bad_limit(problem, make_graph, ppo_cost):
    with pytest.raises(ProblemError, match="max_tp=0 is not a positive whole number"):
        problem(max_tp=0)
    model = ppo_cost(Cluster(1, 2))
    del model.models["ref"]
    with pytest.raises(ProblemError, match="No model is given for ref"):
        Problem(make_graph(), model)


def sharded_and_whole(options) -> tuple[set[tuple], set[tuple]]:
    """(mesh size, strategy without shards) of a call's options with sharded weights, and of the others."""
    degrees = [(option.size, replace(option.strategy, shard="gradients")) for option in options]
    is_sharded = [option.strategy.shard == "parameters" for option in options]
    return (
        {at for at, yes in zip(degrees, is_sharded, strict=True) if yes},
        {at for at, yes in zip(degrees, is_sharded, strict=True) if not yes},
    )


def alone(problem: Problem, name: str) -> tuple[set[tuple], set[tuple]]:
    """`sharded_and_whole` of a call by itself."""
    return sharded_and_whole([pair.resident for pair in call_options(problem, problem.graph.call(name))])


@pytest.mark.parametrize("call", ["ref_inference", "actor_train"])
def test_weights_are_sharded_only_where_whole_ones_do_not_fit(problem, call):
    ample, _ = alone(problem(), call)
    scarce = problem(memory_bytes=int(30e9 if call == "actor_train" else 12e9))
    sharded, whole = alone(scarce, call)
    assert not ample
    assert sharded
    assert not sharded & whole
    assert all(strategy.pp == 1 and strategy.dp > 1 for _, strategy in sharded)


def test_no_generation_has_sharded_weights(problem):
    sharded, _ = alone(problem(memory_bytes=int(12e9)), "actor_generate")
    assert not sharded


@pytest.mark.parametrize(("memory_bytes", "together"), [(80e9, False), (200e9, True)])
def test_and_beside_whole_ones_where_the_fastest_options_of_all_calls_fit_alone_but_not_together(
    problem, memory_bytes, together
):
    """By hand: four 7B models on eight devices, each with dp 8, hold 13.5 GB of weights each and 13.5 GB of training
    state twice. With 200 GB these fit, though the largest options do not: 121 GB for each training on one device."""
    asked = problem(memory_bytes=int(memory_bytes))
    options = all_options(asked)
    assert any(option.offload for own in options for option in own)
    for call, own in zip(asked.graph.calls, options, strict=True):
        sharded, whole = sharded_and_whole(own)
        assert bool(sharded & whole) == (not together and call.kind != "generate"), call.name


def test_but_not_among_the_few_with_which_a_search_begins(problem):
    options = all_options(problem(memory_bytes=int(80e9)), few=True)
    assert not any(sharded & whole for sharded, whole in map(sharded_and_whole, options))
