"""What a rehearsal is told of a plan and of the machines: seconds and bytes. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, lcm
from random import Random

from rlhf_tasks.spec import EvaluateNode, ExecutionPlan, PlanNode, SyncNode


@dataclass(frozen=True)
class Costs:
    """What the planner prices of a plan.

    node_s       node -> seconds, from when its last rank has entered it until it ends; on CPUs longer than its price,
                 for the run's own processes need the same cores
    copy_s       onload -> seconds of the copy that it starts
    saved_bytes  save node -> rank -> bytes of its part of a snapshot
    read_bytes   rank -> bytes of weights that it reads when it loads its models, what ranks of a host share divided
                 among them
    iteration_s  seconds per iteration in the steady state
    evaluate_every, sync_every  iterations from one evaluation, or blend of a following reference, to the next; node_s
                 is of an iteration that has it
    iterations   of the run; None: what runs ahead does so to the end
    to_end_s     call in segments -> seconds in which it draws the last batch to its end
    """

    node_s: Mapping[str, float]
    copy_s: Mapping[str, float]
    saved_bytes: Mapping[str, Mapping[int, float]]
    read_bytes: Mapping[int, float]
    iteration_s: float
    evaluate_every: int = 1
    sync_every: int = 1
    iterations: int | None = None
    to_end_s: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def cycle(self) -> int:
        """Iterations after which everything that not every iteration has comes again."""
        return lcm(self.evaluate_every, self.sync_every)

    @property
    def commit_bytes(self) -> float:
        """Bytes of one commit."""
        return sum(sum(parts.values()) for parts in self.saved_bytes.values())

    @property
    def n_files(self) -> int:
        """Files of one commit."""
        return sum(map(len, self.saved_bytes.values()))

    def restored_bytes(self, plan: ExecutionPlan) -> dict[int, float]:
        """Rank -> bytes of a commit that it reads when it is restored: what it writes into one."""
        read: dict[int, float] = {}
        for node in plan.nodes:
            for rank, size_bytes in self.saved_bytes.get(node.name, {}).items():
                read[rank] = read.get(rank, 0.0) + size_bytes
        return read

    def seconds(self, node: PlanNode, iteration: int) -> float:
        """Seconds of a node in an iteration, counted from 0."""
        if isinstance(node, SyncNode) and (iteration + 1) % self.sync_every:
            return 0.0
        if isinstance(node, EvaluateNode):
            due = iteration == 0 if node.at_start else (iteration + 1) % self.evaluate_every == 0
            return self.node_s[node.name] if due else 0.0
        now = range(0 if iteration == 0 else iteration + node.lead, iteration + node.lead + 1)
        return sum(self._batch_s(node.name, batch) for batch in now)

    def _batch_s(self, node: str, batch: int) -> float:
        """Seconds in which a node serves the samples of an iteration; in segments, the first draws two batches."""
        if self.iterations is not None and batch >= self.iterations:
            return 0.0
        if node in self.to_end_s and self.iterations is not None and batch == self.iterations - 1:
            return self.to_end_s[node]
        return self.node_s[node] * (2 if node in self.to_end_s and batch == 0 else 1)


@dataclass(frozen=True)
class Machines:
    """What the planner does not price, in seconds and bytes per second. `sources` says where each figure comes from.

    disk_bytes_per_s    that a host reads and writes in the run's folder and the models' folders
    thread_bytes_per_s  that one thread hashes while it writes or reads
    start_s             from the end of a rank's process until the next one greets
    join_s              to make a generation's process groups
    reset_s             to drop samples, copies and groups
    noticed_s           from the end of a process until the controller knows
    interrupt_s         from the abort of process groups until a blocked collective raises
    attempt_s           from the end of a controller until the flow has begun another attempt
    """

    disk_bytes_per_s: float = 2e9
    thread_bytes_per_s: float = 1.4e9
    start_s: float = 25.0
    join_s: float = 5.0
    reset_s: float = 1.0
    noticed_s: float = 1.0
    interrupt_s: float = 1.0
    attempt_s: float = 60.0
    sources: tuple[str, ...] = field(
        default=(
            "thread_bytes_per_s: SHA-256 by hashlib on one thread",
            "start_s: imports of torch and transformers by eight processes of a host at once, with CUDA's context",
            "disk_bytes_per_s, join_s, attempt_s: estimates",
        ),
        repr=False,
    )


class Noise:
    """By how much nodes take longer or shorter than they are priced: a factor of mean 1, log-normal, drawn from the
    seed, the iteration and the node.

    spread  standard deviation of the factor's logarithm
    """

    def __init__(self, seed: int, spread: float) -> None:
        self._seed, self._spread = seed, spread

    def factor(self, iteration: int, node: str) -> float:
        """The factor of one node in one iteration."""
        if not self._spread:
            return 1.0
        drawn = Random(f"{self._seed}/{iteration}/{node}").gauss(0.0, self._spread)
        return exp(drawn - self._spread**2 / 2)
