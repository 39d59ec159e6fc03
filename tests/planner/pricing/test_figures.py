"""Measured profiles: interpolation, refusals, files; and figures of calls that earlier runs measured."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Thinking, Workload
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.figures import (
    Factor,
    FiguresError,
    MeasuredProfile,
    ProfileError,
    ProfileTables,
    RanCall,
    RanTurns,
    Table,
    cache_file,
    cached,
    drifted,
    factor_elsewhere,
    factor_of,
    figures_file,
    keep_figures,
    read_figures,
    read_profiles,
    rising,
    store,
)
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.compiled.tables import Tables
from prefect_rlhf.rlhf_tasks.profiling.measurements import Grid, Measurements, Timed, TimedExchange

POINTS = [(c, n, 1e-3 * (1 + n / 100) * (1 + c / 64)) for c in (16, 64) for n in (8, 64, 512)]


def test_a_table_is_exact_on_its_grid():
    table = Table(POINTS)
    for context, tokens, seconds in POINTS:
        assert table.at(context, tokens) == pytest.approx(seconds, rel=1e-12)


@given(st.floats(1, 2000), st.floats(1, 2000), st.floats(1, 200), st.floats(1, 200))
def test_a_table_of_growing_seconds_is_monotone_between_and_beyond(n, more, context, longer):
    table = Table(POINTS)
    n, more = sorted((n, more))
    context, longer = sorted((context, longer))
    assert table.at(context, n) <= table.at(context, more) * (1 + 1e-12)
    assert table.at(context, n) <= table.at(longer, n) * (1 + 1e-12)


def test_beyond_its_points_a_table_goes_on_straight_and_below_them_it_stays():
    table = Table([(0, 100, 1.0), (0, 200, 1.5)])
    assert table.at(0, 400) == pytest.approx(2.5)
    assert table.at(0, 1) == 1.0
    assert table.at(99, 150) == pytest.approx(1.25)


def test_seconds_that_fall_with_more_tokens_are_taken_for_noise():
    table = Table([(0, 1, 1.0), (0, 2, 4.0), (0, 4, 2.0), (0, 8, 5.0)])
    assert [table.at(0, n) for n in (1, 2, 4, 8)] == [1.0, 3.0, 3.0, 5.0]


@given(st.lists(st.floats(0, 100), max_size=12))
def test_rising_values_are_the_nearest_that_never_fall(values):
    found = rising(values)
    assert all(a <= b for a, b in pairwise(found))
    # Least squares over a cone: the residuals weigh nothing against the values, and never favour a rise
    assert sum((v - f) * f for v, f in zip(values, found, strict=True)) == pytest.approx(0, abs=1e-7)
    for i in range(len(values)):
        assert sum(v - f for v, f in zip(values[i:], found[i:], strict=True)) <= 1e-9 * (1 + sum(values))


def test_the_grid_encloses_the_work_in_powers_of_two():
    grid = Grid.around(n_seqs=100, prompt_tokens=24, total_tokens=72, context=128)
    assert grid.tokens == (64, 256, 1024, 4096, 8192)
    assert grid.lengths == (32, 128)
    assert grid.rows == (1, 16, 128)
    assert grid.contexts == (16, 32, 64)
    assert all(n & (n - 1) == 0 for part in grid for n in part)


def test_contexts_whose_difference_cannot_be_measured_are_one_point():
    assert Grid.around(n_seqs=256, prompt_tokens=16, total_tokens=26, context=128).contexts == (16,)


@pytest.fixture
def cost_of(tiny):
    """cost_of(*profiles): PPO's cost model on 1 x 4 slots for one shape."""

    def make(*profiles, shape=None, itemsize=4) -> CostModel:
        models = {
            role: RoleModel(shape=shape or tiny, head="lm" if role in ("actor", "ref") else "scalar")
            for role in ("actor", "ref", "critic", "reward")
        }
        workload = Workload(
            prompt_tokens=32, new_tokens=Lengths.fixed(32), itemsize=itemsize, recompute="none"
        )
        return CostModel(Cluster(1, 4), preset("cpu-slot"), models, workload, profiles)

    return make


