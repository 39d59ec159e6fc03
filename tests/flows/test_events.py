"""Events of commits: taken by a server that is there, waiting for one that is away, at a bounded price."""

import asyncio
import logging
import socket
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import events
from flows.events import CommitEvents
from tests.flows.events import wait_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def tell(commits, iteration):
    asyncio.run(commits.tell(iteration, {"iteration": iteration, "reward": 0.5, "kl": None}))


@pytest.fixture(params=["nobody listens", "nobody answers"])
def away(request):
    """The address of a server that is away."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        if request.param == "nobody listens":
            listening.close()
        yield address


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_server_that_is_away_is_named_once_and_gets_the_events_when_it_is_back(
    prefect, away, caplog, monkeypatch
):
    run = f"run-{uuid4().hex[:8]}"
    commits = CommitEvents(run)
    with caplog.at_level(logging.WARNING, "flows.events"):
        monkeypatch.setattr(events, "ANSWER_S", 0.5)
        with temporary_settings({PREFECT_API_URL: away}):
            for iteration in range(3):
                tell(commits, iteration)
        assert [f"events of run {run} wait" in record.getMessage() for record in caplog.records] == [True]
        monkeypatch.setattr(events, "ANSWER_S", 60.0)
        tell(commits, 3)
    found = wait_events(run, 4)
    assert [event.payload["step"] for event in found] == [1, 2, 3, 4]
    assert found[0].payload["metrics"] == {"iteration": 0, "reward": 0.5, "kl": None}
