"""Bars of the steady state: every device's nodes once, inside one period."""

import pytest

from planner.plan.mesh import Cluster
from planner.pricing.plans import price_plan
from planner.report.timeline import Bar, DeviceLane, draw_bars, steady_bars


@pytest.fixture
def priced(demo_plan, ppo_cost, llama):
    small = llama(num_hidden_layers=4, hidden_size=512, intermediate_size=1024)
    return demo_plan, price_plan(demo_plan, ppo_cost(Cluster(1, 4), small))


def test_every_node_is_on_all_its_devices_for_its_whole_time(priced):
    plan, price = priced
    groups = steady_bars(plan, price)
    assert sorted(device for group in groups for device in group.devices) == [0, 1, 2, 3]
    for group in groups:
        for device in group.devices:
            nodes = {node.name for node in plan.on(device)}
            assert {bar.node for bar in group.bars} == nodes
            for name in nodes:
                shown_s = sum(bar.end_s - bar.start_s for bar in group.bars if bar.node == name)
                assert shown_s == pytest.approx(price.duration_s[name])


def test_bars_of_a_device_do_not_overlap_and_stay_inside_the_period(priced):
    plan, price = priced
    for group in steady_bars(plan, price):
        ends = 0.0
        for bar in group.bars:
            assert bar.start_s >= ends - 1e-9
            ends = bar.end_s
        assert ends <= price.iteration_time_s + 1e-9


def test_a_line_is_as_wide_as_asked_and_names_what_has_room():
    bars = (Bar("generate", "generate", 0.0, 5.0), Bar("save", "save", 9.99, 10.0))
    (line, axis) = draw_bars([DeviceLane((0, 1), bars)], 10.0, width=40)
    assert line[1:] == [("", ""), ("generate" + "─" * 11 + "┤", "generate"), (" " * 20 + "│", "")]
    assert axis[0][0].endswith("10 s")


def test_of_many_groups_the_busiest_are_drawn():
    groups = [DeviceLane((n,), (Bar("x", "train_step", 0.0, float(n)),)) for n in range(1, 31)]
    lines = draw_bars(groups, 30.0, rows=5)
    assert len(lines) == 7
    assert [line[0][0].strip(" │") for line in lines[:5]] == ["26", "27", "28", "29", "30"]
    assert "25 less busy groups" in lines[5][0][0]
