"""What a whole plan costs: seconds of every node, the steady state, every device's peak memory; what it keeps in the
memory of hosts (what is offloaded, and copies of state that commits are written from); and the bytes that its ranks
read from disk and write to it.

Nothing counts twice. Where a device's memory is its host's (`DeviceProfile.is_on_host`), what is offloaded counts on
the device, all the time. Copies for commits are left out there: two of them at once are rare, and short.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import NamedTuple

import numpy as np

from prefect_rlhf.planner.plan.steady_state import SteadyState, steady_state
from prefect_rlhf.planner.plan.workload import Workload, fullest_share, key_bytes
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.resharding import Heads, HeldModel, reallocation, redistribution
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Coordinate, ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.protocol.commit import MOST_UNWRITTEN
from prefect_rlhf.rlhf_tasks.spec import (
    CallNode,
    EvaluateNode,
    ExecutionPlan,
    FetchNode,
    Held,
    ModelFunctionCall,
    OffloadNode,
    OnloadNode,
    PlanNode,
    ReallocateNode,
    SaveNode,
    SaveSamplesNode,
    SyncNode,
    TransferNode,
)


@dataclass(frozen=True)
class MemoryPeak:
    """The most that a device holds at once: the node that runs then, and part -> bytes."""

    node: str
    parts: dict[str, float]

    @property
    def total_bytes(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class PlanPrice:
    """A plan under a cost model.

    duration_s   node -> seconds per iteration; of an evaluation or a sync, which not every iteration has, their mean
    rare_s       evaluation or sync -> seconds of an iteration that has it
    to_end_s     call in segments -> seconds of the last iteration, in which it draws all to its end
    copy_s       onload -> seconds of the copy that it starts
    moved_bytes  transfer, reallocation or sync -> bytes that it sends between devices
    peaks        device -> its peak memory, for the devices that the plan uses
    call_bytes   call or evaluation -> the most bytes that a device holds while it runs
    hosts        host -> part -> bytes that the plan keeps in its memory
    """

    duration_s: dict[str, float]
    moved_bytes: dict[str, float]
    steady: SteadyState
    peaks: dict[int, MemoryPeak]
    call_bytes: dict[str, float]
    hosts: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    copy_s: dict[str, float] = field(default_factory=dict[str, float])
    rare_s: dict[str, float] = field(default_factory=dict[str, float])
    to_end_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def due_s(self) -> dict[str, float]:
        """Node -> its seconds in an iteration that has it."""
        return {**self.duration_s, **self.rare_s}

    @property
    def longest_s(self) -> dict[str, float]:
        """Node -> its seconds in an iteration in which it has most to do: deadlines must allow for them."""
        due_s = self.due_s
        return {**due_s, **{name: max(seconds, due_s[name]) for name, seconds in self.to_end_s.items()}}

    @property
    def iteration_time_s(self) -> float:
        """Seconds per iteration in the steady state."""
        return self.steady.iteration_time_s


def price_plan(plan: ExecutionPlan, model: CostModel) -> PlanPrice:
    """Price every node of a plan, in seconds and bytes. Raises ValueError when a strategy does not suit its model."""
    duration_s, moved_bytes, copy_s, rare_s, to_end_s = (dict[str, float]() for _ in range(5))
    for node in plan.nodes:
        duration_s[node.name], moved = node_cost(node, plan, model)
        if isinstance(node, TransferNode | ReallocateNode | SyncNode):
            moved_bytes[node.name] = moved
        if isinstance(node, OnloadNode):
            copy_s[node.name] = model.onload_s(node.role, node.placement)
        if isinstance(node, EvaluateNode):
            rare_s[node.name] = model.evaluation(node.role, node.placement).seconds + model.classes.dispatch_s
        if isinstance(node, SyncNode):
            rare_s[node.name] = _reallocation(node, model)[0] + model.classes.dispatch_s
        if isinstance(node, CallNode) and node.call.segment_tokens:
            whole = node.call.model_copy(update={"segment_tokens": None})
            to_end_s[node.name] = model.call(whole, node.assignment).seconds + model.classes.dispatch_s
    steady = steady_state(plan, duration_s, copy_s)
    return PlanPrice(duration_s, moved_bytes, steady, *plan_memory(plan, model), copy_s, rare_s, to_end_s)


def node_cost(node: PlanNode, plan: ExecutionPlan, model: CostModel) -> tuple[float, float]:
    """(seconds, bytes sent between devices) of a node, its dispatch included."""
    seconds, moved = 0.0, 0.0
    match node:
        case CallNode():
            seconds = model.call(node.call, node.assignment).seconds
        case TransferNode():
            seconds, moved = _transfer(node, plan, model)
        case ReallocateNode():
            seconds, moved = _reallocation(node, model)
        case SyncNode():
            seconds, moved = _reallocation(node, model)
            seconds /= model.workload.sync_every
        case SaveNode():
            seconds = save_s(node.role, node.placement, model, plan.roles[node.role].trained)
        case EvaluateNode(at_start=False):
            seconds = evaluation_s(node.role, node.placement, model)
        case OffloadNode():
            if plan.roles[node.role].trained:
                seconds = model.onload_s(node.role, node.placement)
        case _:
            pass  # samples are small beside everything else
    return seconds + model.classes.dispatch_s, moved


def save_s(role: str, placement: Placement, model: CostModel, trained: bool) -> float:
    """Seconds in which the fullest device copies its part of a role's state to host memory."""
    state_bytes = max(model.state_bytes(role, placement, trained))
    return model.classes.host_copy_s(state_bytes, model.classes_of(placement))


