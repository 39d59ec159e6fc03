"""A Prefect event for each commit of a run: what automations hang on.

`prefect-rlhf.iteration.committed`, of the resource `prefect-rlhf.run.NAME`; related resources are the flow run, its
flow, deployment and tags; the payload has `run`, `iteration`, `step` and `metrics`, the row of `metrics.jsonl`.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from prefect.client.orchestration import get_client
from prefect.events import Event, Resource
from prefect.events.related import related_resources_from_run_context

from flows.prefect_api import Away, PrefectApi

COMMITTED = "prefect-rlhf.iteration.committed"
ANSWER_S = 3.0  # what a commit's event may take; a server that is there needs some milliseconds
KEPT = 1000  # events that no server has taken yet; older ones are given up


class CommitEvents:
    """Tells the Prefect server of a run's commits, in order. Used inside a flow.

    A server that is away costs a commit at most `ANSWER_S`: the next one sends what is still due.
    (`prefect.events.emit_event` would try for eight seconds with each event, also when the process ends.)
    """

    def __init__(self, run: str, api: PrefectApi) -> None:
        self._run, self._api = run, api
        self._due: deque[Event] = deque(maxlen=KEPT)

    async def tell(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """An iteration has been committed."""
        resource = {
            "prefect.resource.id": f"prefect-rlhf.run.{self._run}",
            "prefect.resource.name": self._run,
        }
        payload: dict[str, Any] = {"run": self._run, "iteration": iteration, "step": iteration + 1}
        payload["metrics"] = dict(metrics)
        self._due.append(Event(event=COMMITTED, resource=Resource(resource), payload=payload))
        with suppress(Away):
            await self._api.ask(self._send, ANSWER_S)

    async def _send(self) -> None:
        async with get_client() as client:
            related = await related_resources_from_run_context(client)
            events = [event.model_copy(update={"related": related}) for event in self._due]
            await client.request("POST", "/events", json=[event.model_dump(mode="json") for event in events])
        self._due.clear()