def test_measured_and_analytic_profiles_have_one_consumer(demo_plan, cost_of, sampled):
    """A profile with a roofline's figures prices a plan as the roofline does."""
    analytic, measured = (price_plan(demo_plan, model) for model in (cost_of(), cost_of(sampled())))
    assert measured.iteration_time_s == pytest.approx(analytic.iteration_time_s, rel=0.05)
    for name, seconds in analytic.duration_s.items():
        assert measured.duration_s[name] == pytest.approx(seconds, rel=0.1)
    assert measured.duration_s != analytic.duration_s


def test_twice_all_seconds_are_twice_the_calls(demo_plan, cost_of, sampled):
    once, twice = (cost_of(sampled(scale)) for scale in (1.0, 2.0))
    for node in demo_plan.nodes:
        if node.kind == "call":
            seconds = once.call(node.call, node.assignment).seconds
            assert twice.call(node.call, node.assignment).seconds == pytest.approx(2 * seconds)


def test_means_over_ranks(tiny):
    def found(seconds):
        timed = Timed(operation="layer/forward", tp=1, tokens=8, context=8, seconds=seconds)
        return Measurements(operations=(timed,), process_bytes=int(seconds))

    profile = MeasuredProfile.of("cpu-slot", 1, 2, tiny, 4, [found(1.0), found(3.0), Measurements()])
    assert [o.seconds for o in profile.operations] == [2.0]
    assert profile.process_bytes == 1


def test_a_profile_of_another_model_is_refused(cost_of, sampled, llama):
    with pytest.raises(
        ProfileError, match=r"another model: it has hidden 128, layers 4, .* role 'actor' has hidden 4096"
    ):
        cost_of(sampled(), shape=llama())


def test_a_profile_of_other_precision_is_refused(cost_of, sampled):
    with pytest.raises(ProfileError, match="parameters of 4 bytes, the run's have 2"):
        cost_of(sampled(), itemsize=2)


def test_degrees_and_ranks_that_were_not_measured_are_refused(sampled):
    with pytest.raises(ProfileError, match=r"no figures for tp=8 \(it has tp=1, 2, 4\)"):
        ProfileTables(sampled(), "lm", 8, False)
    with pytest.raises(ProfileError, match=r"all_reduce among 8 ranks \(it has up to 4\)"):
        ProfileTables(sampled(), "lm", 4, False).exchange_s("all_reduce", 8, 1000, False)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_exchanges_take_time(sampled, seconds, tiny):
    exchange = TimedExchange(kind="send", ranks=2, crosses_hosts=False, size_bytes=8, seconds=seconds)
    timed = Timed(operation="layer/forward", tp=1, tokens=8, context=8, seconds=1.0)
    with pytest.raises(ValueError, match="an impossible figure"):
        MeasuredProfile.of(
            "cpu-slot", 1, 2, tiny, 4, [Measurements(operations=(timed,), exchanges=(exchange,))]
        )


def test_layers_whose_tp_groups_span_hosts_are_dearer(sampled):
    profile = sampled()
    across = tuple(
        e.model_copy(update={"crosses_hosts": True, "seconds": 10 * e.seconds}) for e in profile.exchanges
    )
    both = profile.model_copy(update={"exchanges": profile.exchanges + across})
    inside, outside = (
        ProfileTables(both, "lm", 2, crosses).layer_s("forward", 512, 32) for crosses in (False, True)
    )
    reduce_s = ProfileTables(both, "lm", 2, False).exchange_s("all_reduce", 2, 512 * 128 * 4, False)
    assert outside - inside == pytest.approx(2 * 9 * reduce_s)


def test_tp_degrees_that_were_not_measured_are_priced_by_the_device(cost_of, sampled, make_graph, assign):
    whole = sampled()
    only_one = whole.model_copy(update={"operations": tuple(o for o in whole.operations if o.tp == 1)})
    call, tp2 = make_graph().call("ref_inference"), assign([0, 1], tp=2)
    assert cost_of(only_one).call(call, tp2) == cost_of().call(call, tp2)
    assert cost_of(only_one).call(call, assign([0])) == cost_of(whole).call(call, assign([0]))


