"""Plans as data: documents, sentences, alternatives, and whence prices come."""

from types import SimpleNamespace

import pytest

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.analytic import computed_profile
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.figures import ProfileTables, RanCall
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.report import (
    STRETCH,
    asked_of,
    extrapolation,
    figures_source,
    mode_rows,
    not_measured,
    proof_sentence,
    rejected_alternatives,
)
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.profiling.measurements import Grid
from prefect_rlhf.rlhf_tasks.spec import CallNode


def searched(time_s: float, lower_bound_s: float) -> SimpleNamespace:
    """What a search found, as far as its sentence needs it."""
    return SimpleNamespace(
        iteration_time_s=time_s,
        lower_bound_s=lower_bound_s,
        compile_s=0.0,
        mode="search",
        evaluations=7,
        late=False,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("lower_bound_s", "told"),
    [
        (20.0, "at most 0.0% above the optimum"),
        (19.9999, "at most 0.1% above the optimum"),
        (19.75, "at most 1.3% above the optimum"),  # 1.27%: at most 1.2% would be too little
        (16.0, "at most 25.0% above the optimum"),
        (0.0, "no bound on its distance from the optimum"),
    ],
)
def test_a_gap_is_never_told_as_less_than_it_is(lower_bound_s, told):
    assert f": {told} (search" in proof_sentence(searched(20.0, lower_bound_s))


def test_a_mode_that_is_hardly_slower_is_not_told_to_be_nothing_above_the_best():
    found = {
        "search": searched(20.0, 20.0),
        "mcmc": searched(20.001, 20.0),
        "heuristic": searched(25.0, 20.0),
    }
    assert [row.remark for row in mode_rows(found, 100)] == ["", "less than +0.1%", "+25.0%"]


pytestmark = pytest.mark.timeout(1800)  # the first run compiles


@pytest.fixture
def problem(small_problem) -> Problem:
    return small_problem(Cluster(1, 2))


def test_alternatives_have_another_mesh_and_a_reason(problem):
    result = find_plan(problem, "heuristic", 60.0)
    rows = rejected_alternatives(result)
    assert [row.call for row in rows] == [call.name for call in problem.graph.calls]
    for row in rows:
        chosen = result.plan.node(row.call).assignment.placement
        assert set(row.assignment.placement.devices) != set(chosen.devices)
        assert row.loses_s == pytest.approx(row.time_s - result.iteration_time_s)
        assert row.reason


def test_plans_that_are_faster_than_the_chosen_one_are_called_so(problem, assign):
    """All calls on one of two devices leave the other one idle."""
    on_one = {call.name: assign([0]) for call in problem.graph.calls}
    result = find_plan(problem, "manual", 60.0, evaluate=on_one)
    rows = rejected_alternatives(result)
    assert any(row.is_better for row in rows)
    for row in rows:
        assert row.is_better == (row.time_s < result.iteration_time_s * (1 - 1e-9))
        assert row.is_better == ("the plan is not the best" in row.reason)
        if row.is_better:
            assert row.reason.startswith(f"faster by {result.iteration_time_s - row.time_s:.3g} s")


def test_nothing_is_better_than_the_best_plan(problem):
    result = find_plan(problem, "search", time_limit_s=600)
    assert result.proven_optimal
    for row in rejected_alternatives(result):
        assert not row.is_better
        assert "not the best" not in row.reason
        if row.loses_s <= 1e-9 * result.iteration_time_s:
            assert row.reason == "takes as long"


def test_the_other_calls_may_move_too(problem, assign):
    """What the caption says: a row is a plan of its own, not the chosen one with one call changed."""
    on_one = {call.name: assign([0]) for call in problem.graph.calls}
    result = find_plan(problem, "manual", 60.0, evaluate=on_one)

    def alone_s(row) -> float:
        changed = {**on_one, row.call: row.assignment}
        return find_plan(problem, "manual", 60.0, evaluate=changed).iteration_time_s

    assert any(alone_s(row) > row.time_s * (1 + 1e-6) for row in rejected_alternatives(result))


@pytest.fixture
def cost_of(tiny):
    """cost_of(profiles, device=, other=, prompt=): PPO's cost model on 1 x 4 slots; other: the critic's shape."""

    def make(*profiles, device=None, other=None, prompt=32, ran=()) -> CostModel:
        models = {
            role: RoleModel(shape=tiny, head="lm" if role in ("actor", "ref") else "scalar")
            for role in ("actor", "ref", "critic", "reward")
        }
        if other is not None:
            models["critic"] = RoleModel(shape=other, head="scalar")
        workload = Workload(prompt_tokens=prompt, new_tokens=Lengths.fixed(32), itemsize=4, recompute="none")
        return CostModel(Cluster(1, 4), device or preset("cpu-slot"), models, workload, profiles, ran)

    return make


def test_figures_of_a_preset_of_ones_own_and_of_a_changed_preset(cost_of):
    slot = preset("cpu-slot")
    assert figures_source(cost_of()) == "preset of cpu-slot"
    less_memory = slot.model_copy(update={"memory_bytes": 10**9})
    assert figures_source(cost_of(device=less_memory)) == "preset of cpu-slot"
    slower = slot.model_copy(update={"flops_per_s": 1e9})
    assert figures_source(cost_of(device=slower)) == "changed preset of cpu-slot"
    mine = slot.model_copy(update={"name": "mine"})
    assert figures_source(cost_of(device=mine)) == "stated figures of mine"


