"""What the flow process makes of states that it reads, on a server that is only made up."""

import asyncio
from types import SimpleNamespace
from uuid import uuid4

import pytest
from httpx import ConnectError
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound, Pause
from prefect.states import Paused, Running, Scheduled, Suspended

from prefect_rlhf.flows.run import orders as module
from prefect_rlhf.flows.run.orders import Order, Orders, StateWatch, leave_to_prefect


class MadeUpServer:
    """A pipeline and its stage, `own`, or `own` alone; answers as Prefect's client does. `wrote` are the states that
    it was told to set."""

    def __init__(self, in_pipeline: bool = False, deployed: bool = False) -> None:
        self.own, self.pipeline, task = uuid4(), uuid4(), uuid4()
        deployment = uuid4() if deployed else None
        self.flow_id, self.runs, self.wrote = uuid4(), {}, []
        self.data_base_is_new = False
        if in_pipeline:
            self.add(id=self.pipeline, name="pipeline")
        self.add(
            id=self.own,
            name="own",
            deployment_id=deployment,
            parent_task_run_id=task if in_pipeline else None,
        )

    def add(self, **fields) -> None:
        self.runs[fields["id"]] = FlowRun(flow_id=self.flow_id, state=Running(), **fields)

    def set(self, run_id, state: State) -> None:
        self.runs[run_id] = self.runs[run_id].model_copy(update={"state": state})

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    async def read_flow_runs(self, flow_run_filter):
        return [run for run_id, run in self.runs.items() if run_id in flow_run_filter.id.any_]

    async def read_flow_run(self, run_id):
        if run_id not in self.runs:
            raise ObjectNotFound(KeyError(run_id))
        return self.runs[run_id]

    async def read_flow(self, flow_id):
        if self.data_base_is_new:
            raise ObjectNotFound(KeyError(flow_id))
        return SimpleNamespace(id=flow_id)

    async def read_task_run(self, _):
        return SimpleNamespace(flow_run_id=self.pipeline)

    async def set_flow_run_state(self, run_id, state, force):
        assert force
        self.wrote.append(state.name)
        self.set(run_id, state)
        return SimpleNamespace(state=state)


@pytest.fixture
def watch(monkeypatch):
    """Makes (a server, the orders, a function that looks at its states once)."""

    def make(**options):
        server, orders = MadeUpServer(**options), Orders(lambda line: None)
        monkeypatch.setattr(module, "get_client", lambda: server)
        monkeypatch.setattr(module, "ASK_EVERY_S", 0.01)
        watch = StateWatch(server.own, orders)

        async def look():
            watching = asyncio.create_task(watch.run())
            await asyncio.sleep(0.03)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

        return server, orders, lambda: asyncio.run(look())

    return make


def test_a_pause_that_was_ordered_before_the_first_look_counts(watch):
    server, orders, look = watch()
    orders.give(Order.PAUSE, "prefect-rlhf pause")
    look()
    assert orders.wanted is Order.PAUSE
    orders.hold(3)
    look()
    assert server.wrote == ["Paused"]
    server.set(server.own, Running())
    look()
    assert orders.wanted is Order.CONTINUE


def test_a_stage_that_begins_in_a_paused_pipeline_pauses_until_that_is_resumed(watch):
    server, orders, look = watch(in_pipeline=True)
    server.set(server.pipeline, Paused())
    server.set(server.own, Running())  # begun later
    look()
    assert (orders.wanted, server.wrote) == (Order.PAUSE, [])
    server.set(server.pipeline, Running())
    look()
    assert orders.wanted is Order.CONTINUE


@pytest.mark.parametrize(("deployed", "then"), [(False, Order.CONTINUE), (True, Order.LEAVE)])
def test_a_suspended_run_that_is_resumed_before_its_commit_goes_on_where_nobody_else_starts_it(
    watch, deployed, then
):
    server, orders, look = watch(deployed=deployed)
    look()
    server.set(server.own, Suspended())
    look()
    server.set(server.own, Scheduled())
    look()
    assert orders.wanted is then
    assert server.wrote == ([] if deployed else ["Running"])


def test_of_states_that_are_seen_together_the_last_counts(watch):
    server, orders, look = watch(in_pipeline=True)
    look()
    server.set(server.own, Paused())
    look()
    server.set(server.own, Running())
    server.set(server.pipeline, Paused())  # is read first
    look()
    assert orders.wanted is Order.PAUSE


def test_a_flow_run_that_a_new_data_base_does_not_know_says_nothing(watch):
    server, orders, look = watch()
    look()
    del server.runs[server.own]
    server.data_base_is_new = True
    look()
    assert orders.wanted is Order.CONTINUE
    server.data_base_is_new = False
    look()
    assert orders.wanted is Order.END


def test_a_flow_run_that_was_never_seen_says_nothing(watch):
    server, orders, look = watch()
    del server.runs[server.own]
    look()
    assert orders.wanted is Order.CONTINUE


@pytest.mark.parametrize("started_again", [False, True])
def test_a_flow_run_that_was_started_again_is_not_suspended(watch, started_again):
    """Resume was pressed before the commit: the state is that of the process which continues with the run."""
    server, orders, look = watch(deployed=True)
    look()
    server.set(server.own, Suspended())
    look()
    assert orders.wanted is Order.LEAVE
    if started_again:
        for state in (Scheduled(), Running()):
            server.set(server.own, state)
            look()
    with pytest.raises(Pause):
        asyncio.run(leave_to_prefect(str(server.own), 3, orders.left))
    assert server.wrote == ([] if started_again else ["Suspended"])


@pytest.mark.parametrize("error", [ConnectError("refused"), TimeoutError(), ObjectNotFound(KeyError())])
def test_a_run_is_left_to_prefect_though_the_server_does_not_answer(watch, error):
    server, _, _ = watch(deployed=True)

    async def no_answer(_):
        raise error

    server.read_flow_run = no_answer
    with pytest.raises(Pause):
        asyncio.run(leave_to_prefect(str(server.own), 3, None))
