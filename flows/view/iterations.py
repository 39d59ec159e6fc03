"""What Prefect shows of a run's iterations: a subflow for each, whose tasks are the plan's nodes.

`Training` tells what the ledger has reported, and waits for nothing here: the ranks go on whatever Prefect does or
does not do. One task writes to Prefect, iteration after iteration. What it cannot keep up with is merged, so neither
the lag nor what is held here grows with the number of iterations:

- Iterations that have waited for longer than `VIEW_LAG_S` become one subflow, `it-00042..00047`, whose task runs
  reach from the first to the last of them. Its message says so. So an iteration is shown, whole, `VIEW_LAG_S` and the
  time that two subflows take to be written after its end, as long as the server answers.
- While the server is away everything waits, merged. What it has not taken `GIVE_UP_S` after the run's end is named,
  as is a subflow that it refuses: somebody has deleted it, for example.
"""

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run

from flows.view.prefect_api import Away, PrefectApi, Refused
from flows.view.subflows import NodeRun, Subflow, end_subflow, events_of, news_of, open_subflow
from rlhf_tasks.protocol.messages import Aborted, Committed, NodeBegun, NodeEnded, NotEntered, RunSpec
from rlhf_tasks.protocol.scheduled_plans import ScheduledPlan, plan_at

logger = logging.getLogger(__name__)
VIEW_LAG_S = 10.0  # iterations that have waited for longer are merged
PACE_S = 1.0  # between two reports on an iteration that runs
COMPLETE_S = 60.0  # what the last subflows may take after the run's end
GIVE_UP_S = 20.0  # of a server that is away by then: our own is back sooner
RETIRE_S = 5.0  # what the open subflows may take when the run ends early


