"""Members: a cluster's workers as ranks and controller, chosen from the scheduler's list of workers.

When a member's process is replaced, its name stays and its address changes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.rank.worker_process import CONTROLLER_RESOURCE, RANK_RESOURCES


class ClusterError(ConfigError):
    """A cluster that cannot serve the run; the message names what to change."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as rank or controller.

    name     the same after a restart: its given name, or else its nanny's address
    address  of the current worker process
    host     as the scheduler sees it; ranks are grouped by it
    """

    name: str
    address: str
    host: str


def ranks_and_controllers(workers: Mapping[str, Mapping[str, Any]]) -> tuple[list[Member], list[Member]]:
    """(ranks, controllers) among the workers that a scheduler lists, each sorted by host, then by name."""
    ranks, controllers = [], []
    for address, worker in workers.items():
        resources = worker["resources"]
        name = worker["name"] if worker["name"] != address else worker["nanny"] or address
        member = Member(str(name), address, worker["host"])
        if resources.get(CONTROLLER_RESOURCE, 0) > 0:
            controllers.append(member)
            continue
        for resource in RANK_RESOURCES:
            if resources.get(resource, 0) > 1:
                raise ClusterError(
                    f"worker {name} offers {resource}={resources[resource]:g}: a rank drives one device. "
                    f"Start one worker per device, each with --resources {resource}=1."
                )
        if any(resources.get(resource, 0) for resource in RANK_RESOURCES):
            ranks.append(member)
    return sorted(ranks, key=_order), sorted(controllers, key=_order)


def whole_hosts(ranks: Sequence[Member], devices_per_host: int) -> list[Member]:
    """The ranks, sorted by host, in groups of `devices_per_host` that share a host. Those left over are not used."""
    whole: list[Member] = []
    for _, group in groupby(ranks, key=lambda rank: rank.host):
        there = list(group)
        whole += there[: len(there) // devices_per_host * devices_per_host]
    return whole


def _order(member: Member) -> tuple[str, list[str | int]]:
    """Sort key: host, then name, with numbers in it compared as numbers: rank-10 follows rank-9."""
    parts = re.split(r"(\d+)", member.name)  # text and numbers alternate
    return member.host, [int(part) if i % 2 else part for i, part in enumerate(parts)]
