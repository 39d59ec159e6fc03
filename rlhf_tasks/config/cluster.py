"""Sections of the devices, the runtime and the plan. Torch-free."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from rlhf_tasks.config.settings import (
    MOST_ITERATIONS,
    MOST_SECONDS,
    MOST_SEQS,
    MOST_TOKENS,
    Settings,
    auto_or_a_number,
    form,
)
from rlhf_tasks.parallel.layout.topology import MAX_DEVICES, ParallelStrategy, Placement, check_count
from rlhf_tasks.spec import CallAssignment
from rlhf_tasks.system.reading import shown


class ClusterConfig(Settings):
    """The ranks: started by us on this machine, or found in a running Dask cluster."""

    address: str | None = Field(
        default=None, description="Scheduler of a running Dask cluster; default: start one."
    )
    n_hosts: int = Field(default=1, gt=0, le=MAX_DEVICES, description="Number of hosts.")
    devices_per_host: int | Literal["auto"] = Field(
        default="auto",
        description="Number of ranks (GPUs or CPU slots) per host, or auto: one for each visible GPU, or two that "
        "share the CPU cores; 1 where the devices are elsewhere or the plan is given by hand.",
    )

    @field_validator("devices_per_host", mode="before")
    @classmethod
    def _auto_or_a_number(cls, value: Any) -> Any:
        return auto_or_a_number(value, "ranks", MAX_DEVICES)

    @model_validator(mode="after")
    def _can_be_planned(self) -> Self:
        check_count(self.n_hosts, self.per_host)
        return self

    @property
    def per_host(self) -> int:
        """Ranks of a host. `auto` counts as one until flows/run/planning.py has decided the number."""
        return 1 if self.devices_per_host == "auto" else self.devices_per_host

    @property
    def n_devices(self) -> int:
        return self.n_hosts * self.per_host


class RuntimeConfig(Settings):
    """How long a run waits, and how often it starts again."""

    patience: float = Field(
        default=1.0,
        ge=0.05,
        le=1e6,
        description="Factor of the waits for calls, disks and starting workers: 2 waits twice as long.",
    )
    max_restarts: int = Field(
        default=3, ge=0, le=10**6, description="Restarts of the ranks that are allowed between two commits."
    )

    @property
    def startup_s(self) -> float:
        """Seconds within which the workers must start."""
        return 180.0 * self.patience


class Limits(Settings):
    """How long a run waits, how often it starts again, how often it commits: read by the ledger and its like only.

    deadline_floor_s      the least deadline of a call, in seconds after its last rank entered it
    deadline_factor       a call's deadline divided by its predicted time, if that exceeds the floor
    io_floor_s            seconds in which writing or reading a snapshot must make progress; in all it has no limit
    io_least_bytes_per_s  bytes per second that count as progress, over `io_floor_s` seconds
    evaluated_every       iterations between further snapshots, since their evaluations may be the best; None:
                          none
    """

    deadline_floor_s: float
    deadline_factor: float
    io_floor_s: float
    io_least_bytes_per_s: float
    max_restarts: int
    snapshot_every: int | Literal["auto"]
    snapshot_max_s: float
    evaluated_every: int | None = None

    @classmethod
    def of(cls, runtime: RuntimeConfig, **cadence: Any) -> Self:
        """The values for a configuration's section; `cadence`: the fields about snapshots."""
        patience = runtime.patience
        return cls(
            deadline_floor_s=120.0 * patience,
            deadline_factor=20.0 * patience,
            io_floor_s=300.0 * patience,
            io_least_bytes_per_s=1e6 / patience,  # the same bytes in a longer time
            max_restarts=runtime.max_restarts,
            **cadence,
        )


