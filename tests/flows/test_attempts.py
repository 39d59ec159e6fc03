"""Attempts of a run: one follows the other where a controller or a scheduler is lost, but not without end."""

import asyncio
import json
import logging
import os
import signal
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from uuid import uuid4

import pytest
from distributed import Client, Scheduler
from prefect import flow

from prefect_rlhf.flows.run import runs, training
from prefect_rlhf.flows.run.orders import Order, Orders
from prefect_rlhf.flows.run.prepare import Prepared
from prefect_rlhf.flows.run.replanning import Replanning
from prefect_rlhf.flows.run.runs import carry_out
from prefect_rlhf.flows.run.training import (
    Attempts,
    ControllerLost,
    Restarts,
    RunFailed,
    TrainingResult,
    run_training,
)
from prefect_rlhf.flows.view.prefect_api import PrefectApi
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed
from tests.flows.dask_commands import CONTROLLER, LOOPBACK, RANK, SAFE, dask_scheduler, dask_worker
from tests.flows.run.test_orders import states_after
from tests.flows.run.test_training import FAKES
from tests.rlhf_tasks.plans import small_plan
from tests.tiny_runs import ppo_config

ITERATIONS = 8


@pytest.fixture
def attempts(tmp_path, expected):
    """Makes the attempts of a run of fake ranks; `told` are the lines for the user, `committed` its commits."""
    told, committed = [], []

    def make(place, orders=None, on_commit=lambda iteration: None, max_restarts=3):
        config = ppo_config(tmp_path, cluster=place, max_restarts=max_restarts)

        def on_event(event):
            if isinstance(event, Committed):
                committed.append(event.iteration)
                on_commit(event.iteration)

        view = SimpleNamespace(
            on_event=on_event,
            starting=lambda: None,
            loading=lambda: None,
            api=PrefectApi("fake"),
            say=told.append,
        )
        prepared = Prepared(config, small_plan(), None, ITERATIONS, None)  # type: ignore[arg-type]  no search, no rows
        replanning = Replanning(prepared, tmp_path, {0: expected}, told.append)
        restarts = Restarts(tmp_path, max_restarts)
        return Attempts(prepared, tmp_path, {}, view, orders or Orders(told.append), replanning, restarts)

    return SimpleNamespace(make=make, told=told, committed=committed)


# --- the count ------------------------------------------------------------------------------------------


@pytest.fixture
def endings(monkeypatch):
    """What each attempt comes to, one after the other: an exception, or a result; `rebuilds` as each was told."""
    coming, rebuilds = [], []

    async def attempt(self, so_far, again):
        rebuilds.append(so_far)
        end = coming.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(Attempts, "_on_a_cluster", attempt)
    return SimpleNamespace(coming=coming, rebuilds=rebuilds)


def ended(order=Order.CONTINUE):
    return TrainingResult(ITERATIONS, (), order)


def test_lost_controllers_count_together_with_rebuilds_until_there_is_a_commit(attempts, endings):
    endings.coming += [ControllerLost("it is gone", 1), ControllerLost("it is gone", 0), ended()]
    run = attempts.make({"devices_per_host": 2})
    assert asyncio.run(run.run(0)) is Order.CONTINUE
    assert endings.rebuilds == [0, 2, 1], "the second attempt had a commit"
    assert attempts.told == ["it is gone: a new attempt begins at the last commit"] * 2


def test_one_loss_too_many_ends_the_run_with_its_cause(attempts, endings):
    endings.coming += [ControllerLost("it is gone", n) for n in range(9)]
    run = attempts.make({"devices_per_host": 2}, max_restarts=2)
    with pytest.raises(RunFailed, match=r"it is gone \(after max_restarts=2 restarts without a commit"):
        asyncio.run(run.run(0))
    assert endings.rebuilds == [0, 1, 2]


