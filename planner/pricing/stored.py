"""What a plan's ranks read from disk and write to it, in bytes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.plan.workload import Workload
from planner.pricing.calls import CostModel
from planner.pricing.plans import key_bytes
from rlhf_tasks.parallel.layout.topology import Coordinate, Placement
from rlhf_tasks.spec import ExecutionPlan, FetchNode, ModelFunctionCall, SaveNode, SaveSamplesNode


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
