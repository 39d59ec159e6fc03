"""Events of commits: taken by a server that is there, waiting for one that is away."""

import asyncio
import logging
import socket
from contextlib import suppress
from uuid import uuid4

import pytest
from prefect import flow, tags
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.view import prefect_api
from flows.view.events import CommitEvents
from flows.view.prefect_api import Away, PrefectApi
from tests.flows.events import wait_events

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
    with caplog.at_level(logging.WARNING, "flows.view.prefect_api"):
        monkeypatch.setattr(prefect_api, "ANSWER_S", 0.5)
        with temporary_settings({PREFECT_API_URL: away}):
            api = PrefectApi(run)
            commits = CommitEvents(run, api)
            for iteration in range(3):
                tell(commits, iteration)
        assert [f"run {run} goes on without" in record.getMessage() for record in caplog.records] == [True]
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
