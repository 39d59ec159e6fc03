"""The simulated cluster: processes of ranks, hosts, disks, and the collectives in which ranks meet."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prefect_rlhf.rlhf_tasks.protocol.progress import Pace, Timeouts
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import (
    Costs,
    HostFault,
    Machines,
    Noise,
    RankFault,
    SlowFault,
)
from prefect_rlhf.rlhf_tasks.rehearsal.ranks import Process, SimulatedLink, Waiting
from prefect_rlhf.rlhf_tasks.rehearsal.story import WaitLog
from prefect_rlhf.rlhf_tasks.rehearsal.time_and_disk import Disk, VirtualTime
from prefect_rlhf.rlhf_tasks.spec import (
    ExecutionPlan,
    NodeKey,
    NodeRequest,
    OnloadNode,
    PlanNode,
    SaveNode,
    SaveSamplesNode,
)

TICK_S = 5.0  # coarser than on a real rank: no message is lost here, and disks move evenly


class Meeting:
    """A node on its ranks: it runs when all have entered, and ends on all at the same time.

    broken  a member is gone, has failed or hangs: it never ends
    """

    __slots__ = ("began_s", "broken", "members", "node", "request", "wanted")

    def __init__(self, node: PlanNode, request: NodeRequest) -> None:
        self.node, self.request = node, request
        self.wanted = len(node.devices)
        self.members: list[Process] = []
        self.broken = False
        self.began_s: float | None = None


class SimulatedCluster:
    """All that an attempt reaches from its controller.

    processes   rank -> its process; None while it has none
    running     nodes that run now
    kept_bytes  host -> bytes of copies that wait to be written; most_kept_bytes: the most there were
    on_idle     called when `running` becomes 0, or ends being 0
    on_hit      called with the kind of a fault when it hits: never where a rank has no process, and later than it
                strikes where an error finds a rank that does nothing
    process     makes a process of a rank
    """

    def __init__(
        self,
        loop: VirtualTime,
        plan: ExecutionPlan,
        costs: Costs,
        machines: Machines,
        noise: Noise,
        watch: WaitLog,
        pace: Pace,
        on_idle: Callable[[bool], None],
        on_hit: Callable[[str], None],
        process: Callable[["SimulatedCluster", int], Process] = Process,
    ) -> None:
        self.plan, self.costs, self.machines, self.watch, self.pace = plan, costs, machines, watch, pace
        self.timeouts = Timeouts()
        self.running = 0
        self.kept_bytes: Counter[int] = Counter()
        self.most_kept_bytes: Counter[int] = Counter()
        self._loop, self._noise, self._on_idle, self._on_hit = loop, noise, on_idle, on_hit
        self._make_process = process
        self._nodes = {node.name: node for node in plan.nodes}
        self._saves: dict[int, list[SaveNode]] = {}
        for node in plan.nodes:
            if isinstance(node, SaveNode):
                for rank in node.devices:
                    self._saves.setdefault(rank, []).append(node)
        hosts = range(-(-plan.n_devices // plan.devices_per_host))
        self.disks = [Disk(loop, machines.disk_bytes_per_s, machines.thread_bytes_per_s) for _ in hosts]
        self._host_back_s = [0.0 for _ in hosts]
        self._slowness = [1.0 for _ in hosts]
        self._restored = costs.restored_bytes(plan)
        self._meetings: dict[NodeKey, Meeting] = {}
        self._joining: dict[int, tuple[Process, Callable[[], object]]] = {}
        self._copies_end_s: dict[str, float] = {}  # onload -> when its last copy ends
        self._mail: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._links: list[SimulatedLink] = []
        self._work: set[asyncio.Task[None]] = set()
        self.processes: list[Process | None] = [process(self, rank) for rank in range(plan.n_devices)]
        self._loop.call_later(TICK_S, self._tick)

    # --- time and messages ------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def well(self) -> bool:
        """Whether every rank has a process that can continue."""
        return all(p is not None and not p.stopped and not p.hangs for p in self.processes)

    def call_later(self, seconds: float, act: Callable[..., None], *facts: Any) -> None:
        self._loop.call_later(seconds, act, *facts)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Have something done beside everything else."""
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def post(self, act: Callable[..., None], *facts: Any) -> None:
        """Send a message. Messages arrive in the order in which they are sent, and at once: `Costs` has what calls
        take with their messages."""
        if not self._mail:
            self._loop.call_soon(self._deliver)
        self._mail.append((act, facts))

    def _deliver(self) -> None:
        mail, self._mail = self._mail, []
        for act, facts in mail:
            act(*facts)

    def _tick(self) -> None:
        self._loop.call_later(TICK_S, self._tick)
        for disk in self.disks:
            for owner, moved_bytes in disk.in_progress():
                if isinstance(owner, Process):
                    owner.tell_progress(moved_bytes)

    def link(
        self,
        rank: int,
        name: str,
        client: str,
        executor: str,
        on_news: Callable[[Any], None],
        on_lost: Callable[[int, str], None],
        on_started: Callable[[int], None],
    ) -> SimulatedLink:
        """A controller's way to a rank (`rlhf_tasks.controller.attempt.LinkFactory`)."""
        link = SimulatedLink(self, rank, name, client, executor, on_news, on_lost, on_started)
        self._links.append(link)
        return link

    def forget_links(self) -> None:
        """The controller is gone."""
        self._links = []

    # --- what ranks ask -----------------------------------------------------------------------------------

    def node(self, name: str) -> PlanNode:
        return self._nodes[name]

    def saves(self, rank: int) -> list[SaveNode]:
        """The save nodes of a rank whose parts step 0 has."""
        return self._saves.get(rank, [])

    def host(self, rank: int) -> int:
        return rank // self.plan.devices_per_host

    def disk_of(self, rank: int) -> Disk:
        return self.disks[self.host(rank)]

    def load_bytes(self, rank: int, step: int | None) -> float:
        """Bytes that a rank reads for a generation: its models, and its part of a commit."""
        restored = 0.0 if step is None else self._restored.get(rank, 0.0)
        return self.costs.read_bytes.get(rank, 0.0) + restored

    def part_bytes(self, node: SaveNode | SaveSamplesNode, rank: int) -> float:
        return self.costs.saved_bytes[node.name][rank]

    def copied(self, process: Process, part: Waiting) -> None:
        """A part of a snapshot lies in host memory."""
        host = self.host(process.rank)
        self.kept_bytes[host] += round(part.size_bytes)
        self.most_kept_bytes[host] = max(self.most_kept_bytes[host], self.kept_bytes[host])

    def dropped(self, process: Process, parts: Iterable[Waiting]) -> None:
        """Parts of a snapshot do not lie in host memory any more."""
        self.kept_bytes[self.host(process.rank)] -= sum(round(part.size_bytes) for part in parts)

    def join(self, process: Process, joined: Callable[[], object]) -> None:
        """A process joins the groups of its generation; when every rank has, they are made."""
        self._joining[process.rank] = (process, joined)
        process.meeting = None
        here = [
            (one, then)
            for one, then in self._joining.values()
            if one.alive
            and not one.stopped
            and one.job is not None
            and one.inbox.generation == process.inbox.generation
        ]
        if len(here) == self.plan.n_devices:
            self._joining = {}
            self._meetings = {}
            self._copies_end_s = {}
            for _, then in here:
                self._loop.call_later(self.machines.join_s, then)

    def enter(self, process: Process, request: NodeRequest) -> None:
        """A process enters a node."""
        meeting = self._meetings.get(request.key)
        if meeting is None:
            meeting = self._meetings[request.key] = Meeting(self._nodes[request.key.node], request)
        meeting.members.append(process)
        meeting.broken |= process.hangs
        process.meeting = meeting
        if len(meeting.members) == meeting.wanted and not meeting.broken:
            self._begin(meeting)

    def _begin(self, meeting: Meeting) -> None:
        node, iteration = meeting.node, meeting.request.key.iteration
        del self._meetings[meeting.request.key]
        seconds = self.costs.seconds(node, iteration) * self._noise.factor(iteration, node.name)
        hosts = {self.host(process.rank) for process in meeting.members}
        seconds *= max(self._slowness[host] for host in hosts)
        seconds += max(0.0, max((self._copies_end_s.get(b, 0.0) for b in node.after), default=0.0) - self.now)
        meeting.began_s = self.now
        self._count(1)
        self._loop.call_later(seconds, self._ended, meeting)

    def _ended(self, meeting: Meeting) -> None:
        if meeting.broken:
            return
        began_s, node = meeting.began_s, meeting.node
        assert began_s is not None, f"{node.name} ends before it has begun"
        if isinstance(node, OnloadNode):
            mine = set(node.devices)
            before = [at for name, at in self._copies_end_s.items() if mine & set(self._nodes[name].devices)]
            self._copies_end_s[node.name] = max(self.now, *before, self.now) + self.costs.copy_s[node.name]
        self.watch.used(f"call {node.name}", self.now - began_s, meeting.request.deadline_s)
        for process in meeting.members:
            process.meeting = None
            process.node_ended(meeting.request, began_s)
        self._count(-1)

    def _count(self, change: int) -> None:
        was = self.running
        self.running += change
        if (was == 0) != (self.running == 0):
            self._on_idle(self.running == 0)

    def break_up(self, meeting: Meeting | None) -> None:
        """A meeting will never end."""
        if meeting is not None and not meeting.broken:
            meeting.broken = True
            if meeting.began_s is not None:
                self._count(-1)
            for member in meeting.members:
                member.peer_left(meeting.request.key)

    # --- what goes wrong ----------------------------------------------------------------------------------

    def strike(self, fault: RankFault | HostFault | SlowFault) -> None:
        """A fault strikes."""
        match fault:
            case RankFault():
                self._strike_rank(fault)
            case HostFault():
                self._host_back_s[fault.host] = self.now + fault.for_s
                if processes := self._on_host(fault.host):
                    self._on_hit(fault.kind)
                for process in processes:
                    self.end_process(process, "its host is gone")
            case SlowFault(kind="slow"):
                self._slow_host(fault.host, fault.factor)
                self._loop.call_later(fault.for_s, self._slow_host, fault.host, 1 / fault.factor)
            case SlowFault():
                self._slow_disk(fault.host, fault.factor)
                self._loop.call_later(fault.for_s, self._slow_disk, fault.host, 1 / fault.factor)

    def _strike_rank(self, fault: RankFault) -> None:
        process = self.processes[fault.rank]
        if process is None:
            return
        if fault.kind == "error":
            process.raises = True
            self.raise_error(process)
            return
        self._on_hit(fault.kind)
        if fault.kind == "kill":
            self.end_process(process, "it was killed")
            return
        process.hangs |= fault.kind == "hang"
        process.stopped |= fault.kind == "stop"
        self.break_up(process.meeting)

    def raise_error(self, process: Process) -> None:
        """An error is raised in what a process does. Where it does nothing, the error waits for its next call."""
        if process.job is None or process.hangs or process.stopped or not process.alive:
            return
        process.raises = False
        self._on_hit("error")
        self.break_up(process.meeting)
        process.fail("an error of the rehearsal")

    def _on_host(self, host: int) -> list[Process]:
        return [p for p in self.processes if p is not None and self.host(p.rank) == host]

    def _slow_host(self, host: int, factor: float) -> None:
        self._slowness[host] *= factor

    def _slow_disk(self, host: int, factor: float) -> None:
        self.disks[host].slow_down(factor)

    def end_process(self, process: Process, reason: str) -> None:
        """A process ends. Its nanny starts the next one when its host is there."""
        if not process.alive:
            return
        process.alive = False
        process.lose_copies()
        self.break_up(process.meeting)
        rank = process.rank
        self.processes[rank] = None
        for link in self._links:
            if link.rank == rank:
                self._loop.call_later(self.machines.noticed_s, link.broken, process, reason)
        host_back_s = max(0.0, self._host_back_s[self.host(rank)] - self.now)
        self._loop.call_later(host_back_s + self.machines.start_s, self._start_process, rank)

    def _start_process(self, rank: int) -> None:
        away_s = self._host_back_s[self.host(rank)] - self.now
        if away_s > 0:  # the host was lost again meanwhile
            self._loop.call_later(away_s + self.machines.start_s, self._start_process, rank)
        elif self.processes[rank] is None:
            self.processes[rank] = self._make_process(self, rank)
