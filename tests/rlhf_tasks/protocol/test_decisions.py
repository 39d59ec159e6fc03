"""Decisions: what their functions may read, when they are made, who waits for them, what a resumed run compares."""

import functools
import math
import os
import random
import time

import pytest

from prefect_rlhf.rlhf_tasks.protocol.decisions import DecisionError, Decisions, pure
from prefect_rlhf.rlhf_tasks.spec import CallNode, Decision, NodeKey, NodeResult, Part
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from tests.rlhf_tasks.protocol.ledgers import key, pair_plan, running
from tests.rlhf_tasks.protocol.plans import small_plan

BOUND, seen = 0.5, []


def above(before, metrics, bound=BOUND):
    return before + scaled(metrics["reward"]) * (metrics["reward"] > bound)


def scaled(value):
    return math.sqrt(max(value, 0.0)) ** 2


def by_clock(before, metrics):
    return time.time()


def by_environment(before, metrics):
    return float(os.environ.get("STOP", "0"))


def by_chance(before, metrics):
    return random.random()


def by_import(before, metrics):
    import torch

    return torch.ones(1).item()


def by_memory(before, metrics):
    seen.append(metrics)
    return len(seen)


def inside(before, metrics):
    return sum(float(open("x").read()) for _ in range(1))


def through_another(before, metrics):
    return by_clock(before, metrics)


def privately(before, metrics):
    return metrics.__class__.__base__


def by_own_attribute(before, metrics):
    by_own_attribute.number = 1.0
    return 0.0


def first_of_a_set(before, metrics):
    return metrics[min(set(metrics), key=len)]


def in_order_of_a_set(before, metrics):
    return sum(metrics[name] for name in {"reward", "kl"})


def of_a_set(before, metrics):
    return metrics[min({*metrics}, key=len)]


def member(before, metrics):
    return sum(value for name, value in metrics.items() if name in {"reward", "kl"})


def made(bound):
    def around(before, metrics):
        return bound

    return around


closed = made(3.0)


def of(function, name="more", **fields):
    return Decision(name=name, function=f"{__name__}:{function}", **fields)


def test_a_function_of_its_arguments_constants_and_mathematics_is_taken():
    assert pure(of("above"))(1.0, {"reward": 4.0}, bound=3.0) == 5.0


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        ("by_clock", "the module 'time'"),
        ("by_environment", "the module 'os'"),
        ("by_chance", "the module 'random'"),
        ("by_import", "'torch'"),
        ("by_memory", "'seen'"),
        ("inside", "'open'"),
        ("through_another", "the module 'time'"),
        ("privately", "'__class__'"),
        ("by_own_attribute", "'number'"),
        ("first_of_a_set", "'set'"),
        ("in_order_of_a_set", "the order of a set"),
        ("of_a_set", "the order of a set"),
        ("closed", "the variable 'bound' around it"),
        ("functools", "what is no function"),
    ],
)
def test_a_function_that_reads_what_no_journal_has_is_refused(function, reads):
    assert functools
    with pytest.raises(
        ConfigError, match=rf"^the decision 'more' \(.*:{function}\) reads {reads}, which no journal"
    ):
        pure(of(function))


def test_whether_a_set_has_something_depends_on_no_order():
    assert pure(of("member"))(0.0, {"reward": 1.0, "kl": 2.0, "loss": 4.0}) == 3.0


def test_a_function_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"'more' is made by .*:nowhere, which cannot be imported"):
        pure(of("nowhere"))


def plan_of(**changes):
    """`small_plan`, whose calls have other fields. changes: call -> its fields"""
    nodes = tuple(
        node.model_copy(update={"call": node.call.model_copy(update=changes.get(node.call.name, {}))})
        if isinstance(node, CallNode)
        else node
        for node in small_plan().nodes
    )
    return small_plan().model_copy(update={"nodes": nodes})


def result(iteration, node, **metrics):
    key = NodeKey("run", 1, 0, iteration, node)
    return NodeResult(key=key, rank=0, started_s=0.0, ended_s=1.0, metrics=metrics)


CALLS = [node.name for node in small_plan().nodes if isinstance(node, CallNode)]
FIRST, LAST = CALLS[0], CALLS[-1]


