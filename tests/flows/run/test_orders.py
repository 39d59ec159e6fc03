"""Orders to a run: which counts, where they come from, and that no rank trains when Prefect shows a pause."""

import asyncio
import json
from contextvars import ContextVar
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import Abort
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Cancelling, Paused, Running, Scheduled, Suspended

from prefect_rlhf.flows.run.orders import Order, Orders, StateWatch, order_of, paused_state, watched_orders
from prefect_rlhf.flows.run.run_folder import leave_order, take_order, taken
from prefect_rlhf.flows.run.training import run_training
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed, RunSpec
from tests.flows.run.test_training import FAKES
from tests.rlhf_tasks.plans import small_plan
from tests.rlhf_tasks.settings import with_limits

# --- which order counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ([Order.PAUSE, Order.CONTINUE], Order.CONTINUE),
        ([Order.PAUSE, Order.RELEASE], Order.RELEASE),
        ([Order.STOP, Order.PAUSE], Order.STOP),
        ([Order.STOP, Order.CANCEL], Order.CANCEL),
        ([Order.CANCEL, Order.STOP], Order.CANCEL),
        ([Order.LEAVE, Order.CONTINUE], Order.LEAVE),
        ([Order.CANCEL, Order.END], Order.END),
    ],
)
def test_the_last_order_counts_but_an_end_is_not_taken_back(given, counts):
    orders = Orders()
    for order in given:
        orders.give(order, "test")
    assert orders.wanted is counts


@pytest.mark.parametrize(
    ("order", "before", "after"),
    [
        (Order.CONTINUE, Order.RENEW, Order.CONTINUE),
        (Order.PAUSE, Order.PAUSE, Order.PAUSE),
        (Order.STOP, Order.STOP, Order.STOP),
    ],
)
def test_a_better_plan_waits_for_orders_of_people_and_holds_until_the_next_attempt(order, before, after):
    orders = Orders()
    orders.give(order, "test")
    orders.renew()
    assert orders.wanted is before
    orders.begin()
    assert orders.wanted is after


def test_an_order_counts_though_it_cannot_be_told():
    def say(line):
        raise RuntimeError(line)

    orders = Orders(say)
    with pytest.raises(RuntimeError):
        orders.give(Order.PAUSE, "test")
    assert orders.wanted is Order.PAUSE


def run_in(state: State, deployed: bool) -> FlowRun:
    return FlowRun(id=uuid4(), flow_id=uuid4(), state=state, deployment_id=uuid4() if deployed else None)


def with_slot(state: State) -> State:
    details = state.state_details.model_copy(update={"deployment_concurrency_lease_id": uuid4()})
    return state.model_copy(update={"state_details": details})


@pytest.mark.parametrize(
    ("state", "alone", "deployed"),
    [
        (Running(), Order.CONTINUE, Order.CONTINUE),
        (Paused(), Order.PAUSE, Order.PAUSE),
        (with_slot(Paused()), Order.PAUSE, Order.LEAVE),
        (Suspended(), Order.RELEASE, Order.LEAVE),
        (Scheduled(name="Resuming"), Order.CONTINUE, Order.LEAVE),
        (Cancelling(), Order.CANCEL, Order.CANCEL),
        *(
            (State(type=final), Order.END, Order.END)
            for final in ("CANCELLED", "FAILED", "COMPLETED", "CRASHED")
        ),
    ],
)
def test_what_a_state_orders(state, alone, deployed):
    assert order_of(run_in(state, False)) is alone
    assert order_of(run_in(state, True)) is deployed


def test_a_run_that_keeps_its_devices_keeps_its_deployments_slot():
    """Prefect takes the slot from a flow run in any state that is not of type Running."""
    run = run_in(with_slot(Running()), True)
    kept, released = paused_state(run, 5, Order.PAUSE), paused_state(run, 5, Order.RELEASE)
    assert (kept.type, kept.name, kept.message) == (
        StateType.RUNNING,
        "Paused",
        "at commit 5; devices are kept",
    )
    assert order_of(run_in(kept, True)) is None, "it is our own"
    assert (released.type, released.message) == (StateType.PAUSED, "at commit 5; devices are released")


def test_a_pause_of_somebody_keeps_its_time_limit():
    theirs = Suspended(timeout_seconds=300)
    shown = paused_state(run_in(theirs, False), 5, Order.RELEASE).state_details
    assert shown.pause_timeout == theirs.state_details.pause_timeout
    assert not shown.pause_reschedule, "without a deployment nobody could start it again"


