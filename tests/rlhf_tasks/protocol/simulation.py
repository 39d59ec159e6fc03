"""Rehearsals in which every instruction can be watched, messages are late, and ranks have a state.

A rank carries role -> version and a chain of hashes, which is trained, saved, committed and loaded: two runs can be
compared bit by bit. Calls measure numbers, by which plans may decide. What runs in which order, and what a commit
holds, is checked in every run.
"""

import functools
import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from prefect_rlhf.rlhf_tasks.checkpoint.journals import lineage_lines
from prefect_rlhf.rlhf_tasks.controller.attempt import Attempt, Surroundings
from prefect_rlhf.rlhf_tasks.protocol.decisions import DECIDED
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    Committed,
    Done,
    Failed,
    Faulted,
    Finished,
    GaveUp,
    Held,
    NodeEnded,
    NotEntered,
    Run,
    RunSpec,
    WriteCommit,
)
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import ControllerFault, Costs, Machines, Noise, RankFault
from prefect_rlhf.rlhf_tasks.rehearsal.cluster import SimulatedCluster
from prefect_rlhf.rlhf_tasks.rehearsal.ranks import Process, SimulatedLink
from prefect_rlhf.rlhf_tasks.rehearsal.rehearsal import Rehearsal, RehearsalRequest, carried_out
from prefect_rlhf.rlhf_tasks.rehearsal.time_and_disk import CommitsOnDisk
from prefect_rlhf.rlhf_tasks.spec import (
    CallNode,
    ExecutionPlan,
    NodeKey,
    NodeRequest,
    NodeResult,
    PlanNode,
    ReallocateNode,
    ReleaseNode,
    SaveNode,
    SaveSamplesNode,
)
from tests.rlhf_tasks.settings import limits

MACHINES = Machines(
    disk_bytes_per_s=1e9,
    start_s=3.0,
    join_s=0.1,
    reset_s=0.05,
    noticed_s=0.5,
    interrupt_s=0.1,
    attempt_s=0.1,
)
LIMITS = {"io_floor_s": 20, "io_least_bytes_per_s": 10, "deadline_factor": 10, "deadline_floor_s": 10}
NOTICED_S = 3.0  # within which a rank notices that its controller is gone
HELD_S = 30.0  # longer than anything else takes
HOURS = 5000 / 3600  # after which a run counts as hanging

Results = Mapping[int, Mapping[str, Mapping[int, NodeResult]]]
Watch = Callable[["World", "Rank | Controller", str, Any], None]


