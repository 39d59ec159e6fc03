"""Orders of calls and of nodes, and where the inserted nodes stand."""

import random

import networkx as nx
import pytest

from planner.plan import order as ordering
from planner.plan.build import PlanError, build_plan
from planner.plan.mesh import Cluster
from planner.plan.order import OrderProblem, OrderRule, call_orders, levels, total_order, with_trailing
from planner.plan.template import PlanTemplate, Slot
from planner.report.report import plan_document
from rlhf_tasks.config.cluster import ManualAssignment


def test_ppo_has_twelve_orders_and_its_own_first(make_graph):
    graph = make_graph()
    orders = call_orders(graph)
    assert len(set(orders)) == 3 * 2 * 2
    assert orders[0] == tuple(call.name for call in graph.calls)
    for order in orders:
        place = {name: i for i, name in enumerate(order)}
        assert all(place[a] < place[b] for a, b in graph.digraph.edges)


def test_levels_are_depths(make_graph):
    found = levels(make_graph())
    assert found["actor_generate"] == 0
    assert {found[name] for name in ("reward_inference", "ref_inference", "critic_inference")} == {1}
    assert found["critic_train"] == 2


@pytest.fixture
def scattered(make_graph, assign):
    """Every call on a device of its own."""
    graph = make_graph()
    return graph, {call.name: assign([i]) for i, call in enumerate(graph.calls)}


def test_transfers_of_a_level_come_before_its_calls_and_copies_late(scattered):
    graph, places = scattered
    for order in call_orders(graph):
        names = [node.name for node in build_plan(graph, places, Cluster(1, 8), call_order=order).nodes]
        at = {name: i for i, name in enumerate(names)}
        assert [name for name in names if name in order] == list(order)
        assert names[0] == "fetch"
        first_inference = min(at[name] for name in order[1:4])
        assert all(
            at[n] < first_inference for n in names if "transfer_actor_generate" in n and "inference" in n
        )
        assert names[at["critic_inference"] - 1] == "reallocate_critic_to_critic_inference"
        assert names[at["critic_inference"] + 1] == "release_critic_of_critic_inference"
        assert names[at["actor_train"] + 1] == "save_actor"


def test_onloads_of_a_level_come_before_its_transfers(scattered, assign):
    """So that their copies overlap generation on other devices, and transfers and earlier calls on the same."""
    graph, places = scattered
    for name in ("ref_inference", "reward_inference"):
        places[name] = places[name].model_copy(update={"offload": True})
    for order in call_orders(graph):
        names = [node.name for node in build_plan(graph, places, Cluster(1, 8), call_order=order).nodes]
        scorers = [name for name in order if name in ("ref_inference", "reward_inference")]
        onloads = [f"onload_{name.split('_')[0]}_to_{name}" for name in scorers]
        start = names.index("release_actor_of_actor_generate") + 1
        assert names[start : start + 2] == onloads
        for name in scorers:
            assert names[names.index(name) + 1] == f"offload_{name.split('_')[0]}_of_{name}"


def test_what_a_slot_needs_outweighs_where_it_would_like_to_be():
    """A transfer would like to stand before the first call of its level, but brings what that call makes."""
    made = PlanTemplate()
    for name in ("a", "b", "c"):
        made.add(Slot(name, "call", name, name), after={"transfer"} if name == "b" else set())
    made.add(Slot("transfer", "transfer", "b", "a"), after={"a"})
    made.add(Slot("save", "save", "a", "a"), after={"a"})
    orders = [("a", "b", "c"), ("c", "a", "b")]
    places = with_trailing(made, OrderRule(dict.fromkeys("abc", 0), orders).places(made))
    names = [[list(made.slots)[i] for i in row.argsort()] for row in places]
    assert names == [["a", "save", "transfer", "b", "c"], ["c", "a", "save", "transfer", "b"]]


def test_every_order_is_legal(scattered):
    graph, places = scattered
    for order in call_orders(graph):
        plan = build_plan(graph, places, Cluster(1, 8), call_order=order)
        place = {node.name: i for i, node in enumerate(plan.nodes)}
        edges = [(before, node.name) for node in plan.nodes for before in node.after]
        assert all(place[a] < place[b] for a, b in edges)
        assert nx.is_directed_acyclic_graph(nx.DiGraph(edges))


def test_impossible_orders_are_refused(scattered):
    graph, places = scattered
    names = [call.name for call in graph.calls]
    with pytest.raises(PlanError, match="'actor_train' stands before 'reward_inference'"):
        build_plan(graph, places, Cluster(1, 8), call_order=[names[0], names[4], *names[1:4], names[5]])
    with pytest.raises(PlanError, match="does not name each call of ppo once"):
        build_plan(graph, places, Cluster(1, 8), call_order=names[:-1])


def test_assignments_carry_the_order_of_their_plan(scattered):
    graph, places = scattered
    plans = []
    for order in call_orders(graph):
        plan = build_plan(graph, places, Cluster(1, 8), call_order=order)
        given = {name: ManualAssignment(**fields) for name, fields in plan_document(plan).items()}
        again = {name: manual.assignment(8) for name, manual in given.items()}
        assert build_plan(graph, again, Cluster(1, 8)) == plan
        plans.append(plan)
    assert len({tuple(node.name for node in plan.nodes) for plan in plans}) == len(plans)
    found = build_plan(graph, places, Cluster(1, 8))
    assert all("order" not in fields for fields in plan_document(found).values())