# --- the file in the run folder -------------------------------------------------------------------------


def test_an_order_is_left_only_where_a_run_goes_on(tmp_path):
    with pytest.raises(ConfigError, match=r"no run is in progress in .*: there is nothing to pause"):
        leave_order(tmp_path, "pause")
    with taken(tmp_path):
        leave_order(tmp_path, "pause")
    assert (take_order(tmp_path), take_order(tmp_path)) == ("pause", None)


def test_an_order_for_a_process_that_has_ended_is_thrown_away_and_one_while_the_run_starts_is_obeyed(
    tmp_path, monkeypatch
):
    async def no_states(_):
        await asyncio.Event().wait()

    context, told = ContextVar("what a flow run's log needs"), []

    async def run():
        context.set("flow run")
        say = lambda line: told.append((context.get(), line))  # noqa: E731
        async with asyncio.timeout(20), watched_orders(tmp_path, str(uuid4()), say) as orders:
            await orders.news()
            return orders.wanted

    monkeypatch.setattr("prefect_rlhf.flows.run.orders.StateWatch.run", no_states)
    (tmp_path / "order").write_text("cancel\n")
    with taken(tmp_path):
        assert take_order(tmp_path) is None
        leave_order(tmp_path, "pause")
        assert asyncio.run(run()) is Order.PAUSE
    assert told == [("flow run", f"the run is to {Order.PAUSE.value} (prefect-rlhf pause)")]


@pytest.mark.parametrize("command", ["pause", "resume", "stop", "cancel"])
def test_a_command_for_a_run_that_does_not_go_on_is_refused(call, tmp_path, command):
    status, _, err = call(command, str(tmp_path))
    assert status == 2
    assert "is not a run folder" in err


# --- runs on two ranks ----------------------------------------------------------------------------------

ENDLESS = 100_000  # iterations: however busy the machine is, only an order ends the run


def say(line):
    get_run_logger().info(line)  # as a real run does: only inside its flow run's context


class Watched:
    """An endless run of fake ranks inside a flow, with its orders; `committed` grows with its commits."""

    def __init__(self, cluster, folder, **options):
        self.cluster, self.folder, self.options = cluster, folder, options
        self.committed = []
        self.flow_run_id = self.pipeline_id = None

    async def run_in_pipeline(self):
        @flow(name="rlhf-outer", persist_result=False)
        async def pipeline():
            from prefect.runtime import flow_run

            self.pipeline_id = flow_run.id
            return await self.run()

        return await pipeline()

    async def run(self):
        @flow(name="rlhf-fake", persist_result=False)
        async def parent():
            from prefect.runtime import flow_run

            self.flow_run_id = flow_run.id
            with taken(self.folder):
                async with watched_orders(self.folder, flow_run.id, say) as self.orders:
                    spec = RunSpec(
                        run=f"fake-{uuid4().hex[:8]}",
                        plan=small_plan(),
                        config={"sleep_s": 0.1},
                        run_folder=str(self.folder),
                        iterations=ENDLESS,
                        **with_limits(FAKES | self.options),
                    )
                    result = await run_training(
                        spec, self.cluster, on_event=self.on_event, orders=self.orders
                    )
                if result.order is Order.RELEASE:
                    await self.set_state(Running())  # a flow that is suspended cannot end
                return result

        return await parent()

    def on_event(self, event):
        if isinstance(event, Committed):
            self.committed.append(event.iteration)

    async def reached(self, iteration):
        while iteration not in self.committed:
            await asyncio.sleep(0.05)

    async def held(self):
        while self.orders.held is None:
            await asyncio.sleep(0.05)
        return self.orders.held

    async def set_state(self, state):
        async with get_client() as client:
            await client.set_flow_run_state(self.pipeline_id or self.flow_run_id, state, force=True)

    async def shown(self, name):
        """The flow run's state as soon as it has a name."""
        async with get_client() as client:
            while True:
                state = (await client.read_flow_run(self.flow_run_id)).state
                if state.name == name:
                    return state
                await asyncio.sleep(0.2)


@pytest.fixture
def last(tmp_path):
    def read():
        newest = max(tmp_path.glob("step-*.json"), key=lambda path: int(path.stem.removeprefix("step-")))
        return json.loads(newest.read_text())

    return read


