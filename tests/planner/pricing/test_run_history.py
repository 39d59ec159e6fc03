"""Measured figures of runs: when they are kept, where, and how they correct the cost model."""

from pathlib import Path

import pytest

from planner.plan.build import build_plan
from planner.plan.mesh import Cluster
from planner.pricing.calls import CostModel
from planner.pricing.device_classes import DeviceClasses
from planner.pricing.devices import preset
from planner.pricing.plans import price_plan
from planner.pricing.problem import Problem
from planner.pricing.run_history import (
    Factor,
    FiguresError,
    RanCall,
    drifted,
    factor_elsewhere,
    factor_of,
    figures_file,
    keep_figures,
    read_figures,
)
from planner.search.compiled.tables import Tables


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
    ]
    assert len({name(), *other}) == 6


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