def test_transfers_are_priced_by_what_redistributions_took(cost_of, sampled):
    """The handshake of the heads is in the link's latency; what happens inside calls does not see it."""
    profile = sampled()
    slower = tuple(
        e.model_copy(update={"seconds": e.seconds + 0.5}) if e.kind == "redistribute" else e
        for e in profile.exchanges
    )
    before, after = cost_of(profile), cost_of(profile.model_copy(update={"exchanges": slower}))
    assert after.classes.wires({0}).inside_s == pytest.approx(before.classes.wires({0}).inside_s + 0.5)
    assert cost_of().classes.profiles[0] == preset("cpu-slot")


@pytest.fixture
def profile(llama) -> MeasuredProfile:
    timed = Timed(operation="layer/forward", tp=1, tokens=8, context=8, seconds=0.5)
    return MeasuredProfile.of(
        "h100-sxm", 2, 8, llama(), 2, [Measurements(operations=(timed,))], dispatch_s=0.25
    )


def test_a_stored_profile_comes_back_the_same(tmp_path, profile):
    assert read_profiles(store(profile, tmp_path)) == (profile,)


def test_the_cache_knows_device_cluster_model_and_precision(tmp_path, sampled, tiny, llama):
    profile, here = sampled(), Cluster(1, 4)
    store(profile, tmp_path)
    models = {"actor": RoleModel(shape=tiny), "critic": RoleModel(shape=tiny, head="scalar")}
    other = {"actor": RoleModel(shape=llama())}
    assert cached(tmp_path, "cpu-slot", here, models, 4) == ((profile,), ())
    assert cached(tmp_path, "h200-sxm", here, models, 4) == ((), ())
    assert cached(tmp_path, "cpu-slot", Cluster(2, 4), models, 4) == ((), ())
    assert cached(tmp_path, "cpu-slot", here, models, 2) == ((), ())
    assert cached(tmp_path, "cpu-slot", here, other, 4) == ((), ())


def test_the_file_is_named_by_what_it_is_of(tmp_path, profile, llama):
    assert store(profile, tmp_path) == cache_file(tmp_path, "h100-sxm", Cluster(2, 8), llama(), 2)
    assert store(profile, tmp_path).name.startswith("h100-sxm-llama-")


def test_a_file_that_is_no_profile_is_refused(tmp_path, profile):
    path = store(profile, tmp_path)
    document = json.loads(path.read_text())
    document[0]["operations"][0]["seconds"] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=r"seconds=-1.* impossible figure.*prefect-rlhf profile"):
        read_profiles(path)
    path.write_text("no JSON")
    with pytest.raises(ProfileError, match="no profile"):
        read_profiles(path)


@pytest.mark.parametrize(
    ("planned", "measured", "is_drift"),
    [(1.0, 1.24, False), (1.0, 1.26, True), (1.0, 0.76, False), (1.0, 0.74, True), (0.0, 0.1, True)],
)
def test_beyond_a_quarter_of_the_planned_time_is_drift(planned, measured, is_drift):
    assert drifted(planned, measured) is is_drift


def test_figures_come_back_and_newer_ones_of_the_same_assignment_replace_older(tmp_path, assign):
    path = tmp_path / "profiles" / "ran.json"
    assert read_figures(path) == ()
    one, two = assign([0]), assign([0, 1], dp=2)
    keep_figures(
        path, [RanCall(call="a", assignment=one, seconds=1), RanCall(call="b", assignment=one, seconds=2)]
    )
    keep_figures(
        path, [RanCall(call="a", assignment=one, seconds=3), RanCall(call="a", assignment=two, seconds=4)]
    )
    assert {(r.call, r.assignment.placement.strategy.dp): r.seconds for r in read_figures(path)} == {
        ("a", 1): 3,
        ("b", 1): 2,
        ("a", 2): 4,
    }


@pytest.mark.parametrize("text", ["no JSON", '[{"call": "a"}]'])
def test_a_file_of_something_else_is_refused_by_name(tmp_path, text):
    path = tmp_path / "ran.json"
    path.write_text(text)
    with pytest.raises(FiguresError, match=r"ran.json: no measured figures of runs"):
        read_figures(path)


