"""What is said of the figures after a price, and of those beyond what was measured."""

import pytest

from planner.plan.build import build_plan
from planner.plan.mesh import Cluster
from planner.plan.workload import Lengths, RoleModel, Workload
from planner.pricing.analytic import computed_profile
from planner.pricing.calls import CostModel
from planner.pricing.devices import preset
from planner.pricing.figures import ProfileTables, RanCall
from planner.pricing.provenance import STRETCH, asked_of, extrapolation, figures_source, not_measured
from rlhf_tasks.profiling.measurements import Grid
from rlhf_tasks.spec import CallNode


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
