"""Orders of calls and of nodes, and where the inserted nodes stand."""

import networkx as nx
import pytest

from prefect_rlhf.planner.plan.build import PlanError, build_plan
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.order import OrderRule, call_orders, fastest_order, levels, with_trailing
from prefect_rlhf.planner.plan.steady_state import work_of
from prefect_rlhf.planner.plan.template import PlanTemplate, Slot
from prefect_rlhf.planner.report import plan_document
from prefect_rlhf.rlhf_tasks.config.cluster import ByHand


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
        again = {name: ByHand.parse(text).assignment(8) for name, text in plan_document(plan).items()}
        assert build_plan(graph, again, Cluster(1, 8)) == plan
        plans.append(plan)
    assert len({tuple(node.name for node in plan.nodes) for plan in plans}) == len(plans)
    found = build_plan(graph, places, Cluster(1, 8))
    assert all("order" not in text for text in plan_document(found).values())


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


def fastest(
    seconds: dict[str, float], devices: dict[str, set[int]], *orders: str, across=None, after=None
) -> str:
    """The fastest of some orders of nodes with names of one letter."""
    work = work_of({name: set((after or {}).get(name, "")) for name in seconds}, devices, ())
    return orders[fastest_order(orders, work, across or {}, seconds)]


def test_a_small_node_that_feeds_others_goes_before_a_long_one_on_its_device():
    """`s` (devices 0, 1) sends what `m` makes to `o` on device 1; after the long `l` on device 0, it would serialise
    the two."""
    devices = {"m": {0}, "l": {0}, "s": {0, 1}, "o": {1}}
    after, across = {"l": "m", "s": "m", "o": "s"}, {"m": ("l", "o")}
    seconds = {"m": 1.0, "l": 6.0, "s": 0.1, "o": 5.0}
    assert fastest(seconds, devices, "mlso", "mslo", after=after, across=across) == "mslo"


def test_of_equally_fast_orders_the_first_is_taken():
    devices = {"a": {0}, "b": {0}, "c": {0}}
    assert fastest({"a": 1.0, "b": 2.0, "c": 3.0}, devices, "bac", "abc", "cba") == "bac"


def test_an_order_is_chosen_for_durations_that_differ_from_the_expected_ones():
    """`t` and `u` train on device 0; the next iteration's `g` on device 1 waits for `t` alone. As long as `g` takes
    no longer than both, either may come first; if it does, `t` has to."""
    devices = {"g": {1}, "t": {0}, "u": {0}}
    after, across = {"t": "g", "u": "g"}, {"g": ("t",)}
    assert fastest({"g": 1.0, "t": 1.0, "u": 1.0}, devices, "gut", "gtu", after=after, across=across) == "gtu"
