"""The door to Prefect's API: a time limit, a pause after a failure, said once, and open again."""

import asyncio
import logging
import socket
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from uuid import uuid4

import pytest
from httpx import ConnectError, HTTPStatusError, Request, Response
from prefect import flow, tags
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from prefect_rlhf.flows.view import prefect_api
from prefect_rlhf.flows.view.prefect_api import Away, CommitEvents, PrefectApi, Refused, prompt_client
from tests.flows.events import wait_events
from tests.loopback import served


async def fails():
    raise ConnectError("nobody there")


async def hangs():
    await asyncio.sleep(600)


async def answers():
    return "done"


def answering(*statuses):
    """A server that answers with one status after the other."""
    left, request = iter(statuses), Request("POST", "http://there")

    async def work():
        response = Response(next(left), request=request)
        if response.status_code != 200:
            raise HTTPStatusError("not done", request=request, response=response)
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

    with caplog.at_level(logging.WARNING, "prefect_rlhf.flows.view.prefect_api"):
        asyncio.run(scene())
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(",")[0] for line in said] == [
        "run mine continues without the Prefect server",
        "the Prefect server answers again",
    ]


def test_a_busy_server_is_asked_again_at_once(monkeypatch):
    monkeypatch.setattr(prefect_api, "BUSY_PAUSE_S", 0.01)
    api = PrefectApi("mine")
    assert asyncio.run(api.ask(answering(503, 200))) == "done"
    assert api.missing() == {}


def test_a_busy_answer_is_handed_on_before_prefects_client_sleeps(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503)
            self.end_headers()

        def log_message(self, *_):
            pass

    async def scene(address):
        with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
            async with prompt_client() as client:
                with pytest.raises(HTTPStatusError, match="busy"):
                    await client.request("GET", "/flows/count")

    monkeypatch.setattr("prefect.client.base.anyio.sleep", sleep)
    with served(HTTPServer(("127.0.0.1", 0), Server)) as server:
        asyncio.run(scene(f"http://127.0.0.1:{server.server_port}/api"))
    assert slept == []


def test_what_is_refused_is_left_out_and_no_outage():
    async def gone():
        try:
            await answering(404)()
        except HTTPStatusError as error:
            raise ObjectNotFound(http_exc=error) from None

    async def scene():
        api = PrefectApi("mine")
        for work in (answering(404), answering(409), answering(422), gone):
            with pytest.raises(Refused):
                await api.ask(work)
        assert await api.show(answering(404)) is None
        assert (api.wait_s, api.outage_s) == (0, 0)
        assert await api.ask(answers) == "done"
        assert api.missing() == {"away_s": 0.0, "left_out": 1, "subflows_not_shown": []}

    asyncio.run(scene())


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_server_that_refuses_whoever_asks_is_left_alone_for_a_while(status):
    async def scene():
        api = PrefectApi("mine")
        with pytest.raises(Away, match="HTTPStatusError"):
            await api.ask(answering(status))
        assert api.wait_s > 0

    asyncio.run(scene())


def test_a_mistake_of_ours_is_no_outage():
    async def wrong():
        raise ZeroDivisionError

    api = PrefectApi("mine")
    with pytest.raises(ZeroDivisionError):
        asyncio.run(api.ask(wrong))
    assert api.missing() == {}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_flow_that_ends_without_its_server_is_told_once(is_there, monkeypatch):
    async def hello(_):
        return await (answers if is_there else fails)()

    monkeypatch.setattr("prefect.client.orchestration.PrefectClient.hello", hello)

    async def flow_and_engine():
        await PrefectApi("mine").part()
        return PREFECT_CLIENT_MAX_RETRIES.value()  # as Prefect's client asks when the engine reports the end

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 5}):
        assert asyncio.run(flow_and_engine()) == (5 if is_there else 0)


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    # Prefect leaves the sockets of its clients to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def tell(commits, iteration):
    commits.tell(iteration, {"iteration": iteration, "reward": 0.5, "kl": None})
    with suppress(Away):
        asyncio.run(commits.send())


@pytest.fixture(params=["nobody listens", "nobody answers"])
def away(request):
    """The address of a server that is away."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        if request.param == "nobody listens":
            listening.close()
        yield address


def test_a_server_that_is_away_is_named_once_and_gets_the_events_when_it_is_back(
    prefect, away, caplog, monkeypatch
):
    run = f"run-{uuid4().hex[:8]}"
    monkeypatch.setattr(prefect_api, "PAUSE_S", 0.0)
    with caplog.at_level(logging.WARNING, "prefect_rlhf.flows.view.prefect_api"):
        monkeypatch.setattr(prefect_api, "ANSWER_S", 0.5)
        with temporary_settings({PREFECT_API_URL: away}):
            api = PrefectApi(run)
            commits = CommitEvents(run, api)
            for iteration in range(3):
                tell(commits, iteration)
        assert [f"run {run} continues without" in record.getMessage() for record in caplog.records] == [True]
        monkeypatch.setattr(prefect_api, "ANSWER_S", 60.0)
        commits._api = PrefectApi(run)  # a door remembers its server's address
        tell(commits, 3)
    found = wait_events(run, 4)
    assert [event.payload["step"] for event in found] == [1, 2, 3, 4]
    assert found[0].payload["metrics"] == {"iteration": 0, "reward": 0.5, "kl": None}


@pytest.mark.whole
def test_an_event_names_the_flow_run_that_it_comes_from(prefect, monkeypatch):
    monkeypatch.setattr(prefect_api, "ANSWER_S", 60.0)
    run = f"run-{uuid4().hex[:8]}"

    @flow(name="rlhf-fake", flow_run_name=f"ppo/{run}", persist_result=False)
    async def parent():
        commits = CommitEvents(run, PrefectApi(run))
        commits.tell(0, {"reward": 0.5})
        await commits.send()
        return flow_run.id

    with tags("mine"):
        started = asyncio.run(parent())
    (event,) = wait_events(run, 1)
    assert event.resource.id == f"prefect-rlhf.run.{run}"
    assert event.resource_in_role["flow-run"].id == f"prefect.flow-run.{started}"
    assert event.resource_in_role["flow"].name == "rlhf-fake"
    assert event.resource_in_role["tag"].id == "prefect.tag.mine"