def test_two_runs_may_keep_figures_at_the_same_time(tmp_path, assign, monkeypatch):
    path = tmp_path / "ran.json"
    mine, theirs = (RanCall(call=name, assignment=assign([0]), seconds=1) for name in "ab")
    write = Path.write_bytes

    def meanwhile_the_other(partial, content):
        monkeypatch.undo()
        write(partial, content)
        keep_figures(path, [theirs])

    monkeypatch.setattr(Path, "write_bytes", meanwhile_the_other)
    keep_figures(path, [mine])
    assert read_figures(path) == (mine,), "the last one's, whole"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_named_by_all_that_figures_depend_on(tmp_path, small_problem, make_graph):
    problem = small_problem(Cluster(1, 2))
    m, calls = problem.model, problem.graph.calls

    def name(**changes):
        given = {"devices": m.classes, "models": m.models, "workload": m.workload, "calls": calls}
        return figures_file(tmp_path, **(given | changes)).name

    assert name() == name()
    other = [
        name(devices=DeviceClasses.alike(Cluster(1, 2), preset("h100-sxm"))),
        name(devices=DeviceClasses.alike(Cluster(2, 2), m.classes.profiles[0])),
        name(models={**m.models, "actor": m.models["critic"]}),
        name(workload=m.workload.model_copy(update={"epochs": 2})),
        name(calls=make_graph(n_seqs=8).calls),
        name(users='{"environment": {"factory": "game.py:Slow"}}'),
    ]
    assert len({name(), *other}) == 7


def corrected(problem, *ran: RanCall) -> CostModel:
    m = problem.model
    return CostModel(m.cluster, m.classes, m.models, m.workload, history=ran)


def test_a_call_costs_what_it_did_where_it_ran_and_elsewhere_as_much_more(small_problem, assign):
    problem = small_problem(Cluster(1, 2))
    call, other = problem.graph.call("actor_train"), problem.graph.call("critic_train")
    alone, both = assign([0]), assign([0, 1], dp=2)
    plain = {
        key: problem.model.call(call, where).seconds for key, where in (("alone", alone), ("both", both))
    }
    model = corrected(problem, RanCall(call="actor_train", assignment=alone, seconds=3 * plain["alone"]))
    assert model.call(call, alone).seconds == pytest.approx(3 * plain["alone"])
    assert model.call(call, assign([1])).seconds == pytest.approx(3 * plain["alone"]), (
        "the same on its neighbour"
    )
    assert model.call(call, both).seconds == pytest.approx(3 * plain["both"])
    assert model.call(other, alone) == problem.model.call(other, alone)
    assert model.call(call, alone).active_bytes == problem.model.call(call, alone).active_bytes
    assert (model.correction(call), model.correction(other)) == (pytest.approx((3, 1, 0)), (1, 1, 0))


def test_a_call_that_ran_in_two_ways_keeps_both_figures_and_their_mean_elsewhere(small_problem, assign):
    problem = small_problem(Cluster(1, 4))
    call = problem.graph.call("actor_train")
    ways = assign([0]), assign([0, 1], dp=2), assign([0, 1], tp=2)
    plain = [problem.model.call(call, way).seconds for way in ways]
    ran = [RanCall(call=call.name, assignment=ways[n], seconds=f * plain[n]) for n, f in ((0, 2), (1, 8))]
    model = corrected(problem, *ran)
    assert [model.call(call, way).seconds / p for way, p in zip(ways, plain, strict=True)] == [
        pytest.approx(factor) for factor in (2, 8, 4)
    ]


def test_a_call_without_a_price_costs_what_it_took_on_the_mean_elsewhere(assign):
    """Python rewards of no stated cost: nothing multiplies 0 s."""
    runs = [RanCall(call="reward_inference", assignment=assign([0]), seconds=s) for s in (0.25, 0.75)]
    found = [factor_of(ran, seconds=0.0, active_bytes=0.0) for ran in runs]
    assert found == [Factor(added_s=0.25), Factor(added_s=0.75)]
    assert factor_elsewhere(found) == pytest.approx(Factor(added_s=0.5))


def test_elsewhere_times_go_by_the_mean_and_memory_by_the_most():
    assert factor_elsewhere([Factor(2.0, 0.5), Factor(0.5, 3.0)]) == pytest.approx((1, 3, 0))
    assert factor_elsewhere([Factor(1.0, 0.5)]) == (1, 1, 0)
    assert factor_elsewhere([]) == (1, 1, 0)


