"""What a plan keeps in the memory of hosts: what is offloaded, and copies of state that commits are written from.

Nothing counts twice. Where a device's memory is its host's (`DeviceProfile.is_on_host`), what is offloaded counts on
the device, all the time. Copies for commits are left out there: two of them at once are rare, and short.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from planner.pricing.calls import CostModel
from rlhf_tasks.parallel.layout.topology import Placement
from rlhf_tasks.protocol.commit import MOST_UNWRITTEN
from rlhf_tasks.spec import ExecutionPlan

COPIES = "copies for commits"


def offloaded(plan: ExecutionPlan, model: CostModel) -> Iterator[tuple[str, Placement, Sequence[float]]]:
    """(part, placement, [stages] bytes of a device) of all that a plan offloads."""
    onloaded = plan.onloaded
    for role, where in plan.roles.items():
        for placement in where.offloaded:
            if where.trained:
                state = model.state_bytes(role, placement, trained=True)
                yield f"{role}: offloaded optimizer", placement, state
            if (role, placement) in onloaded:
                yield f"{role}: offloaded parameters", placement, model.parameter_bytes(role, placement)


def copied_bytes(model: CostModel, role: str, placement: Placement, trained: bool) -> tuple[float, ...]:
    """[stages] bytes of the copies that a device of each stage makes of a role's state for commits, as many as may be
    waiting to be written."""
    return tuple(MOST_UNWRITTEN * held for held in model.state_bytes(role, placement, trained))


def kept_on_hosts(plan: ExecutionPlan, model: CostModel) -> dict[int, dict[str, float]]:
    """Host -> part -> bytes that the plan keeps in the host's memory."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    copies = (
        (
            f"{role}: {COPIES}",
            where.placements[0],
            copied_bytes(model, role, where.placements[0], where.trained),
        )
        for role, where in plan.roles.items()
        if where.changes
    )
    for part, placement, per_stage in (*offloaded(plan, model), *copies):
        hosts = np.array(placement.devices) // model.cluster.devices_per_host
        sizes = np.repeat(per_stage, len(hosts) // len(per_stage))  # devices are in order of stages
        for host, size_bytes in enumerate(np.bincount(hosts, sizes).tolist()):
            if size_bytes and not model.classes.host_profile(host).is_on_host:
                found[host][part] = found[host].get(part, 0.0) + size_bytes
    return dict(sorted(found.items()))


def lack_of_host_memory(hosts: Mapping[int, Mapping[str, float]], model: CostModel) -> str | None:
    """One sentence about the host that lacks the most bytes of memory; None when the plan fits.

    hosts  as `kept_on_hosts` gives them
    """
    rooms = {host: model.classes.host_room_bytes(host) for host in hosts}
    host = max(hosts, key=lambda host: sum(hosts[host].values()) - rooms[host], default=None)
    if host is None or (needed := sum(hosts[host].values())) <= rooms[host]:
        return None
    largest, size_bytes = max(hosts[host].items(), key=lambda item: item[1])
    remedy = (
        "A larger dp on more hosts would lower it."
        if largest.endswith(COPIES)
        else "Leave out offload: true, or spread its devices over more hosts."
    )
    return (
        f"Host {host} ({model.classes.host_profile(host).name}) lacks {needed - rooms[host]:.0f} bytes of its own "
        f"memory: the plan keeps {needed:.0f} there, and it has {rooms[host]:.0f} (its devices' host_memory_bytes). "
        f"Most of it, {size_bytes:.0f}, is {largest}. {remedy}"
    )