def states_after(iterations):
    state = 0
    for iteration in range(iterations):
        state = 3 * state + iteration + 1
    return {"actor": state, "critic": state}


pytestmark = [pytest.mark.timeout(600)]
cluster_test = pytest.mark.cluster


async def with_orders(run, disturb, in_pipeline=False):
    """The run's outcome, and what disturbing it gave."""
    running = asyncio.create_task(run.run_in_pipeline() if in_pipeline else run.run())
    try:
        async with asyncio.timeout(300):
            await run.reached(1)
            disturbing = asyncio.create_task(disturb())
            await asyncio.wait({running, disturbing}, return_when=asyncio.FIRST_COMPLETED)
            if not disturbing.done():
                disturbing.cancel()
                running.result()
                pytest.fail("the run was over before")
            return await running, disturbing.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.run.orders.ASK_EVERY_S", 0.5)


@cluster_test
@pytest.mark.parametrize("source", [pytest.param("api of a pipeline", marks=pytest.mark.slow), "folder"])
def test_a_run_pauses_at_a_commit_is_shown_so_and_goes_on_to_the_same_end(cluster, tmp_path, last, source):
    async def order(command, state):
        if source == "folder":
            leave_order(tmp_path, command)
        else:
            await run.set_state(state)

    async def disturb():
        await order("pause", Paused())
        step = await run.held()
        state = await run.shown("Paused")
        while state.message != f"at commit {step}; devices are kept":
            state = await run.shown("Paused")
        assert max(run.committed) + 1 <= step
        await asyncio.sleep(3)
        assert len(list(tmp_path.glob("step-*.json"))) == step + 1, "a rank has trained"
        await order("resume", Running())
        await run.shown("Running")
        await run.reached(step + 3)
        leave_order(tmp_path, "stop")
        return step

    run = Watched(cluster, tmp_path)
    result, step = asyncio.run(with_orders(run, disturb, source == "api of a pipeline"))
    assert 2 <= step <= result.committed_step - 4
    assert (result.faults, result.order) == ((), Order.CONTINUE)
    assert run.committed == list(range(result.committed_step))
    assert last()["roles"] == states_after(result.committed_step)


@cluster_test
@pytest.mark.parametrize(
    ("states", "order"),
    [
        pytest.param((Suspended(),), Order.RELEASE, marks=pytest.mark.whole),
        pytest.param((Paused(), Cancelling()), Order.CANCEL, marks=pytest.mark.whole),
    ],
    ids=["suspended", "cancelled after a pause"],
)
def test_an_attempt_ends_at_a_commit_for(cluster, tmp_path, last, states, order):
    async def disturb():
        for state in states:
            await run.set_state(state)
            if state.is_paused() and len(states) > 1:
                await run.held()

    run = Watched(cluster, tmp_path)
    result, _ = asyncio.run(with_orders(run, disturb))
    assert result.order is order
    assert last()["roles"] == states_after(result.committed_step)


@cluster_test
@pytest.mark.whole
def test_a_cancel_that_comes_while_a_pause_is_being_shown_counts(cluster, tmp_path, monkeypatch):
    """Our own state is written over it."""
    show, cancelled = StateWatch._show, []

    async def show_later(self, client, shown):
        if self._orders.held is not None and not cancelled:
            cancelled.append(shown.id)
            await client.set_flow_run_state(shown.id, Cancelling(), force=True)
        await show(self, client, shown)

    monkeypatch.setattr(StateWatch, "_show", show_later)
    run = Watched(cluster, tmp_path)
    result, _ = asyncio.run(with_orders(run, lambda: run.set_state(Paused())))
    assert (len(cancelled), result.order) == (1, Order.CANCEL)


@cluster_test
@pytest.mark.parametrize("end", ["cancelled", pytest.param("deleted", marks=pytest.mark.whole)])
@pytest.mark.whole
def test_a_run_that_prefect_shows_as_ended_ends_at_once(cluster, tmp_path, end):
    async def disturb():
        if end == "cancelled":
            await run.set_state(Cancelled())
            return
        async with get_client() as client:
            await client.delete_flow_run(run.flow_run_id)

    run = Watched(cluster, tmp_path)
    with pytest.raises(Abort):
        asyncio.run(with_orders(run, disturb))