def test_who_leads_to_the_deciding_call_reads_the_iteration_before_and_who_follows_this_one():
    plan = plan_of(**{LAST: {"decides": (of("above"),)}, FIRST: {"when": "more"}})
    decisions = Decisions(plan)
    assert decisions.values(0, FIRST) == {"more": 0.0}, "the first one"
    assert not decisions.runs(0, FIRST)
    assert decisions.values(1, FIRST) is None, "iteration 0 has not decided"
    decisions.make(0, LAST, result(0, LAST, reward=4.0))
    assert decisions.values(1, FIRST) == {"more": 4.0}
    decisions.make(1, LAST, result(1, LAST, reward=0.25))
    assert decisions.values(2, FIRST) == {"more": 4.0}, "`before`, since 0.25 is not above the bound"

    plan = plan_of(**{FIRST: {"decides": (of("above"),)}, LAST: {"when": "more"}})
    decisions = Decisions(plan)
    assert decisions.values(0, LAST) is None
    decisions.make(0, FIRST, result(0, FIRST, reward=4.0))
    assert decisions.values(0, LAST) == {"more": 4.0}


def test_a_call_that_decides_whether_it_runs_itself_reads_the_iteration_before():
    plan = plan_of(**{LAST: {"decides": (of("above", first=1.0),), "when": "more"}})
    decisions = Decisions(plan)
    assert decisions.values(0, LAST) == {"more": 1.0}
    decisions.make(0, LAST, result(0, LAST, reward=4.0))
    assert decisions.values(1, LAST) == {"more": 5.0}


def test_what_is_decided_and_of_what_is_in_the_result():
    decisions = Decisions(plan_of(**{LAST: {"decides": (of("above", constants={"bound": 1.0}),)}}))
    told = decisions.make(0, LAST, result(0, LAST, reward=4.0, kl=math.inf))
    assert told.metrics == {"reward": 4.0, "kl": math.inf, "decided/more": 4.0}
    assert told.details["decided"] == {
        "metrics": {"reward": 4.0},
        "decided": {"more": {"before": 0.0, "constants": {"bound": 1.0}, "ran": True, "value": 4.0}},
    }


@pytest.mark.parametrize(
    ("function", "metrics", "message"),
    [
        ("above", {"kl": 1.0}, "has raised KeyError: 'reward'. The call's metrics are kl"),
        ("huge", {"reward": 1.0}, "has given inf, which is no finite number"),
    ],
)
def test_a_decision_that_cannot_be_made_says_why(function, metrics, message):
    decisions = Decisions(plan_of(**{LAST: {"decides": (of(function),)}}))
    with pytest.raises(DecisionError, match=message):
        decisions.make(0, LAST, result(0, LAST, **metrics))


def huge(before, metrics):
    return math.inf


def lines(plan, *rewards):
    """The journal's lines of iterations with these rewards."""
    decisions, written = Decisions(plan), []
    for iteration, reward in enumerate(rewards):
        told = decisions.make(iteration, LAST, result(iteration, LAST, reward=reward))
        written.append({"iteration": iteration, "node": LAST, "decided": told.details["decided"]})
    return written


def test_a_resumed_attempt_continues_from_the_journal():
    plan = plan_of(**{LAST: {"decides": (of("above"),)}, FIRST: {"when": "more"}})
    assert Decisions(plan, lines(plan, 4.0, 9.0)).values(2, FIRST) == {"more": 13.0}


def test_a_function_that_has_changed_since_is_named_with_what_it_decides_now():
    plan = plan_of(**{LAST: {"decides": (of("above"),)}})
    written = lines(plan, 4.0, 9.0)
    other = plan_of(**{LAST: {"decides": (of("scaled_down"),)}})
    with pytest.raises(
        DecisionError, match=r"'more' of iteration 2 was 13, and would be 9 now: .*:scaled_down has"
    ):
        Decisions(other, written)


def scaled_down(before, metrics, bound=0.0):
    return metrics["reward"]


def test_other_constants_change_what_comes_and_not_what_was():
    plan = plan_of(**{LAST: {"decides": (of("above", constants={"bound": 5.0}),)}})
    other = plan_of(**{LAST: {"decides": (of("above", constants={"bound": 1.0}),)}})
    decisions = Decisions(other, lines(plan, 4.0, 9.0))
    told = decisions.make(2, LAST, result(2, LAST, reward=4.0))
    assert told.metrics["decided/more"] == 13.0


def test_the_iteration_that_decides_to_stop_is_the_last_one():
    decisions = Decisions(plan_of(**{LAST: {"decides": (of("above", "stop"),)}}))
    assert decisions.stops(0) is None
    decisions.make(0, LAST, result(0, LAST, reward=0.25))
    assert decisions.stops(0) is False
    decisions.make(1, LAST, result(1, LAST, reward=4.0))
    assert decisions.stops(1) is True
    decisions.forget(0, 1)
    assert decisions.stops(1) is None
    assert decisions.stops(0) is False


def falls(before, metrics):
    return before - metrics["reward"]