def test_measured_figures_of_all_models_of_some_and_of_runs(cost_of, sampled, llama, assign):
    assert figures_source(cost_of(sampled())) == "measured profile of cpu-slot"
    some = figures_source(cost_of(sampled(), other=llama(num_hidden_layers=2)))
    assert some.startswith("measured profile of cpu-slot for actor, ref, reward, ")
    assert some.endswith("device figures calibrated by it for critic")
    ran = RanCall(call="actor_train", assignment=assign([0]), seconds=1.0)
    corrected = figures_source(cost_of(ran=[ran]))
    assert corrected == "preset of cpu-slot, corrected by measured figures of actor_train"


def test_that_nothing_was_measured_is_said_with_the_command_that_measures(cost_of, sampled, assign):
    assert "prefect-rlhf profile --config FILE" in not_measured(cost_of())
    assert not_measured(cost_of(sampled())) == ""
    ran = RanCall(call="actor_train", assignment=assign([0]), seconds=1.0)
    assert not_measured(cost_of(ran=[ran])) == ""


def test_computed_figures_are_never_called_measured(cost_of, sampled, tiny, llama):
    slot, grid = preset("cpu-slot"), Grid.around(64, 32, 64, 128)
    slower = slot.model_copy(update={"flops_per_s": 1e9})
    mine = slot.model_copy(update={"name": "mine"})
    for device, figures in (
        (slot, "preset of cpu-slot"),
        (slower, "changed preset of cpu-slot"),
        (mine, "stated figures of mine"),
    ):
        profile = computed_profile(device, Cluster(1, 4), tiny, grid, 4)
        assert figures_source(cost_of(profile, device=device)) == f"profile computed from the {figures}"
    other = llama(num_hidden_layers=2)
    assert figures_source(
        cost_of(sampled(), computed_profile(slot, Cluster(1, 4), other, grid, 4), other=other)
    ) == (
        "measured profile of cpu-slot for actor, ref, reward and "
        "profile computed from the preset of cpu-slot for critic"
    )


def test_what_a_call_is_said_to_ask_is_what_its_price_asks(cost_of, sampled, demo_plan, monkeypatch):
    """The tables are watched while calls are priced."""
    model, seen = cost_of(sampled()), {}
    at = ProfileTables._at

    def watched(self, operation, tokens, context):
        old = seen.get(operation, (0, 0))
        seen[operation] = (max(old[0], tokens), max(old[1], context))
        return at(self, operation, tokens, context)

    monkeypatch.setattr(ProfileTables, "_at", watched)
    for node in demo_plan.nodes:
        if isinstance(node, CallNode):
            seen.clear()
            model.call(node.call, node.assignment)
            asked = asked_of(node.call, node.assignment, model.workload)
            assert {one.operation: (one.tokens, one.context) for one in asked} == {
                operation: most for operation, most in seen.items() if operation.startswith("layer/")
            }


def shrunk(profile, most_tokens):
    """A profile without the points beyond some tokens, of all but the optimizer."""
    kept = (o for o in profile.operations if o.tokens <= most_tokens or o.operation == "optimizer")
    return profile.model_copy(update={"operations": tuple(kept)})


def test_a_price_far_beyond_what_was_measured_is_told(cost_of, sampled, make_graph, assign):
    graph = make_graph(n_seqs=256)
    whole = {call.name: assign([0, 1, 2, 3], dp=4) for call in graph.calls}
    plan = build_plan(graph, whole, Cluster(1, 4))
    assert extrapolation(plan, cost_of()) is None, "nothing is measured"
    assert extrapolation(plan, cost_of(sampled())) is None
    # 64 sequences of 64 tokens on each rank; in training half of them
    found = extrapolation(plan, cost_of(shrunk(sampled(), 1024)))
    assert found is not None
    assert found.startswith("The measured profile of cpu-slot ends at 1024 tokens of a micro-batch; ")
    assert " is priced at 4096 (2 other calls beyond it too)" in found
    assert extrapolation(plan, cost_of(shrunk(sampled(), 4096 / STRETCH))) is None


def test_a_computed_profile_that_ends_early_is_told_as_computed(cost_of, tiny, make_graph, assign):
    profile = computed_profile(preset("cpu-slot"), Cluster(1, 4), tiny, Grid.around(8, 32, 64, 128), 4)
    graph = make_graph(n_seqs=256)
    plan = build_plan(graph, {call.name: assign([0]) for call in graph.calls}, Cluster(1, 4))
    told = str(extrapolation(plan, cost_of(profile)))
    assert told.startswith("The profile computed from the preset of cpu-slot ends at ")


def test_rows_and_lengths_count_too(cost_of, sampled, make_graph, assign):
    graph = make_graph(n_seqs=1024)
    plan = build_plan(
        graph,
        {c.name: assign([0], micro_batches=1 if c.kind == "generate" else 64) for c in graph.calls},
        Cluster(1, 4),
    )
    told = str(extrapolation(plan, cost_of(sampled(), prompt=8)))
    assert "64 rows that decode together; actor_generate is priced at 1024" in told
    few = make_graph(n_seqs=4)
    plan = build_plan(few, {call.name: assign([0]) for call in few.calls}, Cluster(1, 4))
    told = str(extrapolation(plan, cost_of(sampled(), prompt=1024)))
    assert "tokens of a sequence" in told
