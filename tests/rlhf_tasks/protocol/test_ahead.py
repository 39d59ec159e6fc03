"""Generation that runs ahead, in the pure machines: which version draws for which iteration, and a death at every
transition. The simulated ranks check the versions, the simulated disk what a commit has."""

import functools

import pytest

from prefect_rlhf.rlhf_tasks.protocol.messages import Finished
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Deadlines, Sequencer
from prefect_rlhf.rlhf_tasks.spec import OnloadNode
from tests.rlhf_tasks.protocol.plans import ahead_plan, call, small_plan
from tests.rlhf_tasks.protocol.simulation import Controller, Rank, World
from tests.rlhf_tasks.protocol.test_faults import Trace, kill_itself

ITERATIONS = 3


def test_what_runs_ahead_comes_first_in_a_generations_first_iteration_and_has_time_for_all_that_it_draws():
    deadlines = Deadlines(5, 30, {"values": 20.0, "generate": 20.0})
    of_run = Sequencer(ahead_plan(2), "run", 1, deadlines, first_iteration=4)
    first, later = ({r.key.node: r for r in of_run.requests(t)[2]} for t in (4, 5))
    assert list(first)[:3] == ["to_generate", "generate", "save_samples"]
    assert list(later) == [node.name for node in ahead_plan(2).on(2)]
    assert [first["generate"].deadline_s, later["generate"].deadline_s] == [300, 100]
    assert first["values"].deadline_s == later["values"].deadline_s == 100
    assert [first["generate"].versions, later["generate"].versions] == [{"actor": 4}, {"actor": 5}]


@pytest.mark.parametrize("read_by", ["generate", "values"])
def test_a_copy_is_freed_with_its_last_reader_where_only_calls_that_run_ahead_read_it(read_by):
    """The plan's memory is that of its order: the first iteration must not hold more. `read_by`: its last reader."""
    plan = ahead_plan(1)
    release = plan.node("release")
    nodes = [node for node in plan.nodes if node is not release]
    if read_by == "values":  # it reads the actor's copy, besides
        values = call("values", "actor", "inference", plan.node("generate").placement)
        nodes = [values if node.name == "values" else node for node in nodes]
    held_long = plan.model_copy(update={"nodes": (*nodes, release)})
    order = [node.name for node in Sequencer(held_long, "run", 1, Deadlines(5, 30)).first_order]
    if read_by == "generate":
        assert order[:4] == ["to_generate", "generate", "save_samples", "release"]
    else:
        assert order[-1] == "release"


def test_its_copy_is_made_of_what_an_onload_has_brought():
    plan = ahead_plan(1)
    copied = plan.node("to_generate")
    onload = OnloadNode(name="onload", role="actor", placement=copied.source)
    read = copied.model_copy(update={"after": (*copied.after, onload.name)})
    other = onload.model_copy(update={"name": "other", "role": "critic"})
    nodes = (other, onload, *(read if node is copied else node for node in plan.nodes))
    of_run = Sequencer(plan.model_copy(update={"nodes": nodes}), "run", 1, Deadlines(5, 30))
    assert [node.name for node in of_run.first_order][:3] == ["onload", "to_generate", "generate"]


def test_step_0_waits_for_no_samples():
    of_run = Sequencer(ahead_plan(1), "run", 1, Deadlines(5, 30))
    assert of_run.saves["save_samples"] == (0, 1, 2)
    assert of_run.initial_saves == {"save_actor": (0, 1), "save_critic": (2,)}


@functools.cache
def undisturbed(lead: int):
    trace = Trace()
    world = World(ahead_plan(lead), iterations=ITERATIONS, watch=trace)
    assert world.run_to_end() == Finished(step=ITERATIONS)
    world.check_orders()
    return world.final, trace


@pytest.mark.parametrize(
    ("lead", "kind"),
    [
        pytest.param(1, Rank, marks=pytest.mark.whole),
        (1, Controller),
        pytest.param(2, Controller, marks=pytest.mark.whole),
        pytest.param(2, Rank, marks=pytest.mark.slow),
    ],
)
def test_a_death_before_and_after_each_instruction_costs_nothing(lead: int, kind: type[Rank | Controller]):
    expected, trace = undisturbed(lead)
    for number, (process, _, instruction) in enumerate(trace.seen):
        if not isinstance(process, kind) or isinstance(instruction, Finished):
            continue
        world = World(ahead_plan(lead), iterations=ITERATIONS, watch=Trace({number: kill_itself}))
        assert world.run_to_end() == Finished(step=ITERATIONS), number
        assert world.final == expected, number
        world.check_orders()


@pytest.mark.parametrize("every", [1, 2])
def test_nor_do_late_messages_and_fewer_snapshots(every):
    world = World(ahead_plan(2), iterations=4, seed=3, delay_s=0.5, snapshot_every=every)
    assert world.run_to_end() == Finished(step=4)
    world.check_orders()


def test_without_a_lead_the_requests_are_those_of_before():
    of_run = Sequencer(small_plan(), "run", 1, Deadlines(5, 30))
    assert of_run.first_order == of_run.plan.nodes