def evaluation_s(role: str, placement: Placement, model: CostModel) -> float:
    """Seconds per iteration of the evaluation of a role: most iterations have none."""
    assert model.workload.evaluation is not None, "the workload has no evaluation"
    return model.evaluation(role, placement).seconds / model.workload.evaluation.every


def _reallocation(node: ReallocateNode | SyncNode, model: CostModel) -> tuple[float, float]:
    """(seconds, bytes) of a reallocation; of a sync, in an iteration that has it. The blend itself is not priced: it
    reads the weights once more where they lie."""
    layers = model.models[node.role].shape.layers
    held, wanted = (_held(node.role, placement, model) for placement in (node.source, node.destination))
    places = node.source.devices, node.destination.devices
    if places[0] != places[1] and any(list(devices) != sorted(devices) for devices in places):
        # By hand, in an order of its own: priced as if no device had anything of what it needs.
        held = held._replace(layer_bytes=0.0)
    wires = model.classes.wires({*model.classes_of(node.source), *model.classes_of(node.destination)})
    seconds, moved = reallocation(layers, held, wanted, model.cluster.devices_per_host, wires)
    return seconds + model.classes.reallocation_overhead_s(layers), moved


def _held(role: str, placement: Placement, model: CostModel) -> HeldModel:
    s = placement.strategy
    shares = model.moved_shares(role, s)
    return HeldModel(min(placement.devices), s.copies, s.tp, s.pp, model.layer_bytes(role, s), shares)


def _transfer(node: TransferNode, plan: ExecutionPlan, model: CostModel) -> tuple[float, float]:
    """(seconds, bytes) of a redistribution in which every sequence weighs what one of the mean length does."""
    source, destination = node.source.placement, node.destination.placement
    wires = model.classes.wires({*model.classes_of(source), *model.classes_of(destination)})
    size_bytes, overhead_s = transfer_size(node.keys, len(node.part.ids(range(plan.n_seqs))), model)
    held, wanted = _heads(source), _heads(destination)
    seconds, moved = redistribution(held, wanted, size_bytes, model.cluster.devices_per_host, wires)
    return seconds + overhead_s, moved


