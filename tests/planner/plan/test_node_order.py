import random

import pytest

from planner.plan import node_order as ordering
from planner.plan.node_order import OrderProblem, total_order


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
    """`send` (devices 0, 1) feeds `other` on device 1; put behind `long`, it would serialise them."""
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
    """Two sends (devices 0, 1) feed `other` on device 1; either of them behind `long` serialises the two, so that
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
