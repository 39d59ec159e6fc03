"""The steady state by hand, by enumeration of cycles, and against the independent replay."""

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.planner.plan.steady_state import Edge, max_cycle_ratio, steady_state
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, SaveNode
from tests.planner.replay import Execution, replay


def plan_of(nodes: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]]) -> ExecutionPlan:
    """name -> (devices, after, after_previous); the kind of node does not matter here."""
    made = [
        SaveNode(
            name=name,
            role="r",
            placement=Placement(devices, ParallelStrategy(len(devices))),
            after=after,
            after_previous=previous,
        )
        for name, (devices, after, previous) in nodes.items()
    ]
    return ExecutionPlan(
        algorithm="x", n_devices=9, devices_per_host=9, n_seqs=1, roles={}, nodes=tuple(made)
    )


def settled_period(
    plan: ExecutionPlan, seconds: dict[str, float], copy_s: dict[str, float] | None = None
) -> float:
    """Mean seconds per iteration once the replay repeats itself; exact for integer seconds.

    What comes after iteration t is a function of the ends in t and t - 1: when these are, relative to the last of
    them, what they were p iterations ago, so is everything that follows.
    """
    for iterations in (100, 1_000, 10_000):
        ends: list[dict[str, float]] = [{} for _ in range(iterations)]
        for execution in replay(plan, seconds, iterations, copy_s):
            ends[execution.iteration][execution.node] = execution.end_s
        seen: dict[tuple[float, ...], tuple[int, float]] = {}
        for t in range(1, iterations):
            now = max(ends[t].values())
            state = tuple(now - ends[i][node.name] for i in (t - 1, t) for node in plan.nodes)
            if state in seen:
                before, then = seen[state]
                return (now - then) / (t - before)
            seen[state] = t, now
    raise AssertionError("the replay has not settled")


def test_one_device_takes_the_sum():
    plan = plan_of({"a": ((0,), (), ()), "b": ((0,), ("a",), ())})
    state = steady_state(plan, {"a": 2.0, "b": 3.0})
    assert state.iteration_time_s == 5.0
    assert set(state.cycle) == {"a", "b"}
    assert state.start_s == {"a": 0.0, "b": 2.0}


def test_iterations_overlap_on_disjoint_devices():
    """Generation of t + 1 beside the training of t: the slower of the two counts, not the sum."""
    free = plan_of({"a": ((0,), (), ()), "b": ((1,), ("a",), ())})
    assert steady_state(free, {"a": 2.0, "b": 3.0}).iteration_time_s == 3.0
    bound = plan_of({"a": ((0,), (), ("b",)), "b": ((1,), ("a",), ())})
    assert steady_state(bound, {"a": 2.0, "b": 3.0}).iteration_time_s == 5.0


def test_at_most_two_iterations_are_in_flight():
    """Three stages of 1 s on three devices could run one iteration per second if three were in flight."""
    plan = plan_of({"a": ((0,), (), ()), "b": ((1,), ("a",), ()), "c": ((2,), ("b",), ())})
    state = steady_state(plan, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert state.iteration_time_s == 1.5
    assert set(state.cycle) == {"a", "b", "c"}


def test_the_order_on_a_shared_device_counts():
    """`send` occupies both devices; after the long node it makes the other device wait."""
    late = {"long": ((0,), (), ()), "send": ((0, 1), (), ()), "other": ((1,), ("send",), ("other",))}
    early = {name: late[name] for name in ("send", "long", "other")}
    seconds = {"long": 5.0, "send": 1.0, "other": 5.0}
    assert steady_state(plan_of(early), seconds).iteration_time_s == 6.0
    assert steady_state(plan_of(late), seconds).iteration_time_s == 6.0  # iterations overlap instead
    late["long"] = ((0,), (), ("other",))
    early["long"] = late["long"]
    assert steady_state(plan_of(early), seconds).iteration_time_s == 6.0 + 5.0 - 5.0
    assert steady_state(plan_of(late), seconds).iteration_time_s == 11.0


def test_a_longer_node_outside_the_cycle_changes_nothing():
    plan = plan_of({"a": ((0,), (), ()), "b": ((1,), (), ())})
    state = steady_state(plan, {"a": 2.0, "b": 3.0})
    assert state.cycle == ("b",)
    assert steady_state(plan, {"a": 2.9, "b": 3.0}).iteration_time_s == 3.0


@st.composite
def strongly_connected(draw):
    """A ring through all nodes and further edges; edges that do not lead forward have a delay."""
    n = draw(st.integers(2, 6))
    pairs = [(i, (i + 1) % n) for i in range(n)]
    pairs += draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=10))
    edges = [Edge(a, b, draw(st.integers(0 if a < b else 1, 2))) for a, b in pairs]
    return draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), edges


