"""What a rehearsal assumes: seconds and bytes of a plan and of the machines, their noise, and faults.

Faults are a list, a rate at which they strike devices, or both, from a YAML file.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from prefect_rlhf.rlhf_tasks.config.files import faults_of, read_yaml
from prefect_rlhf.rlhf_tasks.config.settings import MOST_SECONDS, Settings
from prefect_rlhf.rlhf_tasks.spec import EvaluateNode, ExecutionPlan, PlanNode, SyncNode
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError


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
        return math.lcm(self.evaluate_every, self.sync_every)

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
    replan_s            to search for a plan for the devices that are left (flows/run/device_loss.py)
    """

    disk_bytes_per_s: float = 2e9
    thread_bytes_per_s: float = 1.4e9
    start_s: float = 25.0
    join_s: float = 5.0
    reset_s: float = 1.0
    noticed_s: float = 1.0
    interrupt_s: float = 1.0
    attempt_s: float = 60.0
    replan_s: float = 10.0
    sources: tuple[str, ...] = field(
        default=(
            "thread_bytes_per_s: SHA-256 by hashlib on one thread",
            "start_s: imports of torch and transformers by eight processes of a host at once, with CUDA's context",
            "disk_bytes_per_s, join_s, attempt_s: estimates",
        ),
        repr=False,
    )

    @classmethod
    def of_cpus(cls, disk_bytes_per_s: float) -> Self:
        """Of ranks on CPUs, whose processes are forks of one that has loaded torch."""
        return cls(
            disk_bytes_per_s,
            start_s=3.0,
            join_s=0.5,
            reset_s=0.2,
            noticed_s=0.1,
            interrupt_s=0.2,
            attempt_s=20.0,
            sources=(
                "start_s to attempt_s: the demo on two busy cores (tests/flows/test_effective_time.py)",
            ),
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
        return math.exp(drawn - self._spread**2 / 2)


Kind = Literal["kill", "hang", "stop", "error"]
MOST_FAULTS = 10_000  # of a list or drawn; more than one every ten seconds of a day

Strikes = Annotated[float, Field(ge=0, le=MOST_SECONDS)]


class RankFault(Settings):
    """Something goes wrong on one rank.

    kill   its process ends
    hang   its call never ends, and its groups cannot be aborted
    stop   its process is stopped: it does nothing and does not answer
    error  its call raises; where it is in none, the next one does
    """

    kind: Kind
    at_s: Strikes = Field(description="Seconds after the run has begun.")
    rank: int = Field(ge=0)


class HostFault(Settings):
    """A host is lost with all its processes, and comes back. Nothing runs on other hosts in its place."""

    kind: Literal["host"]
    at_s: Strikes
    host: int = Field(ge=0)
    for_s: float = Field(default=120.0, ge=0, le=MOST_SECONDS)


class ControllerFault(Settings):
    """The controller's process ends: the next attempt begins at the last commit."""

    kind: Literal["controller"]
    at_s: Strikes


class SlowFault(Settings):
    """For a while a host computes or sends, or reads and writes, slower by a factor. Collectives wait for it."""

    kind: Literal["slow", "slow_disk"]
    at_s: Strikes
    host: int = Field(ge=0)
    for_s: float = Field(gt=0, le=MOST_SECONDS)
    factor: float = Field(gt=1, le=1e6)


TAGS = ("of a rank", "of a host", "of the controller", "of speed")


def _form(value: object) -> str:
    kind = (
        cast(dict[str, Any], value).get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    )
    rank, host, controller, speed = TAGS
    known = {"host": host, "controller": controller, "slow": speed, "slow_disk": speed}
    return known.get(kind, rank) if isinstance(kind, str) else rank


InjectedFault = Annotated[
    Annotated[RankFault, Tag(TAGS[0])]
    | Annotated[HostFault, Tag(TAGS[1])]
    | Annotated[ControllerFault, Tag(TAGS[2])]
    | Annotated[SlowFault, Tag(TAGS[3])],
    Discriminator(_form),
]


class FaultRate(Settings):
    """Faults that strike at random.

    per_device_day  mean number that strikes one device in a day
    kinds           kind -> its share of them
    """

    per_device_day: float = Field(gt=0, le=1e4)
    kinds: dict[Kind, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        default={"kill": 0.8, "hang": 0.1, "error": 0.1}, min_length=1
    )


class FaultFile(Settings):
    """The content of a fault file."""

    faults: tuple[InjectedFault, ...] = Field(default=(), max_length=MOST_FAULTS)
    rate: FaultRate | None = None

    @model_validator(mode="after")
    def _has_something(self) -> Self:
        if not self.faults and self.rate is None:
            raise ValueError("there are neither faults nor a rate; give one of them, or leave out --faults")
        return self


def read_faults(path: Path) -> FaultFile:
    """The faults in a YAML file. Raises ConfigError; its sentence names the file, the entry and the value."""
    try:
        return FaultFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {faults_of(error, FaultFile, *TAGS)}") from None


def scheduled(
    file: FaultFile | None, n_ranks: int, ranks_per_host: int, hours: float, seed: int, where: str
) -> list[InjectedFault]:
    """All faults of a rehearsal in the order in which they strike; those after its end are left out.

    where  the file, for sentences
    Raises ConfigError for a rank or host that the cluster has not, and for a rate that gives too many faults.
    """
    if file is None:
        return []
    n_hosts = n_ranks // ranks_per_host
    for number, fault in enumerate(file.faults):
        if isinstance(fault, RankFault) and fault.rank >= n_ranks:
            raise ConfigError(
                f"{where}: faults.{number}: rank {fault.rank}: the plan has the ranks 0 to {n_ranks - 1}. Name one "
                "of these."
            )
        if isinstance(fault, HostFault | SlowFault) and fault.host >= n_hosts:
            raise ConfigError(
                f"{where}: faults.{number}: host {fault.host}: the cluster has the hosts 0 to {n_hosts - 1}. Name "
                "one of these."
            )
    drawn = _drawn(file.rate, n_ranks, hours, Random(f"faults/{seed}"), where) if file.rate else ()
    every = sorted((*file.faults, *drawn), key=lambda fault: fault.at_s)
    return [fault for fault in every if fault.at_s < 3600 * hours]


def _drawn(rate: FaultRate, n_ranks: int, hours: float, draw: Random, where: str) -> Iterable[InjectedFault]:
    """Faults of a Poisson process over all devices."""
    per_s = rate.per_device_day * n_ranks / 86400
    expected = per_s * 3600 * hours
    if expected > MOST_FAULTS:
        raise ConfigError(
            f"{where}: rate.per_device_day={rate.per_device_day:g} gives about {expected:.3g} faults in {hours:g} "
            f"hours on {n_ranks} devices; a rehearsal takes {MOST_FAULTS} at most. Lower it or --hours."
        )
    kinds, shares = list(rate.kinds), list(rate.kinds.values())
    at_s = 0.0
    while True:
        at_s += -math.log(1.0 - draw.random()) / per_s
        if at_s >= 3600 * hours:
            return
        yield RankFault(kind=draw.choices(kinds, shares)[0], at_s=at_s, rank=draw.randrange(n_ranks))