def test_an_order_that_comes_while_the_plan_changes_ends_the_run_before_another_attempt(
    attempts, monkeypatch
):
    orders, begun = Orders(attempts.told.append), []

    async def attempt(self, cluster, rebuilds):
        begun.append(rebuilds)
        orders.renew()
        orders.give(
            Order.CANCEL, "a worker ends it"
        )  # the attempt is held for its commit and closes its view
        return TrainingResult(3, (), Order.RENEW if len(begun) == 1 else Order.CANCEL)

    monkeypatch.setattr(Attempts, "_attempt", attempt)
    monkeypatch.setattr(training, "cluster_of", lambda *_: nullcontext())
    assert asyncio.run(attempts.make({"devices_per_host": 2}, orders).run(0)) is Order.CANCEL
    assert len(begun) == 1
    assert orders.held == 3


def test_processes_that_end_without_a_commit_count_until_somebody_else_goes_on(tmp_path):
    restarts = Restarts(tmp_path, most=2)
    assert restarts.begin(started_again=False) == 0  # and the process is killed, wherever it is
    assert [restarts.begin(started_again=True) for _ in range(2)] == [1, 2]
    with pytest.raises(RunFailed, match="its process has ended"):
        restarts.begin(started_again=True)
    assert restarts.begin(started_again=True) == 0


def test_a_commit_or_an_orderly_end_begins_the_count_anew(attempts, endings, tmp_path):
    run, restarts = attempts.make({"devices_per_host": 2}), Restarts(tmp_path, most=3)
    restarts.count(2, "")
    (tmp_path / "step-00000004").mkdir()
    endings.coming += [ended(Order.LEAVE)]
    assert restarts.begin(started_again=True) == 1
    assert asyncio.run(run.run(1)) is Order.LEAVE
    assert restarts.begin(started_again=True) == 0


@pytest.mark.parametrize("dies_in", ["prepare", "prefect_server"])
def test_a_process_that_dies_before_its_attempt_counts(tmp_path, monkeypatch, dies_in):
    """Without a run folder, in planning, Prefect's own count is all that there is."""

    def die(*_):
        raise KilledError()

    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid4()))
    monkeypatch.setattr(runs, "get_run_logger", lambda: logging.getLogger("test"))
    config = ppo_config(tmp_path, max_restarts=2)
    with monkeypatch.context() as dying:
        dying.setattr(runs, dies_in, die)
        for run_count in (1, 2, 3):
            dying.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", str(run_count))
            with pytest.raises(KilledError):
                asyncio.run(carry_out("ppo", config))
        dying.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "4")
        with pytest.raises(RunFailed, match=r"its process has ended .*max_restarts=2"):
            asyncio.run(carry_out("ppo", config))
    assert len(list((tmp_path / "runs").glob("ppo-*"))) == (dies_in == "prefect_server")


class KilledError(Exception):
    """As if the process had been killed here."""


@pytest.mark.parametrize(("then", "ends"), [(Order.CONTINUE, Order.CONTINUE), (Order.CANCEL, Order.CANCEL)])
def test_a_run_whose_devices_are_released_waits_for_another_order(attempts, endings, then, ends):
    orders = Orders()
    run = attempts.make({"devices_per_host": 2}, orders)
    endings.coming += [ended(Order.RELEASE), ended()]

    async def order_later():
        orders.give(Order.RELEASE, "test")
        running = asyncio.create_task(run.run(0))
        await asyncio.sleep(0.1)
        assert not running.done()
        orders.give(then, "test")
        return await running

    assert asyncio.run(order_later()) is ends
    assert len(endings.rebuilds) == (2 if then is Order.CONTINUE else 1)


# --- real clusters --------------------------------------------------------------------------------------


def last_roles(folder):
    newest = max(folder.glob("step-*.json"), key=lambda path: int(path.stem.removeprefix("step-")))
    return json.loads(newest.read_text())["roles"]


async def in_a_flow(run):
    @flow(name="rlhf-fake", persist_result=False)
    async def parent():
        return await run.run(0)

    return await parent()


