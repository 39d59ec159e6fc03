"""A run's iterations in Prefect: a subflow for each, whose task runs are the plan's nodes.

`Training` passes on the ledger's reports and waits for nothing here: the ranks continue whatever Prefect does. One
task writes to Prefect, iteration after iteration; another one writes the iterations' ends, each in its time. If they
cannot keep up, iterations are merged, so that neither the lag nor the memory grows with the number of iterations:

- An iteration is Completed when all its nodes have ended on all ranks. Many more may run until a commit covers it.
  If it never comes to that, its subflow becomes Failed (or Cancelled at the run's end), and its message says so.
- Iterations that have waited for longer than `VIEW_LAG_S` become one subflow, `it-00042..00047`. Its task runs reach
  from the first to the last of them, and its message says so. So an iteration is shown completely at most
  `VIEW_LAG_S` after its end, plus the time for writing two subflows, as long as the server answers.
- A bar is as long as its iteration was: a subflow that was opened late is ended late by as much, and is Running until
  then. At the run's end this is waited for `HELD_S`.
- While the server is away, all iterations wait and are merged. Subflows that it has not accepted `GIVE_UP_S` after
  the run's end are reported by name, and so are those that it refuses, e.g. because somebody has deleted them.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run

from flows.view.prefect_api import Away, PrefectApi, Refused, prompt_client
from flows.view.subflows import NodeRun, Subflow, end_subflow, events_of, news_of, open_subflow
from rlhf_tasks.protocol.messages import (
    Aborted,
    IterationRan,
    NodeBegun,
    NodeEnded,
    NotEntered,
    RunSpec,
)

logger = logging.getLogger(__name__)
VIEW_LAG_S = 10.0  # iterations that have waited for longer are merged
PACE_S = 1.0  # between two reports on an iteration in progress
HELD_S = (
    10.0  # most time that bars which began late may take after the run's end, to be as long as they should
)
COMPLETE_S = 60.0  # most time for the last subflows after the run's end
GIVE_UP_S = 20.0  # most time to wait for a server that is away then: our own is restarted sooner
RETIRE_S = 5.0  # most time for the open subflows when the run ends early
KEPT = 1000  # subflows that no commit covers yet are remembered; older ones stay Completed, even if they are lost
COMPLETE = StateType.COMPLETED, ""
LOST_AT_END = "the run ended before this iteration was committed"


class IterationView:
    """The subflows of one attempt. Used inside its flow.

    api  the connection to the server
    """

    def __init__(self, spec: RunSpec, api: PrefectApi) -> None:
        self._spec, self._api = spec, api
        self._shown: deque[Subflow] = deque()  # in order of entering; the oldest are open, the others wait
        self._refused: list[str] = []
        self._running: dict[tuple[int, int], Subflow] = {}  # (iteration, generation) -> subflow without end
        self._uncommitted: deque[Subflow] = deque(maxlen=KEPT)  # shown as Completed, not committed
        self._committed = -1  # the newest committed iteration
        self._news, self._end_news = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._held_until_s = float("inf")  # time.monotonic() at which late bars end, whatever their length
        self._parent = UUID(flow_run.id) if flow_run.id else None
        self._flow_id: UUID | None = None
        self._writing: list[asyncio.Task[None]] = []

    # --- reports of the ledger --------------------------------------------------------------------------

    def entered(self, iteration: int, generation: int) -> None:
        """An iteration has been delivered to the ranks of a generation."""
        plan = self._spec.plan
        nodes = {node.name: NodeRun(node) for node in plan.nodes}
        subflow = Subflow(plan, iteration, iteration, generation, time.time(), nodes)
        self._shown.append(subflow)
        self._running[iteration, generation] = subflow
        if not self._writing:
            self._writing = [asyncio.create_task(self._write_all()), asyncio.create_task(self._end_all())]

    def node(self, news: NodeBegun | NodeEnded) -> None:
        """The first rank has begun a node, or the last rank has ended it."""
        subflow = self._running.get((news.iteration, news.generation))
        if subflow is None:
            return
        node = subflow.nodes[news.node]
        node.started_s = news.started_s
        if isinstance(news, NodeEnded):
            node.ended_s = news.ended_s
            node.inside_s = news.ended_s - news.started_s
        self._stir()

    def ended(self, end: IterationRan | Aborted | NotEntered) -> None:
        """An iteration has ended in a generation: completely, by a fault, or before it began."""
        subflow = self._running.pop((end.iteration, end.generation), None)
        if subflow is None:
            if isinstance(end, Aborted):
                self._lost(end)
            return
        subflow.ended_at_s = time.monotonic()
        if isinstance(end, IterationRan):
            subflow.end = COMPLETE
        elif isinstance(end, Aborted):
            subflow.end = StateType.FAILED, f"{end.cause}\n{end.cause.traceback}".rstrip()
        elif subflow.opening:
            subflow.end = StateType.CANCELLED, end.reason
        else:
            self._shown.remove(subflow)  # Prefect has never heard of it
        self._merge()
        self._stir()

    def committed(self, iteration: int) -> None:
        """A commit covers an iteration, and all before it: nothing can undo them."""
        self._committed = iteration
        while self._uncommitted and self._uncommitted[0].last <= iteration:
            self._uncommitted.popleft()

    def _lost(self, end: Aborted) -> None:
        """A fault has undone a complete iteration. All after it follow; their subflow says it once."""
        cause = f"complete, but lost before a commit: {end.cause}\n{end.cause.traceback}".rstrip()
        for subflow in (*self._shown, *self._uncommitted):
            if subflow.generation == end.generation and subflow.first <= end.iteration <= subflow.last:
                self._undo(subflow, end.iteration, StateType.FAILED, cause)

    def _undo(self, subflow: Subflow, first: int, kind: StateType, why: str) -> None:
        """Replace the end of a subflow that is complete: from iteration `first` on, no commit covers it."""
        if subflow.end != COMPLETE:
            return
        subflow.end = kind, why if first <= subflow.first else f"from iteration {first + 1} on: {why}"
        if subflow in self._uncommitted:
            self._uncommitted.remove(subflow)
            self._shown.appendleft(subflow)
        self._stir()

    def _merge(self) -> None:
        """Merge the complete iterations that wait, if the oldest has waited for longer than VIEW_LAG_S."""
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
        """Call at the run's successful end: wait until all iterations are shown, while Prefect accepts them."""
        await self._finish(COMPLETE_S, GIVE_UP_S, HELD_S)

    async def close(self) -> None:
        """End the view. Iterations that have not ended, or are in no commit, are shown as cancelled."""
        for subflow in self._running.values():
            subflow.ended_at_s = time.monotonic()
            subflow.end = StateType.CANCELLED, LOST_AT_END
        self._running.clear()
        for subflow in (*self._shown, *self._uncommitted):
            if subflow.last > self._committed:
                self._undo(subflow, self._committed + 1, StateType.CANCELLED, LOST_AT_END)
        await self._finish(RETIRE_S, RETIRE_S, 0.0)
        for task in self._writing:
            task.cancel()
        for fault in await asyncio.gather(*self._writing, return_exceptions=True):
            if isinstance(fault, Exception):
                logger.error(
                    "what Prefect shows of iterations ended early: %s: %s", type(fault).__name__, fault
                )
        self._writing = []
        self._api.unshown += self.unshown
        self._shown.clear()

    @property
    def unshown(self) -> list[str]:
        """Names of the subflows that Prefect does not show, or not with their end."""
        return [*self._refused, *(subflow.name for subflow in self._shown)]

    async def _finish(self, seconds: float, away_s: float, held_s: float) -> None:
        self._closing = True
        self._held_until_s = time.monotonic() + held_s
        self._stir()
        deadline = time.monotonic() + seconds
        # Each ends when all is written; one that ends alone has failed.
        while (
            self._writing and not any(task.done() for task in self._writing) and time.monotonic() < deadline
        ):
            if self._api.outage_s > away_s:
                return
            await asyncio.wait(self._writing, timeout=0.2)

    # --- writing ----------------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        """Write what is new to Prefect, oldest iteration first, until the view is closed and all is written."""
        async with prompt_client() as client:
            while self._shown or not self._closing:
                due = self._due()
                if due is None:
                    await _wait(self._news, PACE_S)
                else:
                    await self._try(due, self._write(client, due))

    async def _end_all(self) -> None:
        """Write the ends of subflows, each when it is due and whatever else is still to be written: a late end would
        make a bar too long."""
        async with prompt_client() as client:
            while self._shown or not self._closing:
                ended = [one for one in self._shown if one.id and one.end not in (None, one.told)]
                due = min(ended, key=lambda one: one.ends_at_s, default=None)
                rest_s = PACE_S
                if due is not None:
                    rest_s = min(due.ends_at_s, self._held_until_s) - time.monotonic()
                if due is None or rest_s > 0:
                    await _wait(self._end_news, rest_s)
                else:
                    await self._try(due, self._end(client, due))

    async def _try(self, subflow: Subflow, work: Awaitable[None]) -> None:
        """Write something of a subflow; wait where the server is away, leave the subflow out where it is refused."""
        try:
            await work
        except Away:
            await asyncio.sleep(self._api.wait_s)
        except Refused as refusal:
            self._drop(subflow, str(refusal))

    def _due(self) -> Subflow | None:
        """The oldest subflow with something to write but its end; None if there is none. They are opened in order."""
        self._merge()
        for subflow in self._shown:
            if not subflow.opening:
                return subflow if subflow.begun or subflow.end is not None else None
            rested = time.monotonic() - subflow.written_at_s >= PACE_S
            if subflow.unsent or (news_of(subflow) and (rested or subflow.end is not None)):
                return subflow
        return None

    async def _write(self, client: PrefectClient, subflow: Subflow) -> None:
        """Write a subflow's new states but its end. Raises Refused, and Away; unconfirmed events are sent again."""
        subflow.opening = True
        if subflow.id is None:
            subflow.id = await self._api.ask(lambda: self._open(client, subflow))
            self._end_news.set()
        subflow.unsent += events_of(subflow)
        if subflow.unsent:
            await self._api.ask(lambda: client.request("POST", "/events", json=subflow.unsent))
            subflow.unsent = []
        subflow.written_at_s = time.monotonic()
        self._settle(subflow)

    async def _end(self, client: PrefectClient, subflow: Subflow) -> None:
        """Write a subflow's end. Raises Refused, and Away."""
        end = subflow.end
        await self._api.ask(lambda: end_subflow(client, subflow))
        subflow.told = end
        self._settle(subflow)

    def _settle(self, subflow: Subflow) -> None:
        """Take a subflow that is written to its end off the list; a fault may have replaced this end meanwhile."""
        written = subflow.end is not None and subflow.end == subflow.told
        if not written or subflow.unsent or news_of(subflow) or subflow not in self._shown:
            return
        self._shown.remove(subflow)
        if subflow.end == COMPLETE and subflow.last > self._committed:
            subflow.forget_nodes()
            self._uncommitted.append(subflow)
        self._stir()

    def _stir(self) -> None:
        """There is news, or nothing is left to write."""
        self._news.set()
        self._end_news.set()

    def _drop(self, subflow: Subflow, why: str) -> None:
        """Leave out a subflow that Prefect refuses."""
        if subflow in self._shown:
            logger.warning("Prefect refuses %s, which is left out: %s", subflow.name, why)
            self._shown.remove(subflow)
            self._refused.append(subflow.name)
        self._flow_id = None  # perhaps the flow was deleted, so it is created again
        self._stir()

    async def _open(self, client: PrefectClient, subflow: Subflow) -> UUID:
        if self._flow_id is None:
            name = f"{subflow.plan.algorithm}-iteration"
            self._flow_id = await client.create_flow_from_name(name)
        return await open_subflow(client, subflow, self._flow_id, self._parent)


async def _wait(news: asyncio.Event, seconds: float) -> None:
    """Until there is news, or some seconds have passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # wait_for would swallow a cancellation that comes with the news
            await news.wait()
    news.clear()
