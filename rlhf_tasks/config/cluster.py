"""The devices, the waits of a run, and its plan. Torch-free."""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from prefect_rlhf.rlhf_tasks.config.settings import (
    MOST_ITERATIONS,
    MOST_SECONDS,
    MOST_SEQS,
    MOST_TOKENS,
    Settings,
    auto_or_a_number,
    form,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import (
    MAX_DEVICES,
    ParallelStrategy,
    Placement,
    Shard,
    check_count,
)
from prefect_rlhf.rlhf_tasks.spec import CallAssignment
from prefect_rlhf.rlhf_tasks.system.reading import shown


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


STARTUP_S = 180.0
"""Seconds within which the workers must start, where `patience` is 1."""


class Limits(Settings):
    """How long a run waits, how often it starts again, how often it commits: read by the ledger and its like only.

    patience              factor of the waits for ranks, `Timeouts`
    deadline_floor_s      the least deadline of a call, in seconds after its last rank entered it
    deadline_factor       a call's deadline divided by its predicted time, if that exceeds the floor
    io_floor_s            seconds in which writing or reading a snapshot must make progress; in all it has no limit
    io_least_bytes_per_s  bytes per second that count as progress, over `io_floor_s` seconds
    evaluated_every       iterations between further snapshots, since their evaluations may be the best; None:
                          none
    awaits_lost           whether ranks that have not come back in time are awaited again, while `max_restarts` allows
                          it; otherwise the attempt ends
    """

    patience: float = 1.0
    deadline_floor_s: float
    deadline_factor: float
    io_floor_s: float
    io_least_bytes_per_s: float
    max_restarts: int
    snapshot_every: int | Literal["auto"]
    snapshot_max_s: float
    evaluated_every: int | None = None
    awaits_lost: bool = True

    @classmethod
    def of(cls, patience: float = 1.0, max_restarts: int = 3, **others: Any) -> Self:
        """The values for those of a configuration; `others`: the fields about snapshots and lost ranks."""
        return cls(
            patience=patience,
            deadline_floor_s=120.0 * patience,
            deadline_factor=20.0 * patience,
            io_floor_s=300.0 * patience,
            io_least_bytes_per_s=1e6 / patience,  # the same bytes in a longer time
            max_restarts=max_restarts,
            **others,
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


_NUMBERED = {
    "d": ("dp", 1, MAX_DEVICES),
    "t": ("tp", 1, MAX_DEVICES),
    "p": ("pp", 1, MAX_DEVICES),
    "c": ("cp", 1, MAX_DEVICES),
    "m": ("micro_batches", 1, MOST_SEQS),
    "order": ("order", 0, 1000),
}
"""The words of a placement that end with a number: what this is, and from where to where it goes."""

_EXAMPLE = (
    "Write, for example, 0-3 d2 t2 p1 m4 tokens sharded offload order0, or hosts 0,2 t8 (devices or hosts; degrees "
    "of dp, tp and pp, and of cp as c2; micro-batches)"
)


class ByHand(NamedTuple):
    """The placement of one call as a user writes it, `0-3 d2 t2 m4 offload`: devices or whole hosts by number, in
    rank order; then, in any order, what is not the default.

    sharded                                 whether `shard` of the strategy is "parameters"
    micro_batches, balance, offload, order  as in `CallAssignment`
    """

    numbers: tuple[int, ...]
    of_hosts: bool = False
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    micro_batches: int = 1
    balance: Literal["count", "tokens"] = "count"
    sharded: bool = False
    offload: bool = False
    order: int | None = None

    @classmethod
    def parse(cls, written: Any) -> Self:
        """Raises ValueError for what is no placement."""
        text = str(written) if isinstance(written, int) and not isinstance(written, bool) else written
        if not isinstance(text, str) or not text.split():
            raise ValueError(f"{shown(written)} is no placement. {_EXAMPLE}")
        first, *words = text.split()
        of_hosts = first == "hosts"
        if of_hosts:
            first, *words = words or [""]
        fields: dict[str, Any] = {}
        for word in words:
            match = re.fullmatch("([a-z]+?)([0-9]{0,9})", word)
            key, number = match.groups() if match else ("", "")
            if word == "tokens":
                name, value = "balance", "tokens"
            elif word in ("offload", "sharded"):
                name, value = word, True
            elif key in _NUMBERED and number:
                value = int(number)
                name, least, most = _NUMBERED[key]
                if not least <= value <= most:
                    raise ValueError(
                        f"{key} in {shown(text)} is a number from {least} to {most}, found {value}"
                    )
            else:
                raise ValueError(f"{shown(word)} in {shown(text)} is no part of a placement. {_EXAMPLE}")
            if name in fields:
                raise ValueError(f"{shown(text)} gives {name} twice. Leave out one")
            fields[name] = value
        return cls(_numbers(first, text), of_hosts, **fields)

    @classmethod
    def of(cls, assignment: CallAssignment) -> Self:
        placement = assignment.placement
        return cls(
            placement.devices,
            dp=placement.strategy.dp,
            tp=placement.strategy.tp,
            pp=placement.strategy.pp,
            cp=placement.strategy.cp,
            micro_batches=assignment.micro_batches,
            balance=assignment.balance,
            sharded=placement.strategy.shard == "parameters",
            offload=assignment.offload,
            order=assignment.order,
        )

    def __str__(self) -> str:
        defaults = self._field_defaults
        *degrees, order = (
            f"{key}{getattr(self, name)}" if getattr(self, name) != defaults[name] else ""
            for key, (name, _, _) in _NUMBERED.items()
        )
        words = [
            "hosts" if self.of_hosts else "",
            ",".join(ranges(self.numbers)),
            *degrees,
            "tokens" if self.balance == "tokens" else "",
            "sharded" if self.sharded else "",
            "offload" if self.offload else "",
            order,
        ]
        return " ".join(filter(None, words))

    def assignment(self, devices_per_host: int) -> CallAssignment:
        """Raises ValueError where dp * tp * pp * cp is not the number of devices, and for shares that cannot be."""
        devices = self.numbers
        shard: Shard = "parameters" if self.sharded else "gradients"
        if self.of_hosts:
            check_count(len(devices), devices_per_host)
            devices = tuple(
                host * devices_per_host + device
                for host in self.numbers
                for device in range(devices_per_host)
            )
        return CallAssignment(
            placement=Placement(devices, ParallelStrategy(self.dp, self.tp, self.pp, self.cp, shard)),
            micro_batches=self.micro_batches,
            balance=self.balance,
            offload=self.offload,
            order=self.order,
        )


def _numbers(word: str, text: str) -> tuple[int, ...]:
    """The numbers that `0-3,6` names."""
    if not re.fullmatch("([0-9]{1,9}(-[0-9]{1,9})?(,|$))+(?<!,)", word):
        raise ValueError(f"{shown(text)} names no devices and no hosts. {_EXAMPLE}")
    numbers: list[int] = []
    for part in word.split(","):
        start, _, end = part.partition("-")
        first, last = int(start), int(end or start)
        if last < first:
            raise ValueError(
                f"{part} in {shown(text)} counts down. Write {last}-{first}, or name each number"
            )
        if last >= MAX_DEVICES or len(numbers) + last - first >= MAX_DEVICES:
            raise ValueError(f"{part} in {shown(text)} exceeds {MAX_DEVICES} devices. Name fewer")
        numbers += range(first, last + 1)
    return tuple(numbers)


def ranges(numbers: tuple[int, ...]) -> Iterator[str]:
    """`0-3` and `6` for 0, 1, 2, 3, 6."""
    for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        (_, first), *others = run
        yield f"{first}-{others[-1][1]}" if others else f"{first}"


ManualAssignments = dict[str, Annotated[str, BeforeValidator(lambda written: str(ByHand.parse(written)))]]
"""Call -> its placement as `ByHand` prints it."""

PlanSource = Annotated[
    Annotated[str, Tag("path")] | Annotated[ManualAssignments, Tag("inline")], Discriminator(form)
]


def refuse_unfit(plan: ManualAssignments, cluster: ClusterConfig) -> None:
    """Raises ValueError where a plan by hand names devices outside the cluster, or a strategy does not fit its
    devices."""
    for call, text in plan.items():
        manual = ByHand.parse(text)
        kind, count = ("hosts", cluster.n_hosts) if manual.of_hosts else ("devices", cluster.n_devices)
        outside = [number for number in manual.numbers if number >= count][:8]
        if outside and cluster.address is None:
            raise ValueError(
                f"plan.{call} names {kind} {outside}; the cluster has 0 to {count - 1}. "
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


class PoolConfig(Settings):
    """A named set of devices, and the calls that have no others."""

    devices: str = Field(
        description="0-3, hosts 0,2, or any 4: the first free ones; name them where devices differ.",
    )
    calls: tuple[str, ...] = Field(min_length=1, description="Calls, or roles with all their calls.")

    @field_validator("devices", mode="before")
    @classmethod
    def _can_be_read(cls, value: Any) -> str:
        text = " ".join(str(value).split())
        if not re.fullmatch("any [1-9][0-9]{0,6}", text):
            try:
                _numbers(text.removeprefix("hosts "), text)
            except ValueError:
                raise ValueError(
                    f"{shown(text)} names no devices. Write 0-3,6, or hosts 0,2, or any 4"
                ) from None
        return text

    @property
    def number(self) -> int:
        """Of `any 4`, 4; 0 where the devices are named."""
        return int(self.devices[4:]) if self.devices.startswith("any ") else 0

    def named(self, devices_per_host: int) -> tuple[int, ...]:
        """The devices that are named, in order; none of `any 4`."""
        if self.number:
            return ()
        numbers = _numbers(self.devices.removeprefix("hosts "), self.devices)
        if self.devices.startswith("hosts "):
            return tuple(h * devices_per_host + d for h in sorted(numbers) for d in range(devices_per_host))
        return tuple(sorted(numbers))


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
        description="Seconds until an environment has answered a turn, as you measured them.",
    )
    time_limit_s: float = Field(
        default=10.0, gt=0, le=MOST_SECONDS, description="Seconds that a search may take."
    )
    pools: dict[str, PoolConfig] = Field(
        default_factory=dict,
        max_length=100,
        description="Name -> devices and calls: plans place these calls there alone. Other calls have all devices.",
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
