"""The compiled price of a choice against the plan that is built from it and its replay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.mesh import Cluster
from planner.price import PlanPrice, price_plan
from planner.replay import replay
from planner.tables import Tables

pytestmark = pytest.mark.timeout(600)  # the first run compiles


@pytest.fixture(scope="module")
def tables(make_problem) -> dict[str, Tables]:
    """PPO of four tiny models: roomy on three clusters, and with devices too small for most choices; and a
    rollout."""
    return {
        "1x8": Tables(make_problem(Cluster(1, 8))),
        "2x2": Tables(make_problem(Cluster(2, 2))),
        "2x4 with 12 sequences": Tables(make_problem(Cluster(2, 4), n_seqs=12)),
        "2x2 with little memory": Tables(make_problem(Cluster(2, 2), memory_bytes=100 * 2**20)),
        "rollout": Tables(make_problem(Cluster(2, 2), algorithm="rollout")),
    }


NAMES = ["1x8", "2x2", "2x4 with 12 sequences", "2x2 with little memory", "rollout"]


def draw_choice(data: st.DataObject, tables: Tables) -> list[int]:
    """An option for each call, often placed as the first call is."""
    choice: list[int] = []
    for options in tables.options:
        like = [i for i, o in enumerate(options) if choice and _alike(o, tables.options[0][choice[0]])]
        anything = st.integers(0, len(options) - 1)
        choice.append(data.draw(st.one_of(anything, st.sampled_from(like)) if like else anything))
    return choice


def _alike(a, b) -> bool:
    return (a.first, a.strategy) == (b.first, b.strategy)


def peak(price: PlanPrice) -> float:
    return max(peak.total_bytes for peak in price.peaks.values())


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@settings(deadline=None, max_examples=12)
def test_a_choice_costs_what_its_plan_costs(tables, name, data):
    """Under the order that was found best, which is the best of all orders."""
    found = tables[name]
    memory = found.problem.model.device.memory_bytes
    choice = draw_choice(data, found)
    value = found.evaluate(choice)
    prices = [price_plan(found.plan_in(choice, n), found.problem.model) for n in range(len(found.orders))]
    times = [(max(0.0, peak(price) - memory), price.iteration_time_s) for price in prices]
    assert value.excess_bytes == pytest.approx(times[value.order][0], rel=1e-9)
    assert value.time_s == pytest.approx(times[value.order][1], rel=1e-9)
    least = min(excess for excess, _ in times)
    assert value.excess_bytes == pytest.approx(least, rel=1e-9)
    fitting = [time_s for excess, time_s in times if excess <= least * (1 + 1e-9)]
    assert value.time_s == pytest.approx(min(fitting), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@settings(deadline=None, max_examples=6)
def test_the_replay_settles_at_the_time_and_no_device_works_longer(tables, name, data):
    found = tables[name]
    choice = draw_choice(data, found)
    time_s, plan = found.evaluate(choice).time_s, found.plan(choice)
    seconds = price_plan(plan, found.problem.model).duration_s
    for device in range(plan.n_devices):
        assert time_s >= sum(seconds[node.name] for node in plan.on(device)) * (1 - 1e-9)
    ends = [0.0] * 61
    for run in replay(plan, seconds, 61):
        ends[run.iteration] = max(ends[run.iteration], run.end_s)
    # Periods of up to 4 iterations divide the span
    assert (ends[60] - ends[36]) / 24 == pytest.approx(time_s, rel=1e-6)


@given(st.data())
@settings(deadline=None, max_examples=20)
def test_mirrored_hosts_cost_the_same(tables, data):
    """Hosts are alike: exchanging the two of them changes no time."""
    found = tables["2x2"]
    choice = draw_choice(data, found)
    mirrored = []
    for options, number in zip(found.options, choice, strict=True):
        option = options[number]
        first = option.first if option.size > 2 else (option.first + 2) % 4
        twin = (first, option.strategy, option.micro_batches)
        mirrored.append([(o.first, o.strategy, o.micro_batches) for o in options].index(twin))
    assert found.evaluate(mirrored)[:2] == pytest.approx(found.evaluate(choice)[:2], rel=1e-9)


@given(st.data(), st.sampled_from([0.5, 4.0]))
@settings(deadline=None, max_examples=15)
def test_scaling_all_times_scales_the_result(make_problem, data, scale):
    plain, scaled = (Tables(make_problem(Cluster(2, 2), slower=factor)) for factor in (1.0, scale))
    choice = draw_choice(data, plain)
    assert scaled.evaluate(choice).time_s == pytest.approx(scale * plain.evaluate(choice).time_s, rel=1e-9)
