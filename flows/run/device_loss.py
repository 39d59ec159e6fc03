"""`on_device_loss: shrink`: the plan for the devices that are left, and the return of the others.

A rank that does not come back in time ends its attempt (rlhf_tasks/protocol/ledger.py). The next attempt begins at
the last commit with fewer ranks. While it trains, the flow looks at the scheduler: when there is a worker for another
rank, the attempt ends at its next commit, and the next one begins with all ranks that are there then.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from prefect_rlhf.flows.run.planning import hardware_of, made_plan, problem_of
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses, Hardware
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.rlhf_tasks.algorithms.configurations import MADE_PLANS, ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan

SEARCH_S = 10.0  # for the plan of fewer devices: all others wait


class Part(NamedTuple):
    """The same number of devices on each of some hosts.

    hosts     their numbers in the whole cluster
    per_host  devices of each
    slots     numbers of these devices in the whole cluster, in rank order
    """

    hosts: tuple[int, ...]
    per_host: int
    slots: tuple[int, ...]

    @property
    def cluster(self) -> Cluster:
        return Cluster(len(self.hosts), self.per_host)

    def of(self, whole: Hardware) -> Hardware:
        """The hardware of these devices."""
        profiles = [whole.classes.host_profile(host) for host in self.hosts]
        return Hardware(DeviceClasses.host_by_host(self.cluster, profiles))


def parts_left(there: Sequence[bool], per_host: int) -> list[Part]:
    """The parts of a cluster that its remaining devices could make, of which none has another one in it, the one with
    the most devices on a host first. There is none where no device is left.

    there  of each device of the whole cluster, which has `per_host` on each host
    """
    parts = list[Part]()
    hosts = [
        [slot for slot in range(first, first + per_host) if there[slot]]
        for first in range(0, len(there), per_host)
    ]
    for size in range(per_host, 0, -1):
        with_size = tuple(number for number, slots in enumerate(hosts) if len(slots) >= size)
        if len(with_size) > (len(parts[-1].hosts) if parts else 0):
            slots = tuple(slot for number in with_size for slot in hosts[number][:size])
            parts.append(Part(with_size, size, slots))
    return parts


class Smaller(NamedTuple):
    """A plan for a part of a cluster, what it solves, and its seconds per iteration."""

    part: Part
    plan: ExecutionPlan
    problem: Problem
    iteration_time_s: float


def smaller_plan(
    config: RunConfig,
    parts: Sequence[Part],
    hardware: Hardware | None = None,
    profile: Path | None = None,
) -> Smaller:
    """The fastest plan for one of the parts, made as the run's own was, within SEARCH_S seconds in all.

    hardware  of the whole cluster; default: as in the configuration; profile: as `problem_of` takes it
    Raises ConfigError where none fits: with a role and bytes where that is for memory.
    """
    limit_s = min(config.planning.time_limit_s, SEARCH_S) / max(len(parts), 1)
    planning = config.planning.model_copy(update={"time_limit_s": limit_s})
    config, whole = config.model_copy(update={"planning": planning}), hardware or hardware_of(config)
    plans, faults = list[Smaller](), list[ConfigError]()
    for part in parts:
        try:
            problem = problem_of(config, part.of(whole), profile)
            plan = made_plan(config, problem)
            plans.append(Smaller(part, plan, problem, price_plan(plan, problem.model).iteration_time_s))
        except ConfigError as error:
            faults.append(error)
    if not plans:
        raise faults[0] if faults else ConfigError("no device is left.")
    return min(plans, key=lambda smaller: smaller.iteration_time_s)


def problem_of_plan(config: RunConfig, plan: ExecutionPlan, whole: Problem) -> Problem:
    """What a plan of a run solves, which may be for fewer devices than the run's problem.

    Nobody knows any more which devices these were: they count as the first ones. Raises ConfigError.
    """
    if plan.n_devices == whole.cluster.n_devices:
        return whole
    n_hosts = plan.n_devices // plan.devices_per_host
    part = Part(tuple(range(n_hosts)), plan.devices_per_host, ())
    return problem_of(config, part.of(hardware_of(config)))


def refuse_no_shrink(config: RunConfig) -> None:
    """Raises ConfigError for a run that could not lose any device: its plan is given by hand, it has one device, or
    its roles do not fit the memory of one device fewer."""
    n_devices, per_host = config.cluster.n_devices, config.cluster.per_host
    if config.plan not in MADE_PLANS:
        raise ConfigError(
            "on_device_loss=shrink needs a plan that can be made anew, and plan is given by hand. Choose "
            "plan: auto, or on_device_loss: wait or stop."
        )
    if n_devices == 1:
        raise ConfigError(
            "on_device_loss=shrink needs at least two devices; the cluster has 1. Choose wait or stop."
        )
    parts = parts_left([*[True] * (n_devices - 1), False], per_host)
    with suppress(ConfigError):  # mostly it fits, and takes no search to see that
        smaller_plan(config.model_copy(update={"plan": "heuristic"}), parts)
        return
    try:
        smaller_plan(config, parts)
    except ConfigError as error:
        raise ConfigError(
            f"on_device_loss=shrink: without one of the {n_devices} devices there is no plan. {error} Or choose "
            "on_device_loss: wait or stop."
        ) from None