def test_two_decisions_of_a_call_of_which_one_is_made_after_each_part():
    parts = in_parts(3, of("falls", "left", first=10.0, each_part=True), of("above", "whole"))
    decisions = Decisions(parts)
    told = [decisions.make(0, node, result(0, node, reward=2.0)).metrics for node in parts_of(3)]
    assert [metrics["decided/left"] for metrics in told] == [8.0, 6.0, 4.0]


def parts_of(chunks):
    return [f"values_{number}" for number in range(chunks)] if chunks > 1 else ["values"]


def in_parts(chunks, *decides):
    """`small_plan`, whose call `values` is cut into parts, and decides."""
    nodes = []
    for node in small_plan().nodes:
        if node.name != "values":
            nodes.append(node)
            continue
        call = node.call.model_copy(update={"chunks": chunks, "decides": decides})
        for number, name in enumerate(call.nodes):
            part = Part(number, chunks)
            nodes.append(node.model_copy(update={"name": name, "call": call, "part": part}))
    return small_plan().model_copy(update={"nodes": tuple(nodes)})


@pytest.mark.parametrize("each_part", [False, True])
@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2), (3, 2), (2, 3), (2, 2)])
def test_a_run_that_is_resumed_with_other_parts_has_decided_the_same(then, now, each_part):
    decides = of("falls", "rows", first=10.0, each_part=each_part), of("above", "stop")
    decisions, written = Decisions(in_parts(then, *decides)), []
    for iteration in range(3):
        for node in decisions.made_after:
            told = decisions.make(iteration, node, result(iteration, node, reward=iteration - 0.5))
            written.append({"iteration": iteration, "node": node, "decided": told.details["decided"]})
    resumed = Decisions(in_parts(now, *decides), written, first_iteration=3)
    assert resumed.values(3, "generate") == decisions.values(3, "generate") != {"rows": 10.0}
    assert resumed.stops(2) is decisions.stops(2) is True
    if not each_part:
        node = parts_of(now)[-1]
        told = resumed.make(3, node, result(3, node, reward=0.0)).details["decided"]["decided"]["rows"]
        assert told["before"] == decisions.values(3, "generate")["rows"]


def test_a_decision_that_a_resumed_run_had_not_begins_with_its_first_value():
    older = in_parts(1, of("above", "stop"))
    decisions = Decisions(older)
    told = decisions.make(0, "values", result(0, "values", reward=0.25))
    written = [{"iteration": 0, "node": "values", "decided": told.details["decided"]}]
    newer = in_parts(1, of("above", "stop"), of("above", "rows", first=0.5))
    for past in (written, []):
        resumed = Decisions(newer, past, first_iteration=3)
        assert resumed.values(3, "generate") == {"rows": 0.5}
        assert resumed.values(4, "generate") is None, "iteration 3 decides"


def test_a_decision_that_an_older_attempt_had_continues_from_the_last_one():
    decisions = Decisions(in_parts(1, of("falls", "rows", first=10.0)))
    told = decisions.make(0, "values", result(0, "values", reward=4.0))
    written = [{"iteration": 0, "node": "values", "decided": told.details["decided"]}]
    resumed = Decisions(in_parts(1, of("falls", "rows", first=10.0)), written, first_iteration=3)
    assert resumed.values(3, "generate") == {"rows": 6.0}
    assert resumed.make(3, "values", result(3, "values", reward=1.0)).metrics["decided/rows"] == 5.0


def test_decisions_are_not_made_of_what_a_clock_gives():
    decisions = Decisions(plan_of(**{LAST: {"decides": (of("count"),)}}))
    metrics = {"reward": 4.0, "throughput/tokens_per_s": 5.0}
    told = decisions.make(0, LAST, result(0, LAST, **metrics))
    assert told.metrics == {**metrics, "decided/more": 1.0}
    assert told.details["decided"]["metrics"] == {"reward": 4.0}


def count(before, metrics):
    return len(metrics)


def test_an_iteration_that_has_decided_to_stop_and_is_lost_is_the_last_one_no_more():
    plan = pair_plan()
    train, save = plan.nodes
    call = train.call.model_copy(update={"decides": (of("above", "stop"),)})
    books = running(plan=plan.model_copy(update={"nodes": (train.model_copy(update={"call": call}), save)}))
    books.enter(0, 0, 0)
    for rank in (0, 1):
        books.rank_done(
            NodeResult(key=key("train"), rank=rank, started_s=0.0, ended_s=1.0, metrics={"reward": 4.0}), 1
        )
    assert books.last_iteration == 0
    books.rank_lost(0, "killed", 2)
    assert books.last_iteration == 8, "what it was before; the iteration decides again"
