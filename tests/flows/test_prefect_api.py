"""The door to Prefect's API: a time limit, a pause after a failure, said once, and open again."""

import asyncio
import logging

import pytest
from httpx import ConnectError, HTTPStatusError, Request, Response

from flows import prefect_api
from flows.prefect_api import Away, PrefectApi


async def fails():
    raise ConnectError("nobody there")


async def hangs():
    await asyncio.sleep(600)


async def answers():
    return "done"


def busy_first():
    """A server whose data base is locked at the first time."""
    statuses = iter([503, 200])
    request = Request("POST", "http://there")

    async def work():
        response = Response(next(statuses), request=request)
        if response.status_code != 200:
            raise HTTPStatusError("busy", request=request, response=response)
        return "done"

    return work


@pytest.mark.parametrize("work", [fails, hangs])
def test_a_failure_is_said_once_and_leaves_the_server_alone_for_a_while(work, caplog, monkeypatch):
    monkeypatch.setattr(prefect_api, "ANSWER_S", 0.05)
    monkeypatch.setattr(prefect_api, "PAUSE_S", 0.2)

    async def scene():
        api, asked = PrefectApi("mine"), []

        async def counted():
            asked.append(1)
            return await work()

        assert api.missing() == {}
        for _ in range(3):
            assert await api.show(counted) is None
        assert len(asked) == 1
        with pytest.raises(Away, match="no answer for"):
            await api.ask(answers)
        await asyncio.sleep(api.wait_s)
        assert await api.show(counted) is None
        assert len(asked) == 2
        assert api.wait_s > 0.2, "the second pause is longer"
        await asyncio.sleep(api.wait_s)
        assert await api.show(answers) == "done"
        assert api.outage_s == 0
        assert api.missing()["left_out"] == 4
        assert api.missing()["away_s"] > 0.5

    with caplog.at_level(logging.WARNING, "flows.prefect_api"):
        asyncio.run(scene())
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(",")[0] for line in said] == [
        "run mine goes on without the Prefect server",
        "the Prefect server answers again",
    ]


def test_a_busy_server_is_asked_again_at_once(monkeypatch):
    monkeypatch.setattr(prefect_api, "BUSY_PAUSE_S", 0.01)
    api = PrefectApi("mine")
    assert asyncio.run(api.ask(busy_first())) == "done"
    assert api.missing() == {}


def test_a_mistake_of_ours_is_no_outage():
    async def wrong():
        raise ZeroDivisionError

    api = PrefectApi("mine")
    with pytest.raises(ZeroDivisionError):
        asyncio.run(api.ask(wrong))
    assert api.missing() == {}