@given(strongly_connected())
def test_howard_equals_enumeration_of_all_cycles(problem):
    seconds, edges = problem
    graph = nx.DiGraph()
    for a, b, delay in edges:
        delays = graph.edges[a, b]["delay"] if graph.has_edge(a, b) else delay
        graph.add_edge(a, b, delay=min(delay, delays))
    best = max(
        sum(seconds[i] for i in cycle)
        / sum(graph.edges[a, b]["delay"] for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        for cycle in nx.simple_cycles(graph)
    )
    ratio, cycle = max_cycle_ratio(seconds, edges)
    assert ratio == pytest.approx(best, abs=1e-9)
    assert sum(seconds[i] for i in cycle) == pytest.approx(
        ratio * sum(graph.edges[a, b]["delay"] for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    )


def test_replay_by_hand():
    plan = plan_of({"a": ((0,), (), ()), "b": ((1,), ("a",), ()), "c": ((0, 1), (), ())})
    found = replay(plan, {"a": 2.0, "b": 3.0, "c": 1.0}, 2)
    assert found == [
        Execution(0, "a", 0.0, 2.0),
        Execution(0, "b", 2.0, 5.0),
        Execution(0, "c", 5.0, 6.0),
        Execution(1, "a", 6.0, 8.0),
        Execution(1, "b", 8.0, 11.0),
        Execution(1, "c", 11.0, 12.0),
    ]


def test_a_copy_overlaps_work_and_its_reader_waits():
    """The copy of 4 s begins when its onload has ended, at 1 s, beside work of 3 s; then the reader takes 2 s."""
    plan = plan_of({"on": ((0,), (), ()), "work": ((0,), (), ()), "read": ((0,), ("on",), ())})
    seconds, copies = {"on": 1.0, "work": 3.0, "read": 2.0}, {"on": 4.0}
    assert steady_state(plan, seconds, copies).iteration_time_s == 7.0
    assert steady_state(plan, seconds, copies).start_s == {"on": 0.0, "work": 1.0, "read": 5.0}
    assert steady_state(plan, seconds, copies).cycle == ("on", "read")
    assert steady_state(plan, seconds, {"on": 3.0}).iteration_time_s == 6.0
    assert replay(plan, seconds, 1, copies)[-1] == Execution(0, "read", 5.0, 7.0)


def test_copies_to_one_device_follow_one_another():
    """Two copies of 4 s to device 0 take 8 s, those to devices of their own 4 s."""
    for second, ends in ((0, 10.0), (1, 6.0)):
        plan = plan_of(
            {
                "on": ((0,), (), ()),
                "more": ((second,), (), ()),
                "read": ((0,), ("on",), ()),
                "also": ((second,), ("more",), ()),
            }
        )
        seconds, copies = {"on": 0.0, "more": 0.0, "read": 1.0, "also": 2.0}, {"on": 4.0, "more": 4.0}
        assert max(run.end_s for run in replay(plan, seconds, 1, copies)) == ends
        assert steady_state(plan, seconds, copies).start_s["also"] == ends - 2.0


@st.composite
def plans(draw):
    """Random nodes on random devices with random edges back to earlier nodes and to the iteration before."""
    n = draw(st.integers(1, 7))
    names = [f"n{i}" for i in range(n)]
    nodes = {}
    for i, name in enumerate(names):
        devices = tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1, max_size=3))))
        after = tuple(sorted(draw(st.sets(st.sampled_from(names[:i]), max_size=2)))) if i else ()
        previous = tuple(sorted(draw(st.sets(st.sampled_from(names), max_size=1))))
        nodes[name] = devices, after, previous
    seconds = {name: float(draw(st.integers(0, 8))) for name in names}
    return plan_of(nodes), seconds


@given(plans())
def test_the_replay_settles_at_the_steady_state(drawn):
    plan, seconds = drawn
    expected = steady_state(plan, seconds).iteration_time_s
    assert settled_period(plan, seconds) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@st.composite
def plans_with_copies(draw):
    """Some nodes are onloads: each has a reader, on its devices and perhaps others."""
    plan, seconds = draw(plans())
    nodes = {node.name: [set(node.devices), set(node.after), node.after_previous] for node in plan.nodes}
    names, copies = list(nodes), {}
    for i, name in enumerate(names[:-1]):
        if draw(st.booleans()):
            copies[name] = float(draw(st.integers(0, 12)))
            reader = nodes[draw(st.sampled_from(names[i + 1 :]))]
            reader[1].add(name)
            reader[0] |= nodes[name][0]
    made = {name: (tuple(sorted(a)), tuple(sorted(b)), c) for name, (a, b, c) in nodes.items()}
    return plan_of(made), seconds, copies


@given(plans_with_copies())
def test_the_replay_settles_at_the_steady_state_with_copies(drawn):
    plan, seconds, copies = drawn
    state = steady_state(plan, seconds, copies)
    assert settled_period(plan, seconds, copies) == pytest.approx(state.iteration_time_s, rel=1e-9, abs=1e-9)
    assert state.iteration_time_s >= steady_state(plan, seconds).iteration_time_s - 1e-9
    for node in plan.nodes:
        for onload in copies.keys() & set(node.after):
            ready_s = state.start_s[onload] + seconds[onload] + copies[onload]
            assert state.start_s[node.name] >= ready_s - 1e-9


@given(plans(), st.sampled_from([0.001, 3.0]))
@settings(max_examples=30)
def test_properties(drawn, scale):
    """At least every device's load; start times are feasible; scaling times scales the result."""
    plan, seconds = drawn
    state = steady_state(plan, seconds)
    for device in range(4):
        load = sum(seconds[node.name] for node in plan.on(device))
        assert state.iteration_time_s >= load - 1e-9
    scaled = steady_state(plan, {name: scale * s for name, s in seconds.items()})
    assert scaled.iteration_time_s == pytest.approx(scale * state.iteration_time_s)
    for node in plan.nodes:
        for before in node.after:
            assert state.start_s[node.name] >= state.start_s[before] + seconds[before] - 1e-9
        for before in node.after_previous:
            end = state.start_s[before] + seconds[before] - state.iteration_time_s
            assert state.start_s[node.name] >= end - 1e-9
