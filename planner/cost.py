"""Seconds and bytes of every model function call under every assignment.

The formulas follow what the engine does: pipeline.py (1F1B), optimizer.py (ZeRO-1, float32 gradients and
master weights), generation.py (as many groups in flight as stages, sequences leave when they end),
kv_cache.py. Everything is per device, in seconds and bytes; the slowest stage and the fullest tp rank count.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.mesh import Cluster
from planner.profile import DeviceProfile
from planner.sizes import Sizes, sizes
from planner.workload import RoleModel, Workload
from rlhf_tasks.parallel.topology import Placement
from rlhf_tasks.spec import CallAssignment, ModelFunctionCall

GRADIENT_BYTES = 4  # float32 (optimizer.py)
OPTIMIZER_BYTES = 12  # master weight and two moments in float32 (optimizer.py)
UPDATE_TRAFFIC_BYTES = 30  # of one parameter's update: gradient, master, moments read; all but it written


@dataclass(frozen=True)
class CallCost:
    """What one call costs.

    seconds       its duration
    active_bytes  memory of a device beyond parameters while it runs, stage by stage
    """

    seconds: float
    active_bytes: tuple[float, ...]


class CostModel:
    """Prices calls on one kind of device.

    models  role -> its model
    Raises ValueError when a strategy has more tp ranks than heads or more stages than layers.
    """

    def __init__(
        self, cluster: Cluster, device: DeviceProfile, models: Mapping[str, RoleModel], workload: Workload
    ) -> None:
        self.cluster, self.device, self.models, self.workload = cluster, device, models, workload

    def call(self, call: ModelFunctionCall, assignment: CallAssignment) -> CallCost:
        """Seconds and memory of a call."""
        on_mesh = self._on_mesh(call.role, assignment.placement)
        price: Callable[[_OnMesh, ModelFunctionCall, int], CallCost] = {
            "generate": _generate,
            "inference": _infer,
            "train_step": _train,
        }[call.kind]
        return price(on_mesh, call, assignment.micro_batches)

    def parameter_bytes(self, role: str, placement: Placement) -> tuple[int, ...]:
        """Bytes of a role's parameters on a device, stage by stage."""
        local, pp = self._sizes(role, placement), placement.strategy.pp
        return tuple(local.stage_parameters(pp, stage) * self.workload.itemsize for stage in range(pp))

    def training_bytes(self, role: str, placement: Placement) -> tuple[float, ...]:
        """Bytes of parameters, gradients and optimizer on a device that trains, stage by stage."""
        local, s = self._sizes(role, placement), placement.strategy
        per_parameter = self.workload.itemsize + GRADIENT_BYTES + OPTIMIZER_BYTES / s.dp
        return tuple(local.stage_parameters(s.pp, stage) * per_parameter for stage in range(s.pp))

    def _sizes(self, role: str, placement: Placement) -> Sizes:
        model = self.models[role]
        if placement.strategy.pp > model.shape.layers:
            raise ValueError(f"pp={placement.strategy.pp} exceeds the model's {model.shape.layers} layers.")
        return sizes(model.shape, model.head, placement.strategy.tp)

    def _on_mesh(self, role: str, placement: Placement) -> "_OnMesh":
        return _OnMesh(self.cluster, self.device, self.workload, self._sizes(role, placement), placement)


