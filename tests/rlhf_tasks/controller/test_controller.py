"""Who holds the controller: one flow at a time, the next as soon as the last has left; what cannot start says why."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from distributed.comm import CommClosedError

from rlhf_tasks.checkpoint.manifest import CheckpointError
from rlhf_tasks.controller import controller
from rlhf_tasks.controller.rank_link import RankMissing
from rlhf_tasks.protocol.messages import EVENT, GaveUp, RunSpec
from tests.rlhf_tasks.plans import small_plan
from tests.rlhf_tasks.settings import limits


class Flow:
    """The flow's end of a lease."""

    def __init__(self):
        self.left, self.told = asyncio.Event(), []

    async def read(self):
        await self.left.wait()
        raise CommClosedError

    async def write(self, message):
        self.told.append(EVENT.validate_json(message))

    def abort(self):
        pass


class Attempt:
    """One whose ranks are let go when the test says so."""

    let_go: asyncio.Event
    fails: Exception | None = None

    def __init__(self, worker, spec, tell):
        self.spec = spec

    async def start(self):
        if self.fails is not None:
            raise self.fails

    async def close(self):
        await self.let_go.wait()


async def settle():
    """Let every task run as far as it comes."""
    for _ in range(100):
        await asyncio.sleep(0)


def spec(run):
    settings = {"attempt": 1, "ranks": ("a", "b"), "plan": small_plan(), "config": {}, "limits": limits()}
    return RunSpec(run=run, run_folder="", iterations=1, **settings).model_dump_json().encode()


@pytest.fixture
def serve(monkeypatch):
    """Run a coroutine function with a controller of stand-in attempts."""

    def run(scene):
        async def started():
            Attempt.let_go = asyncio.Event()
            return await scene(controller.Controller(SimpleNamespace(ip="127.0.0.1")))  # type: ignore[arg-type]

        return asyncio.run(started())

    monkeypatch.setattr(controller, "Attempt", Attempt)
    return run


def test_a_run_waits_for_one_that_leaves_and_is_refused_by_one_that_stays(serve, monkeypatch):
    monkeypatch.setattr(controller, "LEAVING_S", 600.0)

    async def scene(held):
        first, second, third = Flow(), Flow(), Flow()
        leases = [asyncio.create_task(held.lease(first, spec("first")))]
        await settle()
        first.left.set()
        leases.append(asyncio.create_task(held.lease(second, spec("second"))))
        await settle()
        Attempt.let_go.set()
        await settle()
        assert second.told == []
        monkeypatch.setattr(controller, "LEAVING_S", 0.05)
        await held.lease(third, spec("third"))
        second.left.set()
        await asyncio.gather(*leases)
        return third.told

    (refusal,) = serve(scene)
    assert isinstance(refusal, GaveUp)
    assert "held by run 'second', attempt 1" in refusal.reason


@pytest.mark.parametrize(
    "error", [CheckpointError("step-1 is damaged."), RankMissing("rank 3 is not there.")]
)
def test_what_keeps_a_run_from_starting_is_told_in_its_own_words(serve, monkeypatch, caplog, error):
    async def scene(held):
        flow = Flow()
        Attempt.let_go.set()
        lease = asyncio.create_task(held.lease(flow, spec("mine")))
        while not flow.told:
            await asyncio.sleep(0.01)
        flow.left.set()
        await lease
        return flow.told

    monkeypatch.setattr(Attempt, "fails", error)
    with caplog.at_level(logging.ERROR):
        (told,) = serve(scene)
    assert told == GaveUp(reason=str(error))
    assert not caplog.records, "a traceback for what a user can mend"
