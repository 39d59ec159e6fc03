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

Prefect 3's server takes task runs as its client reports them: as events, one for each state, with the client's own
time. So nodes have the times of the ranks' clocks. The states of a flow run get the time at which the server receives
them. So a subflow that is opened late is also ended late: its bar is as long as the iteration was by the ranks'
clocks, and its message says when that was.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID, uuid4

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import Event, RelatedResource, Resource
from prefect.runtime import flow_run

from prefect_rlhf.flows.view.prefect_api import (
    COMPLETE_S,
    GIVE_UP_S,
    Away,
    PrefectApi,
    Refused,
    prompt_client,
)
from prefect_rlhf.planner.text import short_names
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    Aborted,
    IterationRan,
    NodeBegun,
    NodeEnded,
    NotEntered,
    RunSpec,
)
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, PlanNode

logger = logging.getLogger(__name__)
VIEW_LAG_S = 10.0  # iterations that have waited for longer are merged
PACE_S = 1.0  # between two reports on an iteration in progress
HELD_S = 10.0  # most time after the run's end for bars that began late, to become as long as they should
RETIRE_S = 5.0  # most time for the open subflows when the run ends early
KEPT = 1000  # subflows that no commit covers yet are remembered; older ones stay Completed, even if they are lost
COMPLETE = StateType.COMPLETED, ""
LOST_AT_END = "the run ended before this iteration was committed"
NAMES = {
    StateType.PENDING: "Pending",
    StateType.RUNNING: "Running",
    StateType.COMPLETED: "Completed",
    StateType.FAILED: "Failed",
    StateType.CANCELLED: "Cancelled",
}
TICK = timedelta(microseconds=1)  # least time between two states of a task run
CAUSE_LENGTH = 20_000  # most characters of a message


# --- one iteration's flow run ---


@dataclass(slots=True)
class NodeRun:
    """A plan node of one iteration, or of several that are shown as one.

    started_s, ended_s  time.time() at which the first rank began it and the last rank ended it
    inside_s            seconds inside the node, summed over the iterations
    reported            its newest state that was reported to Prefect
    """

    node: PlanNode
    id: UUID = field(default_factory=uuid4)
    started_s: float | None = None
    ended_s: float | None = None
    inside_s: float = 0.0
    reported: StateType | None = None
    reported_at: datetime | None = None

    def absorb(self, later: "NodeRun") -> None:
        """Merge the node's run in a later iteration into this one."""
        assert self.ended_s is not None, f"{self.node.name} has not ended"
        assert later.ended_s is not None, f"{self.node.name} has not ended"
        self.ended_s = max(self.ended_s, later.ended_s)
        self.inside_s += later.inside_s


@dataclass(slots=True)
class Subflow:
    """Iterations `first` to `last` (usually one) in one generation, as Prefect shows them.

    entered_s     time.time() at which the first was delivered
    end           its last state and the message; None while it runs. A fault may still replace Completed
    ended_at_s    time.monotonic() at which the first of them ended
    told          the end that Prefect has confirmed
    unsent        events that Prefect has not confirmed
    written_at_s  time.monotonic() of the last report
    opening       Prefect may know it already, under its present name
    opened_at_s   time.monotonic() at which Prefect was asked to open it
    interval      what `interval_text` was before its nodes were forgotten
    id            of its flow run; None until Prefect has confirmed it
    """

    plan: ExecutionPlan
    first: int
    last: int
    generation: int
    entered_s: float
    nodes: dict[str, NodeRun]
    end: tuple[StateType, str] | None = None
    told: tuple[StateType, str] | None = None
    unsent: list[dict[str, Any]] = field(default_factory=list)
    ended_at_s: float = 0.0
    written_at_s: float = 0.0
    opening: bool = False
    opened_at_s: float = 0.0
    interval: str = ""
    id: UUID | None = None
    key: UUID = field(default_factory=uuid4)

    @property
    def numbers(self) -> str:
        """`00042`, or `00042..00047`; counted from 1, for people."""
        return f"{self.first + 1:05d}" + (f"..{self.last + 1:05d}" if self.last > self.first else "")

    @property
    def name(self) -> str:
        """`it-00042`; `it-00042-r1` after a rebuild of the ranks."""
        return f"it-{self.numbers}" + (f"-r{self.generation}" if self.generation else "")

    @property
    def begun(self) -> bool:
        """Whether any rank has begun a node."""
        return any(node.started_s is not None for node in self.nodes.values())

    def can_absorb(self, later: "Subflow") -> bool:
        """Whether `later` can be merged into this subflow.

        It must be the next iteration, of the same plan and generation; both must be complete and not yet opened.
        """
        complete = all(s.end is not None and s.end[0] is StateType.COMPLETED for s in (self, later))
        alike = later.plan is self.plan and later.generation == self.generation
        return complete and alike and later.first == self.last + 1 and not (self.opening or later.opening)

    def absorb(self, later: "Subflow") -> None:
        """Merge a later subflow into this one."""
        self.last = later.last
        for name, node in self.nodes.items():
            node.absorb(later.nodes[name])

    def forget_nodes(self) -> None:
        """Drop the nodes, since Prefect has all their states: what is left is small."""
        self.interval, self.nodes = self.interval_text(), {}

    @property
    def ends_at_s(self) -> float:
        """time.monotonic() at which its end is to be written: then its bar is as long as the iteration was."""
        span = self._span_s()
        return self.opened_at_s + (span[1] - span[0] if span else 0.0)

    def interval_text(self) -> str:
        """Its seconds, start and end by the ranks' clocks; empty if no node has ended."""
        span = self._span_s()
        if span is None:
            return self.interval
        return f"{span[1] - span[0]:.3f} s by the ranks' clocks, {_clock(span[0])} to {_clock(span[1])}"

    def _span_s(self) -> tuple[float, float] | None:
        """From the first node's start to the last node's end, by the ranks' clocks; None if no node has ended."""
        starts = [node.started_s for node in self.nodes.values() if node.started_s is not None]
        ends = [node.ended_s for node in self.nodes.values() if node.ended_s is not None]
        return (min(starts), max(ends)) if starts and ends else None


