"""A Prefect event for each commit of a run, which automations can react to.

The event is `prefect-rlhf.iteration.committed` of the resource `prefect-rlhf.run.NAME`. Its related resources are the
flow run, and its flow, deployment and tags. Its payload has `run`, `iteration`, `step` and `metrics`, the row of
`metrics.jsonl`.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from prefect.events import Event, RelatedResource, Resource
from prefect.events.related import related_resources_from_run_context

from flows.view.prefect_api import Away, PrefectApi, Refused, prompt_client

COMMITTED = "prefect-rlhf.iteration.committed"
AT_ONCE = 100  # events per request
KEPT = 1000  # unsent events that are kept; older ones are dropped, and counted as left out


class CommitEvents:
    """Sends a run's commits to the Prefect server, in order. Used inside a flow.

    `prefect.events.emit_event` is not used, because it tries for eight seconds with each event, even at process exit.
    """

    def __init__(self, run: str, api: PrefectApi) -> None:
        self._run, self._api = run, api
        self._due: deque[Event] = deque()
        self._related: list[RelatedResource] | None = None

    def tell(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """Queue the event of a committed iteration, for `send`."""
        resource = {
            "prefect.resource.id": f"prefect-rlhf.run.{self._run}",
            "prefect.resource.name": self._run,
        }
        payload: dict[str, Any] = {"run": self._run, "iteration": iteration, "step": iteration + 1}
        payload["metrics"] = dict(metrics)
        self._due.append(Event(event=COMMITTED, resource=Resource(resource), payload=payload))
        while len(self._due) > KEPT:
            self._due.popleft()
            self._api.skipped += 1

    @property
    def due(self) -> int:
        """Number of events that the server has not confirmed."""
        return len(self._due)

    async def send(self) -> None:
        """Send the queued events. Raises Away; events that the server has not confirmed stay in the queue."""
        while self._due:
            batch = [self._due.popleft() for _ in range(min(AT_ONCE, len(self._due)))]
            try:
                await self._api.ask(partial(self._request, batch))
            except Refused:
                self._api.skipped += len(batch)
            except (Away, asyncio.CancelledError):
                self._due.extendleft(reversed(batch))
                raise

    def give_up(self) -> None:
        """Drop the queued events at the end of the run."""
        self._api.skipped += len(self._due)
        self._due.clear()

    async def _request(self, batch: list[Event]) -> None:
        async with prompt_client() as client:
            if self._related is None:
                self._related = await related_resources_from_run_context(client)
            events = [event.model_copy(update={"related": self._related}) for event in batch]
            await client.request("POST", "/events", json=[event.model_dump(mode="json") for event in events])
