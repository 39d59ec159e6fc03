"""Writes iterations to Prefect: a flow run for each, as a subflow of the run's, and a task run for each node.

Prefect 3's server takes task runs as its client reports them: as events, one for each state, with the client's own
time. So nodes have the times of the ranks' clocks. The states of a flow run get the time at which the server receives
them. So a subflow that is opened late is also ended late: its bar is as long as the iteration was by the ranks'
clocks, and its message says when that was.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID, uuid4

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import Event, RelatedResource, Resource

from planner.report.text import short_names
from rlhf_tasks.spec import ExecutionPlan, PlanNode

NAMES = {
    StateType.PENDING: "Pending",
    StateType.RUNNING: "Running",
    StateType.COMPLETED: "Completed",
    StateType.FAILED: "Failed",
    StateType.CANCELLED: "Cancelled",
}
TICK = timedelta(microseconds=1)  # least time between two states of a task run
CAUSE_LENGTH = 20_000  # most characters of a message


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
        """Drop the nodes, of which Prefect has all news: what is left is small."""
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
    name = f"{short_names(subflow.plan)[node.node.name]}-it{_places(subflow)}"  # short, for the UI's graphs
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


def _places(subflow: Subflow) -> str:
    return str(subflow.first + 1) + (f"..{subflow.last + 1}" if subflow.last > subflow.first else "")


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _clock(seconds: float) -> str:
    return f"{_moment(seconds):%H:%M:%S.%f}"[:-3] + " UTC"