async def open_subflow(client: PrefectClient, subflow: Subflow, flow_id: UUID, parent: UUID | None) -> UUID:
    """Create the subflow's flow run, in state Running. Returns its id. A repeated call changes nothing."""
    algorithm = subflow.plan.algorithm
    tracked = None
    if parent is not None:  # in Prefect, a subflow belongs to a task run of its parent
        tracking = {
            "id": str(subflow.key),
            "name": f"{algorithm}-iteration-{subflow.numbers}",
            "flow_run_id": str(parent),
            "task_key": f"{algorithm}-iteration",
            "dynamic_key": str(subflow.key),
            "state": {"type": "PENDING", "name": "Pending"},
        }
        tracked = (await client.request("POST", "/task_runs/", json=tracking)).json()["id"]
    run = {
        "name": subflow.name,
        "flow_id": str(flow_id),
        "parent_task_run_id": tracked,
        "idempotency_key": str(subflow.key),
        "state": {"type": "RUNNING", "name": "Running"},
    }
    subflow.opened_at_s = time.monotonic()  # when it is sent, as its end will be: what is between cancels out
    return UUID((await client.request("POST", "/flow_runs/", json=run)).json()["id"])


async def end_subflow(client: PrefectClient, subflow: Subflow) -> None:
    """Write the subflow's last state."""
    assert subflow.end is not None, f"{subflow.name} has not ended"
    kind, message = subflow.end
    parts = [message[:CAUSE_LENGTH], subflow.interval_text()]
    if subflow.last > subflow.first:
        parts.append(
            f"iterations {subflow.first + 1} to {subflow.last + 1} are shown as one: Prefect could not keep up"
        )
    state = {"type": kind.value, "name": NAMES[kind], "message": "; ".join(part for part in parts if part)}
    await client.request(
        "POST",
        "/flow_runs/{id}/set_state",
        path_params={"id": subflow.id},
        json={"state": state, "force": True},
    )


def news_of(subflow: Subflow) -> list[tuple[NodeRun, list[StateType]]]:
    """(node, its states that were not reported to Prefect), for each node with such states."""
    return [(node, states) for node in subflow.nodes.values() if (states := _untold(node, subflow.end))]


def _untold(node: NodeRun, end: tuple[StateType, str] | None) -> list[StateType]:
    """The states of a node that were not reported; without Pending if it has begun since the last report."""
    if node.reported not in (None, StateType.PENDING, StateType.RUNNING):
        return []
    running = [] if node.reported is StateType.RUNNING or node.started_s is None else [StateType.RUNNING]
    if node.ended_s is not None:
        return [*running, StateType.COMPLETED]
    if end is not None and end[0] is not StateType.COMPLETED:
        failed = node.started_s is not None and end[0] is StateType.FAILED
        return [*running, StateType.FAILED if failed else StateType.CANCELLED]
    if running or node.reported is not None:
        return running
    return [StateType.PENDING]


def events_of(subflow: Subflow) -> list[dict[str, Any]]:
    """The events that report new states to Prefect's server. Marks these states as reported."""
    events = []
    for node, states in news_of(subflow):
        for state in states:
            at = _time_of(node, state, subflow)
            if node.reported_at is not None:
                at = max(at, node.reported_at + TICK)  # for the server, the state with the latest time counts
            events.append(_event(subflow, node, state, at))
            node.reported, node.reported_at = state, at
    return events