@dataclass(frozen=True)
class _OnMesh:
    """One model on one placement: seconds and bytes of the pieces that calls are made of."""

    cluster: Cluster
    device: DeviceProfile
    workload: Workload
    local: Sizes
    placement: Placement

    @cached_property
    def tp_crosses(self) -> bool:
        """Whether a tp group spans hosts."""
        return self._crosses(self.placement.tp_group(self.placement.devices[0]))

    @cached_property
    def dp_crosses(self) -> bool:
        return self._crosses(self.placement.dp_group(self.placement.devices[0]))

    @cached_property
    def pp_crosses(self) -> bool:
        return self._crosses(self.placement.pp_group(self.placement.devices[0]))

    def _crosses(self, devices: tuple[int, ...]) -> bool:
        return len({self.cluster.host(device) for device in devices}) > 1

    def share(self, n_seqs: float) -> int:
        """Sequences of the fullest dp rank."""
        return -(-int(n_seqs) // self.placement.strategy.dp)

    def layers(self, stage: int) -> int:
        return self.local.stage_layers(self.placement.strategy.pp, stage)

    def tp_reduce_s(self, tokens: float) -> float:
        """An all-reduce of hidden states over the tp group."""
        size_bytes = tokens * self.local.hidden * self.workload.itemsize
        return self.device.all_reduce_s(size_bytes, self.placement.strategy.tp, self.tp_crosses)

    def pass_on_s(self, tokens: float) -> float:
        """Hidden states sent to the next stage."""
        size_bytes = tokens * self.local.hidden * self.workload.itemsize
        return self.device.send_s(size_bytes, self.pp_crosses)

    def layer_s(self, tokens: float, context: float, passes: int, cached: bool = False) -> float:
        """Arithmetic of a layer for some tokens, each attending to `context` others on average.

        passes  how many times the forward's work; a backward pass is 2
        cached  keys and values of the context are read from the KV cache
        """
        local, itemsize = self.local, self.workload.itemsize
        flops = 2 * tokens * local.layer + 4 * tokens * context * local.query
        # Read and written: hidden states; query, key and value; the MLP's two branches and their product
        elements = tokens * (8 * local.hidden + 2 * local.query + 4 * local.kv + 6 * local.intermediate)
        if cached:
            elements += 2 * tokens * context * local.kv
        return self.device.compute_s(passes * flops, passes * (elements + local.layer) * itemsize)

    def head_s(self, tokens: float, passes: int) -> float:
        """The last stage's head with the loss or the log-probabilities."""
        local, itemsize = self.local, self.workload.itemsize
        traffic = (local.vocab * local.hidden + 2 * tokens * local.vocab) * itemsize
        return self.device.compute_s(2 * passes * tokens * local.hidden * local.vocab, passes * traffic)

    def forward_s(self, stage: int, tokens: float, context: float, head: bool = True) -> float:
        """A stage's forward pass over a micro-batch."""
        layer = self.layer_s(tokens, context, 1) + 2 * self.tp_reduce_s(tokens) + self.device.layer_overhead_s
        seconds = self.layers(stage) * layer
        if stage == 0:
            seconds += self.tp_reduce_s(tokens)  # the vocabulary-parallel embedding
        if head and stage == self.placement.strategy.pp - 1:
            seconds += self.head_s(tokens, 1)
        return seconds

    def backward_s(self, stage: int, tokens: float, context: float) -> float:
        """A stage's backward pass; with recomputation, the layers' forward again."""
        layer = self.layer_s(tokens, context, 2) + 2 * self.tp_reduce_s(tokens) + self.device.layer_overhead_s
        if self.workload.recompute:
            layer += self.layer_s(tokens, context, 1) + 2 * self.tp_reduce_s(tokens)
        seconds = self.layers(stage) * layer
        if stage == self.placement.strategy.pp - 1:
            seconds += self.head_s(tokens, 2)
        return seconds

    def pipelined_s(self, stage_s: Callable[[int], float], tokens: float, micro_batches: int) -> float:
        """Micro-batches through all stages: one fills the pipeline, the others follow the slowest stage."""
        pp = self.placement.strategy.pp
        stages = [stage_s(stage) for stage in range(pp)]
        sends = self.pass_on_s(tokens) if pp > 1 else 0.0
        return sum(stages) + (pp - 1) * sends + (micro_batches - 1) * (max(stages) + sends)

    def working_bytes(self, tokens: float, stage: int, gradients: bool) -> float:
        """Temporary tensors of one layer, and of the head on the last stage."""
        local, itemsize = self.local, self.workload.itemsize
        layer = (
            tokens * (4 * local.hidden + 2 * local.query + 2 * local.kv + 3 * local.intermediate) * itemsize
        )
        logits = 0.0
        if stage == self.placement.strategy.pp - 1:
            logits = tokens * local.vocab * itemsize * (2 if gradients else 1)
        return max(layer * (2 if gradients else 1), logits)


def _infer(mesh: _OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    length = mesh.workload.mean_tokens
    tokens = mesh.share(call.n_seqs) * length / micro_batches
    pp = mesh.placement.strategy.pp
    seconds = mesh.pipelined_s(lambda stage: mesh.forward_s(stage, tokens, length / 2), tokens, micro_batches)
    return CallCost(seconds, tuple(mesh.working_bytes(tokens, stage, False) for stage in range(pp)))


def _train(mesh: _OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """An optimizer step per mini-batch and epoch."""
    workload, device, s = mesh.workload, mesh.device, mesh.placement.strategy
    length = workload.mean_tokens
    tokens = mesh.share(call.n_seqs / call.mini_batches) * length / micro_batches

    def both_s(stage: int) -> float:
        return mesh.forward_s(stage, tokens, length / 2) + mesh.backward_s(stage, tokens, length / 2)

    parameters = max(mesh.local.stage_parameters(s.pp, stage) for stage in range(s.pp))
    update = (
        device.gather_s(parameters * GRADIENT_BYTES, s.dp, mesh.dp_crosses)
        + device.compute_s(0, parameters * (UPDATE_TRAFFIC_BYTES / s.dp + GRADIENT_BYTES))
        + device.gather_s(parameters * workload.itemsize, s.dp, mesh.dp_crosses)
        + device.optimizer_overhead_s
    )
    sends = 0.0 if s.pp == 1 else (s.pp - 1 + micro_batches) * mesh.pass_on_s(tokens)  # of gradients
    step = mesh.pipelined_s(both_s, tokens, micro_batches) + sends + update

    def active(stage: int) -> float:
        in_flight = min(s.pp - stage, micro_batches)
        layers, width = mesh.layers(stage), mesh.local.hidden
        if not workload.recompute:
            local = mesh.local
            width += 4 * local.hidden + 2 * local.query + 2 * local.kv + 3 * local.intermediate
        kept = in_flight * layers * tokens * width * workload.itemsize
        return kept + mesh.working_bytes(tokens, stage, True)

    return CallCost(step * call.mini_batches * workload.epochs, tuple(active(stage) for stage in range(s.pp)))


def _generate(mesh: _OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """Prefill, then one token per step for every sequence that still runs, in as many groups as stages."""
    workload, device, local = mesh.workload, mesh.device, mesh.local
    pp, share = mesh.placement.strategy.pp, mesh.share(call.n_seqs)
    groups = min(pp, share)
    prompt = workload.prompt_tokens
    tokens = share * prompt / groups

    def prefill_s(stage: int) -> float:
        return mesh.forward_s(stage, tokens, prompt / 2, head=False)

    seconds = mesh.pipelined_s(prefill_s, tokens, groups)
    for first, last, running in workload.new_tokens.spans():
        rows = max(share * running / groups, 1.0)
        context = prompt + (first + last) / 2
        layer = mesh.layer_s(rows, context, 1, cached=True) + 2 * mesh.tp_reduce_s(rows)
        slowest = max(mesh.layers(stage) for stage in range(pp)) * (layer + device.decode_overhead_s)
        turn = slowest + mesh.head_s(rows, 1) + (mesh.pass_on_s(rows) if pp > 1 else 0.0)
        # A group passes all stages for each token; with fewer groups than stages the stages idle in between
        seconds += (last - first + 1) * turn * pp

    def active(stage: int) -> float:
        cache = share * workload.cache_tokens * 2 * local.kv * mesh.layers(stage) * workload.itemsize
        logits = share / groups * local.vocab * 4 if stage == pp - 1 else 0.0
        return cache + max(mesh.working_bytes(tokens, 0, False), logits)

    return CallCost(seconds, tuple(active(stage) for stage in range(pp)))
