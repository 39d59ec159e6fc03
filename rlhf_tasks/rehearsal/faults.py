"""The faults of a rehearsal: a list, a rate at which they strike devices, or both, from a YAML file."""

import math
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from rlhf_tasks.config.files import faults_of, read_yaml
from rlhf_tasks.config.settings import MOST_SECONDS, Settings
from rlhf_tasks.system.reading import ConfigError

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
    given: FaultFile | None, n_ranks: int, ranks_per_host: int, hours: float, seed: int, where: str
) -> list[InjectedFault]:
    """All faults of a rehearsal in the order in which they strike; those after its end are left out.

    where  the file, for sentences
    Raises ConfigError for a rank or host that the cluster has not, and for a rate that gives too many faults.
    """
    if given is None:
        return []
    n_hosts = n_ranks // ranks_per_host
    for number, fault in enumerate(given.faults):
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
    drawn = _drawn(given.rate, n_ranks, hours, Random(f"faults/{seed}"), where) if given.rate else ()
    every = sorted((*given.faults, *drawn), key=lambda fault: fault.at_s)
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