def _heads(placement: Placement) -> Heads:
    heads = sorted(placement.heads)  # by hand they may have any order
    return Heads(heads[0], (heads[-1] - heads[0]) // max(1, len(heads) - 1) or 1, len(heads))


def transfer_size(keys: Collection[str], n_seqs: int, model: CostModel) -> tuple[float, float]:
    """(bytes, seconds besides the messages) of keys of so many samples."""
    size_bytes = n_seqs * sum(key_bytes(key, model.workload) for key in keys)
    return size_bytes, model.classes.transfer_overhead_s(n_seqs * len(keys))


def kept_samples_bytes(
    call: ModelFunctionCall, strategy: ParallelStrategy, workload: Workload
) -> tuple[float, ...]:
    """[stages] bytes of the samples that a call keeps for later iterations: batches drawn ahead, and what is in the
    places of segments. Its heads have them, on the last stage."""
    batches = call.lead + (call.n_places // call.n_seqs if call.segment_tokens else 0)
    n_seqs = batches * fullest_share(call, strategy.dp) * call.blocks
    of_each = sum(key_bytes(key, workload) for key in {*call.inputs, *call.outputs})
    return (*(0.0,) * (strategy.pp - 1), float(n_seqs * of_each))


class PlanMemory(NamedTuple):
    """Memory under a plan; the fields are as in PlanPrice."""

    peaks: dict[int, MemoryPeak]
    call_bytes: dict[str, float]
    hosts: dict[int, dict[str, float]]


def plan_memory(plan: ExecutionPlan, model: CostModel) -> PlanMemory:
    """The most bytes that devices hold, over the whole plan and while each call runs.

    Always resident: a trained role's parameters, gradients and optimizer on its training placement, and a frozen
    role's parameters on each placement, without what is offloaded; the weights below adapters on each placement;
    samples for later iterations on the last stage of the call that draws them. Roles with the same frozen weights
    hold them once on a placement. A copy exists from its reallocation to its release. Offloaded parameters are on the
    devices from their onload to their offload, and for an evaluation before the first iteration; in host memory they
    are all the time, also where that is the devices' own. A call's temporary memory exists while it runs. A role that
    follows another has its parameters and master weights where its model runs; while they are blended, the other's
    parameters are there, too.
    """
    groups, stages = _alike(plan, model)
    live: dict[int, dict[str, float]] = {device: {} for device in groups}
    for part, on_stages in _resident(plan, model, stages):
        for device, size_bytes in on_stages:
            live[device][part] = live[device].get(part, 0.0) + size_bytes
    peaks: dict[int, MemoryPeak] = {}
    call_bytes: dict[str, float] = {}

    def note(device: int, node: str, parts: dict[str, float]) -> None:
        if device not in peaks or sum(parts.values()) > peaks[device].total_bytes:
            peaks[device] = MemoryPeak(node, dict(parts))

    def brought(node: str, held: Held, part: str) -> None:
        size = model.parameter_bytes(held.role, held.placement)
        for device, size_bytes in _by_device(stages[held.placement], size):
            live[device][part] = live[device].get(part, 0.0) + size_bytes  # several copies at once add up
            note(device, node, live[device])

    def freed(held: Held, part: str) -> None:
        size = model.parameter_bytes(held.role, held.placement)
        for device, size_bytes in _by_device(stages[held.placement], size):
            live[device][part] -= size_bytes
            if not live[device][part]:
                del live[device][part]

    away = {Held(role, placement) for role, placement in plan.onloaded}
    for node in plan.nodes:
        if node.brings is not None:
            brought(node.name, node.brings, _part(node.brings))
            away.discard(node.brings)
        if node.frees is not None:
            freed(node.frees, _part(node.frees))
            if not node.frees.is_copy:
                away.add(node.frees)
        if isinstance(node, CallNode | EvaluateNode):
            active, part = _active(node, model, away)
            for device, size_bytes in _by_device(stages[node.placement], active):
                parts = {**live[device], part: size_bytes}
                note(device, node.name, parts)
                call_bytes[node.name] = max(call_bytes.get(node.name, 0.0), sum(parts.values()))
        if isinstance(node, SyncNode):
            blended = Held(node.role, node.destination)
            brought(node.name, blended, f"{node.leader}: copy")
            freed(blended, f"{node.leader}: copy")
    by_device = {device: peak for first, peak in peaks.items() for device in groups[first]}
    return PlanMemory(by_device, call_bytes, kept_on_hosts(plan, model))


def _part(held: Held) -> str:
    """The name of parameters that come and go, as a part of MemoryPeak."""
    return f"{held.role}: {'copy' if held.is_copy else 'onloaded parameters'}"


def _active(
    node: CallNode | EvaluateNode, model: CostModel, away: Collection[Held]
) -> tuple[tuple[float, ...], str]:
    """([stages] bytes that a node needs while it runs, their name as a part of MemoryPeak).

    away  parameters that are offloaded then: an evaluation brings them for itself
    """
    if isinstance(node, EvaluateNode):
        active = model.evaluation(node.role, node.placement).active_bytes
        if node.reads in away:
            active = tuple(map(add, active, model.parameter_bytes(node.role, node.placement)))
        return active, f"{node.name}: KV cache"
    return model.call(node.call, node.assignment).active_bytes, active_part(node.call)


_Stages = list[tuple[int, int]]  # (device, stage)


def _resident(
    plan: ExecutionPlan, model: CostModel, stages: Mapping[Placement, _Stages]
) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """What is held all the time: (part, (device, bytes) pairs). stages: as `_alike` gives them."""
    for name, (node, *_) in plan.calls.items():
        if any(kept := kept_samples_bytes(node.call, node.placement.strategy, model.workload)):
            yield f"{name}: samples drawn ahead", _by_device(stages[node.placement], kept)
    for part, placement, kept in offloaded(plan, model):
        on_host = [each for each in stages[placement] if model.classes.profile(each[0]).is_on_host]
        if on_host:
            yield part, _by_device(on_host, kept)
    there: set[Hashable] = set()
    onloaded = plan.onloaded
    for role, where in plan.roles.items():
        for number, placement in enumerate(where.placements):
            if where.trained and not number:
                offload = placement in where.offloaded
                away = (role, placement) in onloaded
                held = model.training_bytes(role, placement, offload, away)
                what = "gradients" if away else "parameters, gradients"
                what += "" if offload else ", optimizer"
                yield f"{role}: {what}", _by_device(stages[placement], held)
            if where.follows and not number:
                held = model.following_bytes(role, placement)
                yield f"{role}: parameters, master weights", _by_device(stages[placement], held)
                continue
            frozen = model.frozen_bytes if where.trained else model.parameter_bytes
            part = "weights below adapters" if where.trained else "frozen parameters"
            key = model.frozen_weights(role, where.changes), placement
            away = (role, placement) in onloaded and not where.trained
            if key not in there and not away and any(frozen(role, placement)):
                there.add(key)
                yield f"{role}: {part}", _by_device(stages[placement], frozen(role, placement))


def _alike(plan: ExecutionPlan, model: CostModel) -> tuple[dict[int, list[int]], dict[Placement, _Stages]]:
    """Groups devices of one class that are on the same stage of every placement; they hold the same bytes.

    Returns (first device of a group -> its devices) and (placement -> (first device, its stage) of the groups on it).
    """
    placements = list(dict.fromkeys(p for where in plan.roles.values() for p in where.placements))
    stage = np.full((plan.n_devices, len(placements) + 1), -1)
    stage[:, -1] = np.repeat(model.classes.of_host, model.cluster.devices_per_host)[: plan.n_devices]
    for column, placement in enumerate(placements):
        width = len(placement.devices) // placement.strategy.pp  # devices are in order of stages (pp-major)
        stage[np.array(placement.devices), column] = np.arange(len(placement.devices)) // width
    _, firsts, group = np.unique(stage, axis=0, return_index=True, return_inverse=True)
    groups: dict[int, list[int]] = {first: [] for first in sorted(firsts.tolist())}
    for device, first in enumerate(firsts[group.reshape(-1)].tolist()):
        groups[first].append(device)
    on: dict[Placement, _Stages] = {
        placement: [(first, at) for first in groups if (at := int(stage[first, column])) >= 0]
        for column, placement in enumerate(placements)
    }
    return groups, on


def _by_device(stages: _Stages, per_stage: Iterable[float]) -> list[tuple[int, float]]:
    """(device, bytes) pairs from bytes per stage."""
    sizes = list(per_stage)
    return [(device, sizes[stage]) for device, stage in stages]


def shortfall(memory: PlanPrice | PlanMemory, model: CostModel) -> str | None:
    """One sentence about the device that lacks the most bytes of memory, or else about such a host; None when the
    plan fits."""
    peaks = memory.peaks
    device = scarcest_device(peaks, model)
    peak, profile, room = peaks[device], model.classes.profile(device), model.classes.room_bytes(device)
    missing = peak.total_bytes - room
    if missing <= 0:
        return lack_of_host_memory(memory.hosts, model)
    largest, size_bytes = max(peak.parts.items(), key=lambda item: item[1])
    reserve = profile.reserve(model.cluster.n_devices)
    kept = f" of its {profile.memory_bytes} ({reserve})" if reserve.total_bytes else ""
    return (
        f"Device {device} ({profile.name}) lacks {missing:.0f} bytes: it needs {peak.total_bytes:.0f} during "
        f"{peak.node} and has {room}{kept}. Most of it, {size_bytes:.0f}, is {largest}. {remedy(largest)}"
    )


def scarcest_device(peaks: Mapping[int, MemoryPeak], model: CostModel) -> int:
    """The device that lacks the most memory, or has the least left."""
    # Devices that hold the same are of one class and have one peak among them (plan_memory): one stands for all.
    firsts: dict[int, int] = {}
    for device, peak in peaks.items():
        firsts.setdefault(id(peak), device)

    def lack_bytes(device: int) -> float:
        return peaks[device].total_bytes - model.classes.room_bytes(device)

    return max(firsts.values(), key=lack_bytes)


def active_part(call: ModelFunctionCall) -> str:
    """The name, as a part of MemoryPeak, of the memory that a call needs while it runs."""
    return f"{call.name}: {'KV cache' if call.kind == 'generate' else 'activations'}"


def remedy(part: str) -> str:
    """One sentence on the fields that would lower a part of MemoryPeak."""
    if part.startswith("evaluate_"):
        return "A smaller evaluation.batch_size or fewer new tokens would lower it."
    if part.endswith("KV cache"):
        return "A larger dp, tp or pp, a smaller batch_size or fewer new tokens would lower it."
    if part.endswith("samples drawn ahead"):
        return "A smaller staleness or batch_size would lower it."
    if part.endswith("activations"):
        return "More micro_batches, a larger dp or a smaller batch_size would lower it."
    if part.endswith("optimizer"):
        return (
            "A larger tp, pp or dp (ZeRO shards gradients and optimizer) on more devices, sharded weights, or "
            "offload: true for its train_step, would lower it."
        )
    if part.endswith("frozen parameters"):
        return "A larger tp or pp, or offload: true for its calls, would lower it."
    return "A larger tp or pp would lower it."


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
    equal share of it. Where weights are sharded, each rank reads what it would have without.
    """
    # A part of a model's files is named by its weights, stage, pp, tp rank and tp.
    readers: dict[tuple[int, tuple[Hashable, ...]], list[int]] = defaultdict(list)
    sizes: dict[tuple[Hashable, ...], float] = {}
    for role, where in plan.roles.items():
        for number, placement in enumerate(where.placements):
            if where.trained and number and model.models[role].lora is None:
                continue  # a copy, which comes from the trained role
            unsharded = replace(placement, strategy=replace(placement.strategy, shard="gradients"))
            frozen = model.frozen_bytes(role, unsharded)
            whole = [a + b for a, b in zip(model.parameter_bytes(role, unsharded), frozen, strict=True)]
            weights = model.frozen_weights(role, where.changes)
            pp, tp = placement.strategy.pp, placement.strategy.tp
            for device, at, size_bytes in _on_devices(placement, whole):
                part = (weights, at.pp, pp, at.tp, tp)
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


def _on_devices(placement: Placement, per_stage: Sequence[float]) -> Iterator[tuple[int, Coordinate, float]]:
    """(device, its coordinate, bytes) triples from bytes per stage."""
    for number, device in enumerate(placement.devices):
        at = placement.coordinate_at(number)
        yield device, at, per_stage[at.pp]
