"""What a plan keeps in the memory of hosts: what is offloaded, and copies of state that commits are written from; and
the bytes that its ranks read from disk and write to it.

Nothing counts twice. Where a device's memory is its host's (`DeviceProfile.is_on_host`), what is offloaded counts on
the device, all the time. Copies for commits are left out there: two of them at once are rare, and short.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planner.plan.workload import Workload, key_bytes
from planner.pricing.calls import CostModel
from rlhf_tasks.parallel.layout.topology import Coordinate, Placement
from rlhf_tasks.protocol.commit import MOST_UNWRITTEN
from rlhf_tasks.spec import ExecutionPlan, FetchNode, ModelFunctionCall, SaveNode, SaveSamplesNode

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


def saved_bytes(plan: ExecutionPlan, model: CostModel) -> dict[str, dict[int, float]]:
    """Save node -> device -> bytes of its part of a snapshot: master weights and moments, cut over dp; or the samples
    that are drawn ahead, and those that were begun, on the heads."""
    saved: dict[str, dict[int, float]] = {}
    for node in plan.nodes:
        if isinstance(node, SaveNode):
            state = model.state_bytes(node.role, node.placement, plan.roles[node.role].trained)
            saved[node.name] = {
                device: size_bytes for device, _, size_bytes in _on_devices(node.placement, state)
            }
        elif isinstance(node, SaveSamplesNode):
            (call, *_) = plan.calls[node.call]
            size_bytes = _ahead_bytes(plan, call.call, model.workload) / len(node.writers)
            saved[node.name] = dict.fromkeys(node.writers, size_bytes)
    return saved


def loaded_bytes(plan: ExecutionPlan, model: CostModel) -> dict[int, float]:
    """Device -> bytes of the models' files that it reads before its first call.

    What several devices of a host read alike, such as replicas of one model, is read from the disk once: each has an
    equal share of it.
    """
    readers: dict[tuple[int, _Slice], list[int]] = defaultdict(list)
    sizes: dict[_Slice, float] = {}
    for role, where in plan.roles.items():
        for number, placement in enumerate(where.placements):
            if where.trained and number and model.models[role].lora is None:
                continue  # a copy, which comes from the trained role
            frozen = model.frozen_bytes(role, placement)
            whole = [a + b for a, b in zip(model.parameter_bytes(role, placement), frozen, strict=True)]
            weights = str(model.frozen_weights(role, where.changes))
            pp, tp = placement.strategy.pp, placement.strategy.tp
            for device, at, size_bytes in _on_devices(placement, whole):
                part = _Slice(weights, at.pp, pp, at.tp, tp)
                sizes[part] = size_bytes
                readers[model.cluster.host(device), part].append(device)
    read: dict[int, float] = defaultdict(float)
    for (_, part), devices in readers.items():
        for device in devices:
            read[device] += sizes[part] / len(devices)
    return dict(read)


def _ahead_bytes(plan: ExecutionPlan, call: ModelFunctionCall, workload: Workload) -> float:
    """Bytes of what a call has made for later iterations when one ends: samples that are drawn ahead, with what is
    fetched of them; in segments, its places."""
    fetched = {key for node in plan.nodes if isinstance(node, FetchNode) for key in node.keys}
    keys = {*call.outputs} if call.segment_tokens else fetched.union(call.outputs)
    n_samples = call.lead * call.n_seqs + (call.n_places if call.segment_tokens else 0)
    return n_samples * sum(key_bytes(key, workload) for key in keys)


class _Slice(NamedTuple):
    """A part of a model's files that devices read."""

    weights: str
    stage: int
    pp: int
    tp_rank: int
    tp: int


def _on_devices(placement: Placement, per_stage: Sequence[float]) -> Iterator[tuple[int, Coordinate, float]]:
    """(device, its coordinate, bytes) triples from bytes per stage. Devices are in the order pp, dp, tp."""
    s = placement.strategy
    for number, device in enumerate(placement.devices):
        at = Coordinate(dp=number // s.tp % s.dp, tp=number % s.tp, pp=number // (s.tp * s.dp))
        yield device, at, per_stage[at.pp]
