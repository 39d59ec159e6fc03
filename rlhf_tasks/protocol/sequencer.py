"""The sequencer: turns an execution plan into numbered requests, one sequence without gaps per rank.

It is a pure function of the plan and of where a generation starts. So a repeated iteration gets the same requests,
except for their generation and numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from prefect_rlhf.rlhf_tasks.spec import (
    CallNode,
    EvaluateNode,
    ExecutionPlan,
    Held,
    NodeKey,
    NodeRequest,
    OnloadNode,
    PlanNode,
    ReallocateNode,
    SaveNode,
    SyncNode,
)
from prefect_rlhf.rlhf_tasks.system.invariants import require


@dataclass(frozen=True)
class Deadlines:
    """How long a node may take once its last rank has entered it.

    factor       a node may take this many times its predicted seconds
    floor_s      seconds that every node gets at least
    predicted_s  node name -> seconds that the plan predicts; nodes without one get the floor
    users_s      node name -> seconds that the user's own code may take in it besides, until it counts as late there
    """

    factor: float
    floor_s: float
    predicted_s: Mapping[str, float] = field(default_factory=dict[str, float])
    users_s: Mapping[str, float] = field(default_factory=dict[str, float])

    def of(self, node: str) -> float:
        """The deadline of one node, in seconds."""
        own_s = max(self.floor_s, self.factor * self.predicted_s.get(node, 0.0))
        return own_s + self.users_s.get(node, 0.0)


@dataclass(frozen=True)
class Sequencer:
    """Requests of one generation.

    first_iteration  the first iteration of the generation: numbers start at 0 there
    first_sample     global id of that iteration's first sample
    first_versions   role that changes -> its version before that iteration; default: first_iteration times the
                     role's changes per iteration
    """

    plan: ExecutionPlan
    run: str
    attempt: int
    deadlines: Deadlines
    generation: int = 0
    first_iteration: int = 0
    first_sample: int = 0
    first_versions: Mapping[str, int] | None = None

    def whole_groups(self) -> "Sequencer":
        """The same, from the first whole group of samples on: before a change of the configuration that a user has
        accepted, groups may have had another size."""
        return replace(
            self, first_sample=-(-self.first_sample // self.plan.group_size) * self.plan.group_size
        )

    def starting_at(self, generation: int, iteration: int) -> "Sequencer":
        """The same run's sequencer for a generation that starts at an iteration."""
        return replace(
            self,
            generation=generation,
            first_iteration=iteration,
            first_sample=self.cursor(iteration),
            first_versions=self.versions(iteration),
        )

    def cursor(self, iteration: int) -> int:
        """Global id of the first sample of an iteration."""
        return self.first_sample + (iteration - self.first_iteration) * self.plan.n_seqs

    def versions(self, iteration: int) -> dict[str, int]:
        """Version of each role that changes before an iteration: the number of its changes so far."""
        first = self.first_versions
        if first is None:
            first = {role: self.first_iteration * n for role, n in self.changes.items()}
        return {
            role: first[role] + (iteration - self.first_iteration) * n for role, n in self.changes.items()
        }

    def key(self, iteration: int, node: str) -> NodeKey:
        """The key of one execution of a node in this generation."""
        return NodeKey(self.run, self.attempt, self.generation, iteration, node)

    def requests(self, iteration: int, *, in_snapshot: bool = True) -> dict[int, tuple[NodeRequest, ...]]:
        """Rank -> its requests for an iteration, in plan order. Ranks without work are left out."""
        begun = self.first_iteration
        require(
            iteration >= begun, f"iteration {iteration} precedes {begun}, with which the generation begins"
        )
        before = self.versions(iteration)
        requests: dict[int, list[NodeRequest]] = {rank: [] for rank in self.work}
        for node in self.first_order if iteration == self.first_iteration else self.plan.nodes:
            key, deadline_s = self.key(iteration, node.name), self.deadline_s(iteration, node)
            versions = {role: before.get(role, 0) + extra for role, extra in self.advances[node.name].items()}
            for rank in self.devices[node.name]:
                mine = requests[rank]
                mine.append(
                    NodeRequest(
                        key=key,
                        number=(iteration - self.first_iteration) * self.work[rank] + len(mine),
                        first_sample=self.cursor(iteration),
                        versions=versions,
                        deadline_s=deadline_s,
                        in_snapshot=in_snapshot,
                    )
                )
        return {rank: tuple(mine) for rank, mine in requests.items()}

    @cached_property
    def devices(self) -> dict[str, tuple[int, ...]]:
        """Node name -> its ranks."""
        return {node.name: node.devices for node in self.plan.nodes}

    def deadline_s(self, iteration: int, node: PlanNode) -> float:
        """The deadline of a node. In a generation's first iteration, one that runs ahead may also have to draw what
        the iterations up to its own need (`RankSamples.worked_on`)."""
        batches = node.lead + 1 if iteration == self.first_iteration else 1
        return batches * self.deadlines.of(node.name)

    @cached_property
    def first_order(self) -> tuple[PlanNode, ...]:
        """The nodes in the order of a generation's first iteration: those that run ahead come first, because the
        others may need samples that are only drawn now. They read nothing that the others make."""
        ahead = {node.name for node in self.plan.nodes if node.lead}
        for kind in (ReallocateNode, OnloadNode):  # a copy may be made of what an onload brings
            needed = {name for node in self.plan.nodes if node.name in ahead for name in node.after}
            ahead |= {node.name for node in self.plan.nodes if isinstance(node, kind) and node.name in needed}
        ahead |= self._freed_ahead()
        return tuple(sorted(self.plan.nodes, key=lambda node: node.name not in ahead))

    def _freed_ahead(self) -> set[str]:
        """The nodes that free what only calls that run ahead have read; the calls after these do not need it."""
        freed: set[str] = set()
        # parameters on a placement -> leads of their readers since they were freed
        readers: dict[Held, list[int]] = {}
        for node in self.plan.nodes:
            if node.frees is not None:
                leads = readers.pop(node.frees._replace(is_copy=False), [])
                if leads and all(leads):
                    freed.add(node.name)
            elif isinstance(node, CallNode | EvaluateNode) and node.reads is not None:
                readers.setdefault(node.reads, []).append(node.lead)
        return freed

    @cached_property
    def saves(self) -> dict[str, tuple[int, ...]]:
        """Save node -> the ranks that write a part."""
        return {node.name: node.writers for node in self.plan.nodes if node.writers}

    @cached_property
    def initial_saves(self) -> dict[str, tuple[int, ...]]:
        """The same of step 0, for which no samples have been drawn."""
        return {node.name: node.writers for node in self.plan.nodes if isinstance(node, SaveNode)}

    @cached_property
    def work(self) -> dict[int, int]:
        """Rank -> number of its nodes per iteration."""
        count: dict[int, int] = {}
        for devices in self.devices.values():
            for rank in devices:
                count[rank] = count.get(rank, 0) + 1
        return count

    @cached_property
    def changes(self) -> dict[str, int]:
        """Role whose parameters change -> how often in an iteration: its train_step calls and its syncs."""
        count = {role: 0 for role, placements in self.plan.roles.items() if placements.changes}
        for node in self.plan.nodes:
            if node.changes is not None:
                count[node.changes] = count.get(node.changes, 0) + 1
        return count

    @cached_property
    def advances(self) -> dict[str, dict[str, int]]:
        """Node name -> {role it reads: changes that its parameters have seen since the iteration began}.

        A node on the training placement sees all changes before it in plan order. A node on a read-only copy sees
        those before the copy's last reallocation.
        """
        now: dict[str, int] = {}
        copies: dict[Held, int] = {}
        advances: dict[str, dict[str, int]] = {}
        for node in self.plan.nodes:
            advances[node.name] = read = {}
            if node.reads is not None:
                role = node.reads.role
                read[role] = copies.get(node.reads._replace(is_copy=True), now.get(role, 0))
            if isinstance(node, SyncNode):
                read[node.leader] = now.get(node.leader, 0)
            if node.brings is not None and node.brings.is_copy:
                copies[node.brings] = now.get(node.brings.role, 0)
            if node.frees is not None:
                copies.pop(node.frees, None)
            if node.changes is not None:
                now[node.changes] = now.get(node.changes, 0) + 1
        return advances
