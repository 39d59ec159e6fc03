"""A Prefect event for each commit of a run: what automations hang on.

`prefect-rlhf.iteration.committed`, of the resource `prefect-rlhf.run.NAME`; related resources are the flow run, its
flow, deployment and tags; the payload has `run`, `iteration`, `step` and `metrics`, the row of `metrics.jsonl`.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from prefect.client.orchestration import get_client
from prefect.events import Event, RelatedResource, Resource
from prefect.events.related import related_resources_from_run_context

from flows.view.prefect_api import Away, PrefectApi, Refused

COMMITTED = "prefect-rlhf.iteration.committed"
AT_ONCE = 100  # events of one request
KEPT = 1000  # events that no server has taken yet; older ones are given up, and counted as left out


class CommitEvents:
    """What the Prefect server is to be told of a run's commits, in order. Used inside a flow.

    (`prefect.events.emit_event` would try for eight seconds with each event, also when the process ends.)
    """

    def __init__(self, run: str, api: PrefectApi) -> None:
        self._run, self._api = run, api
        self._due: deque[Event] = deque()
        self._related: list[RelatedResource] | None = None

    def tell(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """An iteration has been committed: `send` will say so."""
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
        """How many events the server has not taken."""
        return len(self._due)

    async def send(self) -> None:
        """Tell the server what is due. Raises Away; what it has not confirmed is sent again."""
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
        """The run ends: what is due by now will not be told."""
        self._api.skipped += len(self._due)
        self._due.clear()

    async def _request(self, batch: list[Event]) -> None:
        async with get_client() as client:
            if self._related is None:
                self._related = await related_resources_from_run_context(client)
            events = [event.model_copy(update={"related": self._related}) for event in batch]
            await client.request("POST", "/events", json=[event.model_dump(mode="json") for event in events])
