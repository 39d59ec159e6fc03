"""Who holds the controller, what it says where it cannot start, and its links to ranks that do not answer."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from distributed.comm import CommClosedError

from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError
from prefect_rlhf.rlhf_tasks.controller import controller
from prefect_rlhf.rlhf_tasks.controller.controller import RankLink, RankMissing, RankProcess
from prefect_rlhf.rlhf_tasks.protocol.messages import EVENT, GaveUp, RunSpec
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
    unreached: tuple[int, ...] = ()

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


def spec(run, attempt=1):
    settings = {
        "attempt": attempt,
        "ranks": ("a", "b"),
        "plan": small_plan(),
        "config": {},
        "limits": limits(),
    }
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


def test_an_attempt_waits_for_the_disk_of_an_earlier_one_of_its_run(serve, monkeypatch):
    """One that ends for a change of plan may still remove old snapshots."""
    monkeypatch.setattr(controller, "LEAVING_S", 0.01)

    async def scene(held):
        first, second = Flow(), Flow()
        leases = [asyncio.create_task(held.lease(first, spec("mine")))]
        await settle()
        first.left.set()
        leases.append(asyncio.create_task(held.lease(second, spec("mine", attempt=2))))
        await asyncio.sleep(0.1)
        Attempt.let_go.set()
        await settle()
        second.left.set()
        await asyncio.gather(*leases)
        return second.told

    assert serve(scene) == []


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
    assert not caplog.records, "a traceback for what a user can correct"


async def never(**_):
    await asyncio.Event().wait()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses of nannies that were asked to kill. They never do, and the limits are short."""
    monkeypatch.setattr(controller, "CONNECT_S", 0.05)
    monkeypatch.setattr(controller, "KILL_S", 0.05)
    return []


def link_of(asked: list[str], identity=never) -> RankLink:
    def nanny(address: str) -> SimpleNamespace:
        asked.append(address)
        return SimpleNamespace(kill=never)

    worker = SimpleNamespace(scheduler=SimpleNamespace(identity=identity), rpc=nanny)
    return RankLink(worker, 3, "c", "flow", "m:f", print, print, print)  # type: ignore[arg-type]


@pytest.mark.timeout(20)
def test_a_scheduler_that_never_answers_is_no_longer_asked_when_the_time_is_over(asked: list[str]):
    with pytest.raises(RankMissing, match="was not there within"):
        asyncio.run(link_of(asked).open(0.3))


@pytest.mark.timeout(20)
def test_a_nanny_that_never_answers_does_not_keep_the_next_process_from_being_looked_for(
    asked: list[str], caplog: pytest.LogCaptureFixture
):
    async def scene() -> None:
        async def nobody() -> dict[str, object]:
            return {"workers": {}}

        link = link_of(asked, nobody)
        link.process = RankProcess("a", "its nanny", "boot", 1)
        link.restart(lost=False, deadline_s=0.1)
        assert link._restarting is not None
        await link._restarting

    asyncio.run(scene())
    assert asked == ["its nanny"]
    assert "the scheduler knows no worker c" in caplog.text
