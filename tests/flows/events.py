"""The events of a run that a Prefect server has taken."""

import time

from prefect.client.orchestration import get_client
from prefect.events import ReceivedEvent
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter

from prefect_rlhf.flows.view.prefect_api import COMMITTED


def wait_events(run: str, count: int, seconds: float = 240.0) -> list[ReceivedEvent]:
    """The run's commits, oldest first, once there are as many: a server stores events some seconds late."""
    named = EventFilter(
        event=EventNameFilter(name=[COMMITTED]), resource=EventResourceFilter(id=[f"prefect-rlhf.run.{run}"])
    )
    deadline = time.monotonic() + seconds
    found: list[ReceivedEvent] = []
    while len(found) < count and time.monotonic() < deadline:
        with get_client(sync_client=True) as client:
            found = client.read_events(named, limit=50).events
        time.sleep(0.2)
    return sorted(found, key=lambda event: event.occurred)