def digest(*parts: object) -> str:
    """A short hash of anything printable."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


class Rank(Process):
    """A rank with a state, whose instructions can be watched."""

    def __init__(self, world: "World", cluster: SimulatedCluster, rank: int) -> None:
        super().__init__(cluster, rank)
        self.world = world
        self.params: dict[str, tuple[int, str]] = {}
        self.copies: dict[tuple[str, Any], int] = {}
        self.drawn: dict[int, str] = {}  # iteration -> what was generated for it
        self.first = 0
        self.asked: NodeRequest | None = None  # what it was asked for last

    def carry_out(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Done):
                result = replace(instruction.result, metrics=self.metrics())
                instruction = instruction.model_copy(update={"result": result})
            self.world.around(self, instruction, self.carry_one_out)

    def carry_one_out(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Run):
                self.asked = instruction.request
                self.world.record(self.rank, self.asked)
        super().carry_out(instructions)

    def receive(self, message: Any, link: SimulatedLink) -> None:
        self.world.post(self, super().receive, message, link)

    def client_lost(self, client: str) -> None:
        self.world.later(NOTICED_S, super().client_lost, client)

    def node_ended(self, request: NodeRequest, started_s: float) -> None:
        """The ranks of a node end it in any order."""
        self.world.later(0.2, super().node_ended, request, started_s)

    def peer_left(self, key: NodeKey) -> None:
        """A peer is gone: some fail at once, others hang until they are interrupted."""
        if self.world.rng.random() < 0.5:
            self.world.later(0.2, self.connection_closed, key)

    def connection_closed(self, key: NodeKey) -> None:
        if self.job == key:
            self.fail("connection closed by peer")

    # --- the state --------------------------------------------------------------------------------------

    def forget(self) -> None:
        self.params, self.copies, self.drawn = {}, {}, {}

    def load(self, step: int | None) -> None:
        parts = {} if step is None else self.world.commits.orders[step].parts
        for node in self.world.plan.on(self.rank):
            if isinstance(node, SaveNode):
                saved = [part["state"] for part in parts.get(node.name, {}).values()]
                (self.params[node.role],) = set(saved) or {(0, digest("initial", node.role))}
            elif isinstance(node, SaveSamplesNode) and step:
                self.drawn = dict(parts[node.name][min(node.writers)]["drawn"])
        self.first = step or 0

    def compute(self, request: NodeRequest) -> str:
        node, now = self.world.plan.node(request.key.node), request.key.iteration
        for role, version in request.versions.items():
            copy = self.copies.get((role, getattr(node, "placement", None)))
            present = self.params.get(role, (version,))[0] if copy is None else copy
            assert present == version, f"rank {self.rank}: {request.key} expects {role} {version}: {present}"
        if isinstance(node, ReallocateNode):
            self.copies[node.role, node.destination] = request.versions[node.role]
        elif isinstance(node, ReleaseNode):
            self.copies.pop((node.role, node.placement), None)
        elif isinstance(node, CallNode) and node.lead:
            # Where the commit has nothing, for all iterations up to the one ahead.
            first = now if now == self.first and not self.drawn else now + node.lead
            for iteration in range(first, now + node.lead + 1):
                self.drawn[iteration] = f"{iteration} by {request.versions[node.call.role]}"
        elif isinstance(node, CallNode) and node.trains and node.call.role in self.params:
            version, chain = self.params[node.call.role]
            if lead := self.world.plan.lead:
                assert self.drawn[now] == f"{now} by {max(0, now - lead)}"
            if runs(node, request):
                chain = digest(chain, node.name, request.first_sample, request.decided)
            self.params[node.call.role] = (version + 1, chain)
        return digest(node.name, request.first_sample, sorted(self.params.items()))

    def metrics(self) -> dict[str, float]:
        """Of what it was asked for last, where that is a call that runs: a number in 0 .. 1, equal on all ranks,
        and another one after another decision."""
        request = self.asked
        assert request is not None
        node = self.world.plan.node(request.key.node)
        if not isinstance(node, CallNode) or not runs(node, request):
            return {}
        asked = digest(node.name, request.first_sample, request.versions, request.decided)
        return {"measured": int(asked, 16) / 2**48}

    def details(self, key: NodeKey, node: SaveNode | SaveSamplesNode) -> dict[str, Any]:
        if isinstance(node, SaveNode):
            return {"state": self.params[node.role]}
        step = key.iteration + 1
        return {"drawn": {t: self.drawn[t] for t in range(step, step + node.lead)}}


def runs(node: CallNode, request: NodeRequest) -> bool:
    """Whether a call runs, by what is decided."""
    return not node.call.when or request.decided[node.call.when] > 0


class Controller(Attempt):
    """An attempt whose instructions can be watched, and which can be killed between them."""

    def __init__(
        self, world: "World", around: Surroundings, spec: RunSpec, tell: Callable[[Any], None]
    ) -> None:
        super().__init__(around, spec, tell)
        self.world, self.alive = world, True

    def _feed(self, stimulus: Callable[..., list[Any]], *facts: Any) -> None:
        if self.alive:
            super()._feed(stimulus, *facts)

    def _apply(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            self.world.around(self, instruction, super()._apply)
        if self.alive:
            super()._apply([])  # tells what may be entered now

    def _receive(self, news: Any) -> None:
        self.world.post((self, rank_of(news)), super()._receive, news)

    def enter(self, iteration: int, generation: int) -> None:
        super().enter(iteration, generation)
        if self.alive:
            ledger, now = self.ledger, self.world.now
            assert ledger.enter(iteration, generation, now) == [], "a repeat"
            stale = ledger.enter(max(ledger.account.next_iteration - 1, 0), ledger.generation - 1, now)
            assert all(isinstance(i, NotEntered) for i in stale), "an older generation's task entered again"


class Commits(CommitsOnDisk):
    """What survives every process: the commits, and the metrics appended with them."""

    def __init__(self, plan: ExecutionPlan) -> None:
        super().__init__()
        self.plan = plan
        self.orders: dict[int, WriteCommit] = {}
        self.metrics: dict[int, dict[str, dict[int, str]]] = {}
        self.lineage: list[dict[str, Any]] = []

    def decided(self) -> list[dict[str, Any]]:
        return [line for line in self.lineage if DECIDED in line]

    def add(self, order: WriteCommit, results: Results) -> None:
        """Commits are in order, never repeated, whole, and of one version."""
        last, plan = max(self.orders, default=None), self.plan
        assert order.step == 0 if last is None else order.step > last
        assert order.iterations == tuple(range(last or 0, order.step))
        assert order.plan == plan
        assert order.cursor == order.step * plan.n_seqs
        for node in plan.nodes:
            if isinstance(node, SaveNode):
                parts = order.parts[node.name]
                assert set(parts) == set(node.devices)
                assert {part["state"][0] for part in parts.values()} == {order.versions[node.role]}
            elif isinstance(node, SaveSamplesNode) and order.step:
                ahead = range(order.step, order.step + plan.lead)
                wanted = {"drawn": {t: f"{t} by {max(0, t - plan.lead)}" for t in ahead}}
                parts = order.parts[node.name]
                assert list(parts.values()) == [wanted] * len(parts)
        super().add(order, results)
        self.orders[order.step] = order
        for iteration, nodes in results.items():
            digests = {node: {r: one.digest for r, one in ranks.items()} for node, ranks in nodes.items()}
            self.metrics[iteration] = digests
            self.lineage += map(json.loads, lineage_lines(iteration, nodes))


class World(Rehearsal):
    """A rehearsal of a run whose seconds are short and random, all from one seed.

    delay_s      a message takes twice as long at most
    pause_after  the flow pauses the run when it hears that this iteration is committed, and resumes it HELD_S after
                 it has heard that the run is held
    watch        called with (process, "before" | "after", instruction) around every instruction
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        *,
        iterations: int,
        seed: int = 0,
        delay_s: float = 0.01,
        snapshot_every: int | Literal["auto"] = 1,
        max_restarts: int = 3,
        pause_after: int | None = None,
        watch: Watch = lambda world, process, moment, instruction: None,
    ) -> None:
        self.plan, self.delay_s, self.watch = plan, delay_s, watch
        self.arrives_s: dict[Any, float] = {}  # connection -> when its last message arrives
        self.rng = random.Random(seed)
        self.pause_after, self.is_paused, self.held_at = pause_after, False, list[int]()
        self.requests: dict[tuple[int, int, str], NodeRequest] = {}
        self.orders: dict[tuple[int, int, int], list[tuple[int, str]]] = {}
        self.outcome: Finished | GaveUp | None = None
        self.faults: list[Faulted] = []
        self.commits = Commits(plan)
        self.error: BaseException | None = None
        spec = RunSpec(
            run="run",
            attempt=0,
            ranks=tuple(f"rank-{rank}" for rank in range(plan.n_devices)),
            plan=plan,
            config={},
            run_folder="",
            iterations=iterations,
            limits=limits(
                snapshot_every=snapshot_every, snapshot_max_s=1e9, max_restarts=max_restarts, **LIMITS
            ),
        )
        request = RehearsalRequest(
            spec, self.costs(), MACHINES, Noise(seed, 0.5), keep_last=10**6, hours=HOURS, leaps=False
        )
        super().__init__(
            request,
            functools.partial(Controller, self),
            functools.partial(Rank, self),
            self.commits,
        )
        self.loop.set_exception_handler(self.failed)

    def costs(self) -> Costs:
        """Short seconds of everything."""
        sizes = {
            node.name: {rank: 1e9 * self.rng.uniform(0.03, 0.6) for rank in node.writers}
            for node in self.plan.nodes
            if isinstance(node, SaveNode | SaveSamplesNode)
        }
        seconds = {node.name: self.rng.uniform(0.01, 0.2) for node in self.plan.nodes}
        return Costs(seconds, {}, sizes, {}, iteration_s=1.0)

    # --- time and messages ------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.loop.time()

    def later(self, most_s: float, act: Callable[..., None], *given: Any) -> None:
        """Do something within so many seconds."""
        self.loop.call_later(self.rng.uniform(0, most_s), act, *given)

    def post(self, connection: Any, arrive: Callable[..., None], *given: Any) -> None:
        """A message arrives after those before it on its connection."""
        soonest_s = self.arrives_s.get(connection, 0.0) + 1e-6
        self.arrives_s[connection] = at_s = max(soonest_s, self.now + self.rng.uniform(0, 2 * self.delay_s))
        self.loop.call_at(at_s, arrive, *given)

    def around(
        self, process: "Rank | Controller", instruction: Any, carry_out: Callable[[list[Any]], None]
    ) -> None:
        """Carry an instruction out, and let it be watched. A process that is killed meanwhile does no more."""
        for moment in ("before", "after"):
            if process.alive and moment == "after":
                carry_out([instruction])
            if process.alive:
                self.watch(self, process, moment, instruction)

    def failed(self, loop: Any, context: dict[str, Any]) -> None:
        """A check has failed."""
        self.error = self.error or context.get("exception") or RuntimeError(context["message"])
        loop.stop()

    def run_to_end(self) -> Finished | GaveUp:
        """Let time pass until the run ends. Fails when nothing ends it, and when a check fails."""
        try:
            carried_out(self)
        except RuntimeError:
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error
        assert self.outcome is not None, f"hangs at {self.now:.0f} s"
        return self.outcome

    # --- the flow ---------------------------------------------------------------------------------------

    def begin(self, spec: RunSpec) -> None:
        super().begin(spec)
        assert self.attempt is not None
        if self.is_paused:
            self.attempt.pause()

    def hear(self, attempt: Attempt, event: Any) -> None:
        super().hear(attempt, event)
        match event:
            case Finished() | GaveUp():
                assert self.outcome is None
                self.outcome = event
            case Faulted():
                self.faults.append(event)
            case NodeEnded():
                answered = attempt.ledger.account.results(event.iteration)[event.node]
                assert set(answered) == set(self.plan.node(event.node).devices)
            case Committed(iteration=iteration) if iteration == self.pause_after:
                self.loop.call_soon(self.pause)
            case Held(step=step):
                assert self.is_paused
                assert max(self.commits.orders) == step
                self.held_at.append(step)
                if len(self.held_at) == 1:  # not again after a fault, nor by the next attempt
                    self.loop.call_later(HELD_S, self.resume)
            case _:
                pass

    def pause(self) -> None:
        """The flow orders a pause."""
        self.is_paused = True
        if self.attempt is not None:
            self.delivered_when_paused = self.attempt.ledger.account.next_iteration
            self.attempt.pause()

    def resume(self) -> None:
        """The flow has looked on for a while."""
        self.is_paused = False
        if self.attempt is not None:
            self.attempt.resume()

    # --- deaths -----------------------------------------------------------------------------------------

    def kill(self, rank: int) -> None:
        """End a rank's process; its nanny starts the next one."""
        self.strike(RankFault(kind="kill", at_s=0, rank=rank))

    def hang(self, rank: int) -> None:
        """A rank's engine thread stops answering for good, interrupts included."""
        self.strike(RankFault(kind="hang", at_s=0, rank=rank))

    def restart_controller(self) -> None:
        """The controller dies; its leases end when the ranks notice; meanwhile the next attempt begins."""
        assert isinstance(self.attempt, Controller)
        self.attempt.alive = False
        self.strike(ControllerFault(kind="controller", at_s=0))

    # --- what is checked --------------------------------------------------------------------------------

    def record(self, rank: int, request: NodeRequest) -> None:
        """Order on every rank, no node twice in a generation, the same requests in every generation."""
        key = request.key
        assert not (self.is_paused and self.held_at), f"rank {rank} runs {key} while the run is held"
        order = self.orders.setdefault((key.attempt, key.generation, rank), [])
        assert request.number == len(order), f"rank {rank} ran number {request.number} as number {len(order)}"
        order.append((key.iteration, key.node))
        plain = replace(request, key=key._replace(attempt=0, generation=0), number=0, in_snapshot=True)
        if self.plan.lead:  # in a generation's first iteration, what runs ahead may have more to do
            plain = replace(plain, deadline_s=0.0)
        assert self.requests.setdefault((rank, key.iteration, key.node), plain) == plain

    def check_orders(self) -> None:
        """On every rank, in every generation, what ran is a prefix of the plan's order. In its first iteration what
        runs ahead comes first."""
        for (_, _, rank), order in self.orders.items():
            iterations = range(order[0][0], order[-1][0] + 1)
            expected = [
                (t, node.name)
                for t in iterations
                for node in first_come(self.plan, t == iterations[0])
                if rank in node.devices
            ]
            assert order == expected[: len(order)]

    @property
    def final(self) -> tuple[Any, ...]:
        """Everything that two runs must agree on: the last commit's parts, cursor, versions; decisions; metrics."""
        last = self.commits.orders[max(self.commits.orders)]
        decided = [(line["iteration"], line["node"], line[DECIDED]) for line in self.commits.decided()]
        return last.step, last.cursor, last.versions, last.parts, decided, self.commits.metrics


def rank_of(news: Any) -> int:
    """The rank that has sent news."""
    match news:
        case Done():
            return news.result.rank
        case Failed():
            return news.failure.rank
        case _:
            return news.rank


def first_come(plan: ExecutionPlan, is_first: bool) -> list[PlanNode]:
    """A plan's nodes in the order of an iteration, by the names that `ahead_plan` gives."""
    ahead = ("to_generate", "generate", "save_samples") if is_first and plan.lead else ()
    return [*map(plan.node, ahead), *(node for node in plan.nodes if node.name not in ahead)]