class IterationView:
    """The subflows of one attempt. Used inside its flow.

    api  the door to the server
    """

    def __init__(self, spec: RunSpec, api: PrefectApi) -> None:
        self._spec, self._api = spec, api
        self._plans = spec.plans
        self._shown: deque[Subflow] = deque()  # in order of entering; the oldest are open, the others wait
        self._refused: list[str] = []
        self._running: dict[tuple[int, int], Subflow] = {}  # iteration, generation -> what has no end yet
        self._news = asyncio.Event()
        self._unsent: list[dict[str, Any]] = []  # events that Prefect has not confirmed
        self._closing = False
        self._parent = UUID(flow_run.id) if flow_run.id else None
        self._flow_id: UUID | None = None
        self._writing: asyncio.Task[None] | None = None

    # --- what has happened ------------------------------------------------------------------------------

    def entered(self, iteration: int, generation: int) -> None:
        """An iteration has been delivered under a generation."""
        plan = plan_at(self._plans, iteration).plan
        nodes = {node.name: NodeRun(node) for node in plan.nodes}
        subflow = Subflow(plan, iteration, iteration, generation, time.time(), nodes)
        self._shown.append(subflow)
        self._running[iteration, generation] = subflow
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())

    def plan_changed(self, planned: ScheduledPlan) -> None:
        """Iterations go by another plan from one of them on."""
        self._plans += (planned,)

    def node(self, news: NodeBegun | NodeEnded) -> None:
        """A rank is the first inside a node, or the last has left it."""
        subflow = self._running.get((news.iteration, news.generation))
        if subflow is None:
            return
        node = subflow.nodes[news.node]
        node.started_s = news.started_s
        if isinstance(news, NodeEnded):
            node.ended_s = news.ended_s
            node.inside_s = news.ended_s - news.started_s
        self._news.set()

    def ended(self, end: Committed | Aborted | NotEntered) -> None:
        """An iteration has ended, under a generation or (committed) whichever it was entered under last."""
        generation = None if isinstance(end, Committed) else end.generation
        for place in [p for p in self._running if p[0] == end.iteration and generation in (None, p[1])]:
            subflow = self._running.pop(place)
            subflow.ended_at_s = time.monotonic()
            if isinstance(end, Committed):
                subflow.end = StateType.COMPLETED, ""
            elif isinstance(end, Aborted):
                subflow.end = StateType.FAILED, f"{end.cause}\n{end.traceback}".rstrip()
            elif subflow.opening:
                subflow.end = StateType.CANCELLED, end.reason
            else:
                self._shown.remove(subflow)  # it never was
        self._merge()
        self._news.set()

    def _merge(self) -> None:
        """Make one of the committed iterations that wait, where the oldest has waited for too long."""
        waiting = [subflow for subflow in self._shown if not subflow.opening and subflow.end is not None]
        if not waiting or time.monotonic() - waiting[0].ended_at_s < VIEW_LAG_S:
            return
        kept = waiting[0]
        for subflow in waiting[1:]:
            if kept.can_absorb(subflow):
                kept.absorb(subflow)
                self._shown.remove(subflow)
            else:
                kept = subflow

    # --- the end ----------------------------------------------------------------------------------------

    async def complete(self) -> None:
        """The run has ended well: wait until its iterations are shown, as long as Prefect takes them."""
        await self._finish(COMPLETE_S, GIVE_UP_S)

    async def close(self) -> None:
        """Show no more: what has not ended by now never will."""
        for subflow in self._running.values():
            subflow.ended_at_s = time.monotonic()
            subflow.end = StateType.CANCELLED, "the run ended before this iteration was committed"
        self._running.clear()
        await self._finish(RETIRE_S, RETIRE_S)
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None
        self._api.unshown += self.unshown
        self._shown.clear()

    @property
    def unshown(self) -> list[str]:
        """Names of the subflows that Prefect does not show to their end."""
        return [*self._refused, *(subflow.name for subflow in self._shown)]

    async def _finish(self, seconds: float, away_s: float) -> None:
        self._closing = True
        self._news.set()
        deadline = time.monotonic() + seconds
        while self._writing is not None and not self._writing.done() and time.monotonic() < deadline:
            if self._api.outage_s > away_s:
                return
            await asyncio.wait([self._writing], timeout=0.2)

    # --- writing ----------------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        """Write what is new, the oldest iteration first, until the view is closed and all is written."""
        async with get_client() as client:
            while self._shown or not self._closing:
                due = self._due()
                if due is None:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), PACE_S)
                    self._news.clear()
                    continue
                try:
                    await self._write(client, due)
                except Away:
                    await asyncio.sleep(self._api.wait_s)
                except Refused as refusal:
                    self._drop(due, str(refusal))

    def _due(self) -> Subflow | None:
        """The oldest subflow of which there is something to write. None is opened before those that are older."""
        self._merge()
        for subflow in self._shown:
            if subflow.end is not None:
                return subflow
            if not subflow.opening:
                return subflow if subflow.begun else None
            if news_of(subflow) and time.monotonic() - subflow.written_at_s >= PACE_S:
                return subflow
        return None

    async def _write(self, client: PrefectClient, subflow: Subflow) -> None:
        """Bring Prefect up to date on a subflow. Raises Refused, and Away: what was not confirmed is sent again."""
        subflow.opening = True
        if subflow.id is None:
            subflow.id = await self._api.ask(lambda: self._open(client, subflow))
        self._unsent += events_of(subflow)
        if self._unsent:
            await self._api.ask(lambda: client.request("POST", "/events", json=self._unsent))
            self._unsent = []
        subflow.written_at_s = time.monotonic()
        if subflow.end is not None and not news_of(subflow):
            await self._api.ask(lambda: end_subflow(client, subflow))
            self._shown.remove(subflow)

    def _drop(self, subflow: Subflow, why: str) -> None:
        """Prefect will not show a subflow to its end."""
        logger.warning("Prefect refuses %s, which is left out: %s", subflow.name, why)
        self._shown.remove(subflow)
        self._refused.append(subflow.name)
        self._unsent, self._flow_id = [], None  # that flow may be what is gone

    async def _open(self, client: PrefectClient, subflow: Subflow) -> UUID:
        if self._flow_id is None:
            name = f"{subflow.plan.algorithm}-iteration"
            self._flow_id = await client.create_flow_from_name(name)
        return await open_subflow(client, subflow, self._flow_id, self._parent)