def test_memory_that_drifted_is_the_calls_own_where_it_ran_and_never_less_than_planned_elsewhere(
    small_problem, assign
):
    problem = small_problem(Cluster(1, 2))
    call, alone, both = problem.graph.call("actor_train"), assign([0]), assign([0, 1], pp=2)
    seconds = problem.model.call(call, alone).seconds
    for factor in (3.0, 0.5):
        active_bytes = factor * max(problem.model.call(call, alone).active_bytes)
        ran = RanCall(call=call.name, assignment=alone, seconds=seconds, active_bytes=active_bytes)
        model = corrected(problem, ran)
        assert max(model.call(call, alone).active_bytes) == pytest.approx(active_bytes)
        assert model.call(call, both).active_bytes == pytest.approx(
            [max(factor, 1) * size for size in problem.model.call(call, both).active_bytes]
        )
        assert model.call(call, both).seconds == problem.model.call(call, both).seconds


def test_turns_are_priced_as_the_newest_were(make_graph, ppo_cost, assign):
    """By the formulas of a workload that says the same: 20 tokens a response, answered in 3 s, the longest in 9 s."""
    call, one, two = make_graph(n_seqs=8).call("actor_generate"), assign([0]), assign([0, 1], dp=2)
    cluster, stated = Cluster(1, 2), Thinking(mean_s=1.0, longest_s=1.0)
    model = ppo_cost(cluster, thinking=stated)
    older, newer = (
        RanTurns(drawn=12.0, observed=8.0, mean_s=3.0, longest_s=longest_s, among=8)
        for longest_s in (70.0, 9.0)
    )
    as_found = Thinking(mean_s=3.0, longest_s=9.0, among=8)
    same = ppo_cost(cluster, thinking=as_found, new_tokens=Lengths.fixed(20), max_new_tokens=128)
    seconds = same.call(call, one).seconds
    ran = [
        RanCall(call=call.name, assignment=two, seconds=1.0, turns=older),
        RanCall(call=call.name, assignment=one, seconds=seconds, turns=newer),
    ]
    corrected = CostModel(cluster, model.classes, model.models, model.workload, history=ran[1:])
    assert corrected.call(call, one).seconds == pytest.approx(seconds)
    assert corrected.call(call, two).seconds == pytest.approx(same.call(call, two).seconds)
    assert corrected.call(call, two).active_bytes == model.call(call, two).active_bytes, "of the longest"
    both = CostModel(cluster, model.classes, model.models, model.workload, history=ran)
    assert both.call(call, one).seconds == pytest.approx(seconds), "the newest counts"
    assert both.without_history().call(call, one) == model.call(call, one)


def test_figures_of_turns_come_back_and_the_newest_are_last(tmp_path, assign):
    path, one, two = tmp_path / "ran.json", assign([0]), assign([0, 1], dp=2)
    turns = RanTurns(drawn=3.5, observed=2.0, mean_s=0.5, longest_s=4.0, among=16)
    first = [RanCall(call="a", assignment=where, seconds=1.0, turns=turns) for where in (one, two)]
    keep_figures(path, first)
    again = first[0].model_copy(update={"turns": turns.model_copy(update={"mean_s": 0.75})})
    keep_figures(path, [again])
    assert read_figures(path) == (first[1], again)


def test_options_and_plans_go_by_the_figures(small_problem, assign):
    """What a search chooses from, and the price of a plan that is reported, are the same corrected figures."""
    problem = small_problem(Cluster(1, 2))
    alone = assign([0])
    seconds = 5 * problem.model.call(problem.graph.call("actor_train"), alone).seconds
    model = corrected(problem, RanCall(call="actor_train", assignment=alone, seconds=seconds))
    plain, after = options_of_calls(problem), options_of_calls(Problem(problem.graph, model))
    for call, options in plain.items():
        factor = pytest.approx(5) if call == "actor_train" else 1
        assert [a.seconds / b.seconds for a, b in zip(after[call], options, strict=True)] == [factor] * len(
            options
        )
    plan = build_plan(problem.graph, dict.fromkeys(plain, alone), Cluster(1, 2))
    priced = price_plan(plan, model).duration_s["actor_train"]
    assert priced == pytest.approx(seconds + model.classes.dispatch_s)


def options_of_calls(problem: Problem):
    tables = Tables(problem)
    return dict(zip(tables.calls, tables.options, strict=True))