@pytest.fixture
def fakes(monkeypatch):
    """Ranks are fakes; `clusters` are those that were formed."""
    clusters = []
    cluster_of = training.cluster_of

    @contextmanager
    def noted(*arguments):
        with cluster_of(*arguments) as cluster:
            clusters.append(cluster)
            yield cluster

    async def train(spec, cluster, **hooks):
        faked = FAKES | {"config": {"sleep_s": 0.1}, "run": f"f-{uuid4().hex[:8]}"}
        return await run_training(spec.model_copy(update=faked), cluster, **hooks)

    monkeypatch.setattr(training, "cluster_of", noted)
    monkeypatch.setattr(training, "run_training", train)
    return clusters


def kill_controller(cluster):
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        (pid,) = client.run(os.getpid, workers=[cluster.controller.address]).values()
    os.kill(pid, signal.SIGKILL)


def end_scheduler(cluster):
    """Ours, in this process."""
    (scheduler,) = (s for s in Scheduler._instances if s.address == cluster.scheduler_address)
    asyncio.run_coroutine_threadsafe(scheduler.close(), scheduler.loop.asyncio_loop).result(60)


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strike", [kill_controller, pytest.param(end_scheduler, marks=pytest.mark.slow)])
@pytest.mark.whole
def test_a_run_on_a_cluster_of_its_own_goes_on_by_itself_without(attempts, fakes, prefect, tmp_path, strike):
    def on_commit(iteration):
        if iteration == 2 and len(fakes) == 1:
            asyncio.get_running_loop().run_in_executor(None, strike, fakes[0])

    run = attempts.make({"devices_per_host": 2}, on_commit=on_commit)
    assert asyncio.run(in_a_flow(run)) is Order.CONTINUE
    assert len(fakes) == 2
    assert set(attempts.committed) >= {0, 1, 2, ITERATIONS - 1}, "one just then need not be heard of"
    assert last_roles(tmp_path) == states_after(ITERATIONS)
    (line,) = (line for line in attempts.told if "a new attempt begins" in line)
    assert "the controller of run" in line


@contextmanager
def dask_cluster(folder, port=0):
    """The address of a scheduler with a controller and two ranks, started by commands."""
    with dask_scheduler(folder, port=port, **SAFE) as address, ExitStack() as workers:
        for options in (CONTROLLER, (*RANK, "--name", "r0"), (*RANK, "--name", "r1")):
            workers.enter_context(dask_worker(address, folder, *LOOPBACK, *options))
        with Client(address, set_as_default=False, timeout=300) as client:
            client.wait_for_workers(3, timeout=300)
        yield address


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["controller", "scheduler"])
def test_a_run_on_a_cluster_found_by_address_waits_for_it_to_come_back(
    attempts, fakes, prefect, tmp_path, what
):
    """A controller's nanny starts it again; workers end with their scheduler, and are started again with it."""

    async def run_on(address, first, again):
        struck = asyncio.Event()

        def on_commit(iteration):
            if iteration == 2:
                struck.set()

        place = {"devices_per_host": 2, "address": address}
        run = attempts.make(place, on_commit=on_commit)
        running = asyncio.create_task(in_a_flow(run))
        await struck.wait()
        if what == "controller":
            await asyncio.to_thread(kill_controller, fakes[0])
        else:
            await asyncio.to_thread(replace, first, again, int(address.rsplit(":", 1)[1]))
        return await running

    def replace(first, again, port):
        """In one go: a run that waits for its cluster blocks the event loop, so nothing could happen in between."""
        first.close()
        again.enter_context(dask_cluster(tmp_path, port))

    with ExitStack() as again, ExitStack() as first:
        address = first.enter_context(dask_cluster(tmp_path))
        assert asyncio.run(run_on(address, first, again)) is Order.CONTINUE
    assert len(fakes) == 2
    assert last_roles(tmp_path) == states_after(ITERATIONS)
