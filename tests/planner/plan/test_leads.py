"""Calls that run ahead: the graph, the plan's edges, and the steady state against the replay and by enumeration."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataEdge, DataflowGraph, GraphError, VersionEdge
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.steady_state import steady_state
from prefect_rlhf.rlhf_tasks.algorithms.grpo import in_rounds
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, in_parts
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, CallNode, FetchNode, SaveSamplesNode, TransferNode
from tests.planner.ahead import drawn_ahead_by
from tests.planner.replay import replay

SIZES = SimpleNamespace(
    batch_size=8,
    group_size=2,
    num_mini_batches=1,
    scoring_role="reward",
    on_reward_error="stop",
    scores_tokens=False,
    roles=lambda: ("actor", "reward"),
    records_kept=False,
    beta=0.0,
    max_rounds=1,
    mask_truncated_completions=False,
)
APART = {"actor_generate": [0], "reward_inference": [1], "actor_inference": [2], "actor_train": [2]}
TOGETHER = {call: [0] for call in APART}
LONG = ("actor_generate", "reward_inference", "actor_train")


def graph_of(staleness: int, chunks: int = 1) -> DataflowGraph:
    grpo = algorithm("grpo")
    calls = in_parts(drawn_ahead_by(staleness, grpo.graph(SIZES)), chunks)
    return DataflowGraph(calls, grpo.dataset_keys, name="grpo")


def plan_of(graph: DataflowGraph, where: dict[str, list[int]]):
    given = {
        call.name: CallAssignment(placement=Placement(tuple(where[call.name]), ParallelStrategy()))
        for call in graph.calls
    }
    return build_plan(graph, given, Cluster(1, 4))


def test_what_is_read_of_a_call_that_runs_ahead_was_made_iterations_ago():
    graph = graph_of(2)
    assert [call.name for call in graph.calls] == [
        "actor_generate",
        "reward_inference",
        "actor_inference",
        "actor_train",
    ]
    assert {(e.writer, e.reader, e.lag) for e in graph.lagged} == {
        ("actor_generate", reader, 2) for reader in ("reward_inference", "actor_inference", "actor_train")
    }
    assert DataEdge("actor_generate", "actor_inference", ("input_ids", "response_mask"), 2) in graph.lagged
    assert VersionEdge("actor_train", "actor_generate", "actor") in graph.across
    assert graph.digraph.edges["actor_generate", "actor_train"] == {"keys": (), "roles": ("actor",)}


def test_without_staleness_the_graph_is_as_it_was():
    graph = graph_of(0)
    assert not graph.lagged
    assert graph.calls == DataflowGraph(algorithm("grpo").graph(SIZES), ("prompt_ids", "columns")).calls
    assert not any(
        isinstance(node, SaveSamplesNode) or node.lead for node in plan_of(graph, APART | TOGETHER).nodes
    )


@pytest.mark.parametrize("where", [APART, TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("staleness", [1, 2])
def test_its_nodes_lead_and_a_save_keeps_what_they_make(staleness, where):
    plan = plan_of(graph_of(staleness), where)
    leads = {node.name: node.lead for node in plan.nodes}
    ahead = {"fetch", "actor_generate", "save_samples_of_actor_generate"}
    assert {name for name, lead in leads.items() if lead} == ahead
    assert {leads[name] for name in ahead} == {staleness}
    waiting = {name for name in leads if "actor_generate" in plan.node(name).after_previous}
    assert bool(waiting) == (staleness == 1)
    reader = "actor_generate" if where is TOGETHER else "reallocate_actor_to_actor_generate"
    assert any("actor_train" in plan.node(name).after_previous for name in (reader, "actor_train"))
    order = [node.name for node in plan.nodes]
    assert order.index(reader) < order.index("actor_train")


def made_for(plan, staleness: int) -> dict[str, str]:
    """Node -> the node that has brought the samples on which it works, so many iterations before."""
    return {
        node.name: "actor_generate" if "actor_generate" in node.name else "fetch"
        for node in plan.nodes
        if isinstance(node, TransferNode) and not node.lead
    } | {"actor_train": "actor_generate", "reward_inference": "actor_generate"}


@pytest.mark.parametrize("where", [APART, TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("staleness", [1, 2])
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
@settings(max_examples=25)
def test_in_the_replay_nothing_is_read_before_it_is_made_nor_drawn_by_another_version(
    staleness, where, drawn
):
    """The replay shares no code with the planner; what it must keep is said here once more."""
    plan = plan_of(graph_of(staleness), where)
    seconds = {node.name: 0.125 for node in plan.nodes} | dict(zip(LONG, map(float, drawn), strict=True))
    runs = {(run.iteration, run.node): run for run in replay(plan, seconds, 9)}
    reader = "actor_generate" if where is TOGETHER else "reallocate_actor_to_actor_generate"
    for (t, name), run in runs.items():
        source = made_for(plan, staleness).get(name)
        if source and t >= staleness:
            assert run.start_s >= runs[t - staleness, source].end_s
        if name == reader and t:  # version t, for the samples of t + staleness
            assert run.start_s >= runs[t - 1, "actor_train"].end_s
            assert run.end_s <= runs[t, "actor_train"].start_s


@pytest.mark.parametrize("staleness", [0, 1, 2])
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3))
@settings(max_examples=25)
def test_the_steady_state_of_a_pipeline_by_enumeration(staleness, drawn):
    """Generation, scoring and training on devices of their own: the slowest, or the cycle of all over its delay.

    With more than one iteration ahead it is no shorter: the transfer of what was drawn stands after the generation
    of the iteration before.
    """
    plan = plan_of(graph_of(staleness), APART)
    seconds = dict.fromkeys((node.name for node in plan.nodes), 0.0)
    seconds |= dict(zip(LONG, map(float, drawn), strict=True))
    wanted = max(*drawn, sum(drawn) / (1 + min(staleness, 1)))
    assert steady_state(plan, seconds).iteration_time_s == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    ends = [0.0] * 60
    for run in replay(plan, seconds, 60):
        ends[run.iteration] = max(ends[run.iteration], run.end_s)
    assert (ends[59] - ends[35]) / 24 == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_on_the_same_devices_nothing_is_gained():
    seconds = dict(zip(LONG, (3.0, 2.0, 4.0), strict=True))
    for staleness in (0, 1, 2):
        plan = plan_of(graph_of(staleness), TOGETHER)
        taken = dict.fromkeys((node.name for node in plan.nodes), 0.0) | seconds
        assert steady_state(plan, taken).iteration_time_s == 9.0


@pytest.mark.parametrize("chunks", [1, 2])
def test_parts_lead_alike(chunks):
    plan = plan_of(graph_of(1, chunks), APART)
    drawing = [
        node for node in plan.nodes if isinstance(node, CallNode) and node.call.name == "actor_generate"
    ]
    assert [node.lead for node in drawing] == [1] * chunks
    (fetch,) = (node for node in plan.nodes if isinstance(node, FetchNode))
    assert fetch.lead == 1


def test_a_call_that_runs_ahead_of_what_it_reads_is_refused():
    grpo = algorithm("grpo")
    generate, score, train = grpo.graph(SIZES)
    with pytest.raises(GraphError, match="'reward_inference' runs 1 iterations ahead of 'actor_generate'"):
        DataflowGraph([generate, score.model_copy(update={"lead": 1}), train], grpo.dataset_keys)
    rounds = in_rounds([*drawn_ahead_by(1, [generate, score, train])[:2], train], 2)
    with pytest.raises(GraphError, match=r"'more_groups' is decided by .*'actor_generate' works for later"):
        DataflowGraph(rounds, grpo.dataset_keys)