def _time_of(node: NodeRun, state: StateType, subflow: Subflow) -> datetime:
    if state is StateType.RUNNING:
        assert node.started_s is not None, f"{node.node.name} has not begun"
        return _moment(node.started_s)
    if state is StateType.COMPLETED:
        assert node.ended_s is not None, f"{node.node.name} has not ended"
        return _moment(node.ended_s)
    return _moment(subflow.entered_s) if state is StateType.PENDING else datetime.now(UTC)


def _event(subflow: Subflow, node: NodeRun, state: StateType, at: datetime) -> dict[str, Any]:
    """One state of one task run, in the form of Prefect's task run recorder."""
    last = f"..{subflow.last + 1}" if subflow.last > subflow.first else ""
    name = f"{short_names(subflow.plan)[node.node.name]}-it{subflow.first + 1}{last}"  # short, for the UI's graphs
    before = node.reported
    message = _message(subflow, node, state)
    event = Event(
        occurred=cast(Any, at),  # Prefect declares a type that newer Pythons do not have
        event=f"prefect.task-run.{NAMES[state]}",
        resource=Resource(
            {
                "prefect.resource.id": f"prefect.task-run.{node.id}",
                "prefect.resource.name": name,
                "prefect.run-count": str(int(state is not StateType.PENDING)),
                "prefect.state-message": message,
                "prefect.state-name": NAMES[state],
                "prefect.state-timestamp": at.isoformat(),
                "prefect.state-type": state.value,
                "prefect.orchestration": "client",
            }
        ),
        related=[
            RelatedResource(
                {
                    "prefect.resource.id": f"prefect.flow-run.{subflow.id}",
                    "prefect.resource.role": "flow-run",
                    "prefect.resource.name": subflow.name,
                }
            )
        ],
        payload={
            "intended": {"from": before.value if before else None, "to": state.value},
            "initial_state": {"type": before.value, "name": NAMES[before]} if before else None,
            "validated_state": {"type": state.value, "name": NAMES[state], "message": message},
            "task_run": _task_run(subflow, node, name, state, at),
        },
    )
    return event.model_dump(mode="json")


def _task_run(
    subflow: Subflow, node: NodeRun, name: str, state: StateType, at: datetime
) -> Mapping[str, Any]:
    """The task run's fields. Its times are the true ones, although states may be shifted to keep their order."""
    row: dict[str, Any] = {
        "name": name,
        "task_key": f"{subflow.plan.algorithm}.{node.node.name}",
        "dynamic_key": subflow.numbers,
        "task_inputs": {
            "wait_for": [
                {"input_type": "task_run", "id": str(subflow.nodes[other].id)} for other in node.node.after
            ]
        },
        "expected_start_time": _moment(subflow.entered_s).isoformat(),
    }
    if state is StateType.PENDING:
        return row
    row["run_count"] = 1
    if node.started_s is not None:
        row["start_time"] = _moment(node.started_s).isoformat()
    if state is not StateType.RUNNING:
        end = at if node.ended_s is None else _moment(node.ended_s)
        row["end_time"] = end.isoformat()
        row["total_run_time"] = node.inside_s
    return row


def _message(subflow: Subflow, node: NodeRun, state: StateType) -> str:
    if state is StateType.COMPLETED:
        several = f"{subflow.last - subflow.first + 1} iterations, " if subflow.last > subflow.first else ""
        return f"{several}{node.inside_s:.3f} s by the ranks' clocks"
    if state in (StateType.FAILED, StateType.CANCELLED) and subflow.end is not None:
        return subflow.end[1][:CAUSE_LENGTH]
    return ""


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _clock(seconds: float) -> str:
    return f"{_moment(seconds):%H:%M:%S.%f}"[:-3] + " UTC"


# --- all iterations of a run ---


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
                    "showing the iterations in Prefect ended early: %s: %s", type(fault).__name__, fault
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
        """The oldest subflow with something to write besides its end; None if there is none. They are opened in
        order."""
        self._merge()
        for subflow in self._shown:
            if not subflow.opening:
                return subflow if subflow.begun or subflow.end is not None else None
            rested = time.monotonic() - subflow.written_at_s >= PACE_S
            if subflow.unsent or (news_of(subflow) and (rested or subflow.end is not None)):
                return subflow
        return None

    async def _write(self, client: PrefectClient, subflow: Subflow) -> None:
        """Write a subflow's new states except its end. Raises Refused, and Away; unconfirmed events are sent
        again."""
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
        """Remove a completely written subflow from the list, unless a fault has replaced its end meanwhile."""
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
