"""The controller's link to a rank, where something never answers: no wait lasts longer than it may."""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_tasks.controller import rank_link
from rlhf_tasks.controller.rank_link import RankLink, RankMissing, RankProcess


async def never(**_):
    await asyncio.Event().wait()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses of nannies that were asked to kill. They never do, and the limits are short."""
    monkeypatch.setattr(rank_link, "CONNECT_S", 0.05)
    monkeypatch.setattr(rank_link, "KILL_S", 0.05)
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