def _iterations_or_seconds(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?s", value) and float(value[:-1]):
        return value
    return auto_or_a_number(value, "a time such as 600s, or iterations", MOST_ITERATIONS)


SnapshotCadence = Annotated[int | str, BeforeValidator(_iterations_or_seconds)]
"""Iterations from one snapshot to the next; or auto; or, as `600s`, auto with the most seconds that may be lost."""


def most_lost_s(cadence: SnapshotCadence) -> float:
    """Seconds of work that may be lost, where the cadence of snapshots follows from their costs."""
    return float(cadence[:-1]) if isinstance(cadence, str) and cadence != "auto" else 1800.0


Number = Annotated[int, Field(ge=0, lt=MAX_DEVICES)]
"""The number of a device or a host."""


class ManualAssignment(Settings):
    """The assignment of one call, given by hand: devices or whole hosts by number, and (dp, tp, pp)."""

    devices: tuple[Number, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_DEVICES,
        description="Devices in rank order; give either devices or hosts.",
    )
    hosts: tuple[Number, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_DEVICES,
        description="Hosts, of which all devices are used; give either hosts or devices.",
    )
    dp: int = Field(default=1, gt=0, le=MAX_DEVICES, description="Data-parallel degree.")
    tp: int = Field(default=1, gt=0, le=MAX_DEVICES, description="Tensor-parallel degree.")
    pp: int = Field(default=1, gt=0, le=MAX_DEVICES, description="Number of pipeline stages.")
    micro_batches: int = Field(
        default=1,
        gt=0,
        le=MOST_SEQS,
        description="Micro-batches per dp rank and (mini-)batch. A generation decodes one micro-batch at a time,"
        " which takes less memory.",
    )
    balance: Literal["count", "tokens"] = Field(
        default="count", description="What dp ranks get equal shares of: samples (count) or tokens."
    )
    offload: bool = Field(
        default=False,
        description="Keep in host memory a frozen model while it is not needed; for a train_step: the optimizer's "
        "state, which then passes through the devices in every step, and the model while it is idle.",
    )
    order: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Position among the calls of an iteration, given for all calls or for none; default: by rule.",
    )

    @model_validator(mode="after")
    def _placement_holds(self) -> Self:
        if (self.devices is None) == (self.hosts is None):
            raise ValueError(
                f"give either devices or hosts, found {'neither' if self.hosts is None else 'both'}"
            )
        if self.devices is not None:
            self.assignment(len(self.devices))  # checks the strategy against the number of devices
        return self

    def assignment(self, devices_per_host: int) -> CallAssignment:
        """The same, as a `CallAssignment`. Raises ValueError when dp * tp * pp is not the number of devices."""
        if self.devices is None:
            check_count(len(self.hosts or ()), devices_per_host)
        devices = self.devices or tuple(
            host * devices_per_host + device
            for host in self.hosts or ()
            for device in range(devices_per_host)
        )
        placement = Placement(devices, ParallelStrategy(self.dp, self.tp, self.pp))
        return CallAssignment(
            placement=placement,
            micro_batches=self.micro_batches,
            balance=self.balance,
            offload=self.offload,
            order=self.order,
        )


ManualAssignments = dict[str, ManualAssignment]

PlanSource = Annotated[
    Annotated[str, Tag("path")] | Annotated[ManualAssignments, Tag("inline")], Discriminator(form)
]


def refuse_unfit(plan: ManualAssignments, cluster: ClusterConfig) -> None:
    """Raises ValueError where a plan by hand names devices outside the cluster, or a strategy does not fit its
    devices."""
    for call, manual in plan.items():
        kind, named, count = (
            ("devices", manual.devices, cluster.n_devices)
            if manual.hosts is None
            else ("hosts", manual.hosts, cluster.n_hosts)
        )
        outside = [number for number in named or () if number >= count][:8]
        if outside and cluster.address is None:
            raise ValueError(
                f"plan.{call}.{kind} names {outside}; the cluster has 0 to {count - 1}. "
                f"Choose other {kind} or enlarge cluster.n_hosts x cluster.devices_per_host."
            )
        try:
            manual.assignment(cluster.per_host)
        except ValueError as error:
            raise ValueError(f"plan.{call}: {error}") from None


def _as_distribution(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, int | str) else value


HostCount = Annotated[int, Field(gt=0, le=MAX_DEVICES)]
DeviceSource = Annotated[
    Annotated[str, Tag("path")]
    | Annotated[Annotated[dict[str, HostCount], Field(min_length=1)], Tag("inline")],
    Discriminator(form),
]


class PlanningConfig(Settings):
    """Settings that only the planner reads: lengths and costs that a run would show by itself, and the devices."""

    prompt_tokens: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Tokens of a prompt (where nothing is generated: of a row); default: taken from the data.",
    )
    new_tokens: (
        Annotated[
            dict[Annotated[int, Field(gt=0, le=MOST_TOKENS)], Annotated[float, Field(ge=0, le=1)]],
            BeforeValidator(_as_distribution),
        ]
        | None
    ) = Field(
        default=None,
        description="Generated tokens of a response: a number or {number: share}; "
        "default: sampling.max_completion_length.",
    )
    device: DeviceSource | None = Field(
        default=None,
        description="Device: a preset (a100-80g-sxm, h100-sxm, cpu-slot, ...), or a YAML file with its figures; "
        "where hosts differ, {device: number of hosts} in the order of the hosts; default: this machine's.",
    )
    reward_seconds_per_sequence: float = Field(
        default=0.0,
        ge=0,
        le=MOST_SECONDS,
        description="Seconds that all Python rewards together take for one sequence, as you measured them; "
        "default: only their node costs time.",
    )
    environment_seconds_per_turn: float = Field(
        default=0.0,
        ge=0,
        le=MOST_SECONDS,
        description="Seconds until the environments of a rank's batch have answered a turn, as you measured them.",
    )
    time_limit_s: float = Field(
        default=10.0, gt=0, le=MOST_SECONDS, description="Seconds that a search may take."
    )

    @field_validator("device", mode="before")
    @classmethod
    def _name_or_hosts(cls, value: Any) -> Any:
        if value is None or isinstance(value, str | dict):
            return value
        raise ValueError(f"give a device, or {{device: number of hosts}}, found {shown(value)}")

    @field_validator("new_tokens")
    @classmethod
    def _shares_add_up(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        if value is not None and abs(sum(value.values()) - 1) > 1e-6:
            raise ValueError(f"the shares add up to {sum(value.values()):g}, not to 1")
        return value