def test_orders_of_some_calls_only_are_refused(scattered):
    graph, places = scattered

    def placed(**order: int):
        ordered = {name: places[name].model_copy(update={"order": at}) for name, at in order.items()}
        return build_plan(graph, {**places, **ordered}, Cluster(1, 8))

    with pytest.raises(PlanError, match=r"\(actor_generate: 0\), but reward_inference, .* have none"):
        placed(actor_generate=0)
    every = {call.name: i for i, call in enumerate(graph.calls)}
    with pytest.raises(PlanError, match="two are equal"):
        placed(**{**every, "actor_train": 0})
    with pytest.raises(PlanError, match="'actor_train' stands before 'actor_generate'"):
        placed(**{**every, "actor_train": -1})


def problem(**more) -> OrderProblem:
    """`long` (device 0) and `short` (device 1) follow `start` (0); `join` needs both devices and only
    `short`."""
    nodes = {"start": {0}, "long": {0}, "short": {1}, "join": {0, 1}}
    after = {"start": set(), "long": {"start"}, "short": set(), "join": {"short"}}
    defaults = {
        "after": {n: frozenset(before) for n, before in after.items()},
        "across": {n: frozenset() for n in nodes},
        "devices": {n: frozenset(mesh) for n, mesh in nodes.items()},
        "duration_s": {"start": 1.0, "long": 5.0, "short": 1.0, "join": 1.0},
    }
    return OrderProblem(**{**defaults, **more})


def test_the_order_is_topological():
    order = total_order(problem())
    assert order.index("start") < order.index("long")
    assert order.index("short") < order.index("join")


def test_a_small_node_that_feeds_others_goes_before_a_long_one_on_its_device():
    """`send` (devices 0, 1) feeds `other` on device 1; put after `long`, it would serialise them."""
    sending = OrderProblem(
        after={
            "make": frozenset(),
            "long": frozenset({"make"}),
            "send": frozenset({"make"}),
            "other": frozenset({"send"}),
        },
        across={
            "make": frozenset({"long", "other"}),
            "long": frozenset(),
            "send": frozenset(),
            "other": frozenset(),
        },
        devices={
            "make": frozenset({0}),
            "long": frozenset({0}),
            "send": frozenset({0, 1}),
            "other": frozenset({1}),
        },
        duration_s={"make": 1.0, "long": 6.0, "send": 0.1, "other": 5.0},
    )
    order = total_order(sending)
    assert order.index("send") < order.index("long")


def test_a_node_goes_ahead_with_all_that_it_waits_for():
    """Two sends (devices 0, 1) feed `other` on device 1; either of them after `long` serialises the two, so that
    moving one alone gains nothing."""
    after = {"make": (), "long": ("make",), "send": ("make",), "tell": ("make",), "other": ("send", "tell")}
    devices = {"make": {0}, "long": {0}, "send": {0, 1}, "tell": {0, 1}, "other": {1}}
    across = {**dict.fromkeys(after, ()), "make": ("long", "other")}
    sending = OrderProblem(
        after={node: frozenset(before) for node, before in after.items()},
        across={node: frozenset(before) for node, before in across.items()},
        devices={node: frozenset(mesh) for node, mesh in devices.items()},
        duration_s={"make": 1.0, "long": 6.0, "send": 0.1, "tell": 0.1, "other": 5.0},
    )
    order = total_order(sending)
    assert max(order.index("send"), order.index("tell")) < order.index("long")


def test_late_nodes_wait_when_that_costs_nothing():
    copying = OrderProblem(
        after={"copy": frozenset(), "work": frozenset(), "use": frozenset({"copy", "work"})},
        across={n: frozenset() for n in ("copy", "work", "use")},
        devices={n: frozenset({0}) for n in ("copy", "work", "use")},
        duration_s={"copy": 1.0, "work": 2.0, "use": 3.0},
        late=frozenset({"copy"}),
    )
    assert total_order(copying) == ["work", "copy", "use"]


def test_an_onload_is_as_late_as_its_copy_overlaps():
    """Twice the copy of 1 s fits beside the second piece of work; before the first it would hold memory longer."""
    names = ("onload", "first", "second", "read")
    before = {"first": set(), "second": {"first"}, "read": {"second", "onload"}, "onload": set()}
    for copy_s, order in (
        (1.0, ["first", "onload", "second", "read"]),
        (0.0, ["first", "second", "onload", "read"]),
    ):
        loading = OrderProblem(
            after={name: frozenset(before[name]) for name in names},
            across={name: frozenset() for name in names},
            devices={name: frozenset({0}) for name in names},
            duration_s={"onload": 0.0, "first": 3.0, "second": 3.0, "read": 1.0},
            late=frozenset({"onload"}),
            copy_s={"onload": copy_s},
        )
        assert total_order(loading) == order


def drawn(seed: int) -> OrderProblem:
    """Some nodes on all of three devices, or some, each waiting for some of those before."""
    rng = random.Random(seed)
    names = [f"node {i}" for i in range(7)]
    few = rng.random() < 0.5
    return OrderProblem(
        after={n: frozenset(b for b in names[:i] if rng.random() < 0.3) for i, n in enumerate(names)},
        across={n: frozenset(b for b in names if rng.random() < 0.1) for n in names},
        devices={
            n: frozenset(rng.sample(range(3), 1 + rng.randrange(3)) if few else range(3)) for n in names
        },
        duration_s={n: rng.choice([0.01, 0.5, 1.0, 3.0]) for n in names},
        late=frozenset(rng.sample(names, 3)),
    )


@pytest.mark.parametrize("seed", range(40))
def test_orders_that_are_not_timed_would_not_have_been_chosen(seed, monkeypatch):
    found = total_order(drawn(seed))
    monkeypatch.setattr(ordering, "_least_s", lambda *_: float("-inf"))
    assert total_order(drawn(seed)) == found
