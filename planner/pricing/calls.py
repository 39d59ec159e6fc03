"""Seconds and bytes of every model function call under every assignment.

The formulas follow the engine: pipeline.py (1F1B), optimizer.py (ZeRO-1, float32 gradients and master weights),
generation.py (as many groups in flight as stages; sequences leave when they end), kv_cache.py. All figures are per
device, in seconds and bytes. The slowest stage and the fullest tp rank decide. The terms of the formulas, such as the
seconds of a layer, come from a profile (planner/pricing/rooflines.py).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.plan.mesh import Cluster
from planner.plan.workload import Lengths, RoleModel, Workload, fullest_share
from planner.pricing.calibrate import with_measured_moves
from planner.pricing.device_classes import DeviceClasses
from planner.pricing.device_share import Sizes, sizes, stage_kinds
from planner.pricing.devices import DeviceProfile
from planner.pricing.measured import MeasuredProfile, ProfileError, ProfileTables
from planner.pricing.rooflines import GRADIENT_BYTES, Roofline, Slowest, Timing
from planner.pricing.run_history import Factor, RanCall, factor_elsewhere, factor_of
from rlhf_tasks.parallel.layout.flops import layer_flops
from rlhf_tasks.parallel.layout.shape import ModelShape
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.profiling.measurements import Exchange, Pass
from rlhf_tasks.spec import CallAssignment, CallKind, ModelFunctionCall

MASTER_BYTES = 4  # per parameter: master weight in float32 (optimizer.py)
OPTIMIZER_BYTES = 3 * MASTER_BYTES  # per parameter: master weight and two moments
NORM_BYTES = 4  # of an element inside a norm, which computes in float32 whatever the weights are
TOKEN_BYTES = 4  # per token of most keys of a batch (docs/interfaces.md)


@dataclass(frozen=True)
class CallCost:
    """What one call costs.

    seconds       its duration
    active_bytes  [stages] bytes that a device of each stage needs beyond parameters while the call runs
    """

    seconds: float
    active_bytes: tuple[float, ...]

    def times(self, factor: Factor) -> "CallCost":
        """The cost multiplied by a factor."""
        seconds = self.seconds * factor.seconds + factor.added_s
        return CallCost(seconds, tuple(n * factor.memory for n in self.active_bytes))


class Crossings(NamedTuple):
    """Whether the tp, dp and pp groups of a placement span hosts."""

    tp: bool
    dp: bool
    pp: bool


class _Where(NamedTuple):
    """What a call's price depends on besides its micro-batches. classes: numbers of the mesh's device classes."""

    strategy: ParallelStrategy
    crossings: Crossings
    classes: tuple[int, ...]


class CostModel:
    """Prices calls on the devices of a cluster.

    device    peaks, memory and links of all devices, or of each class
    classes   (attribute) the same by class, with links as measured for transfers
    models    role -> its model
    measured  profiles of some of the models on these devices. Other models, and tp degrees that were not measured,
              are priced by `device`
    ran       figures of earlier runs of the same calls. Under an assignment that ran, a call costs what it did then.
              Under any other assignment its price is multiplied by a factor: how far off the prices of the
              assignments that ran were (planner/pricing/run_history.py)
    Raises ValueError for a profile of a model that no role has or of a device that the cluster does not have, and
    when a strategy has more tp ranks than heads or more stages than layers.
    """

    def __init__(
        self,
        cluster: Cluster,
        device: DeviceProfile | DeviceClasses,
        models: Mapping[str, RoleModel],
        workload: Workload,
        measured: Sequence[MeasuredProfile] = (),
        ran: Sequence[RanCall] = (),
    ) -> None:
        self.cluster, self.models, self.workload = cluster, models, workload
        stated = device if isinstance(device, DeviceClasses) else DeviceClasses.alike(cluster, device)
        for profile in measured:
            profile.check(models, workload.itemsize)
        self.measured = _by_class(stated, measured)
        self._inside_calls = stated.profiles
        found = [
            with_measured_moves(profile, next(iter(of_models.values()))) if of_models else profile
            for profile, of_models in zip(stated.profiles, self.measured, strict=True)
        ]
        self.classes = replace(stated, profiles=tuple(found))
        self._timings: dict[tuple, Timing] = {}
        self._costs: dict[tuple, dict[int, CallCost]] = {}
        self._evaluations: dict[tuple, CallCost] = {}
        self.ran = tuple(ran)
        self._factors: dict[str, dict[tuple, Factor]] = {}

    def call(self, call: ModelFunctionCall, assignment: CallAssignment) -> CallCost:
        """Seconds and bytes of a call, or of each of its parts. Of the mesh only its strategy, crossings and device
        classes matter."""
        return self.calls(call, assignment.placement, [assignment.micro_batches])[0]

    def calls(
        self, call: ModelFunctionCall, placement: Placement, micro_batches: Sequence[int]
    ) -> list[CallCost]:
        """The cost of a call, or of each of its parts, on a placement with each of some numbers of micro-batches."""
        where = self._where(placement)
        found = self._profiled(call, where, micro_batches)
        factors = self._factors_of(call) if self.ran else {}
        if not factors:
            return found
        elsewhere = self.correction(call)
        return [
            cost.times(factors.get((where, count), elsewhere))
            for cost, count in zip(found, micro_batches, strict=True)
        ]

    def correction(self, call: ModelFunctionCall) -> Factor:
        """The factor on a call's price under assignments that have not run."""
        return factor_elsewhere(self._factors_of(call).values())

    def _factors_of(self, call: ModelFunctionCall) -> Mapping[tuple, Factor]:
        """(place, micro-batches) -> what a call took there, divided by the price from profiles."""
        if call.name not in self._factors:
            found = self._factors[call.name] = {}
            for ran in self.ran:
                if ran.call == call.name:
                    where, count = self._where(ran.assignment.placement), ran.assignment.micro_batches
                    (priced,) = self._profiled(call, where, [count])
                    found[where, count] = factor_of(ran, priced.seconds, max(priced.active_bytes))
        return self._factors[call.name]

    def _where(self, placement: Placement) -> _Where:
        return _Where(placement.strategy, self._crossings(placement), self.classes_of(placement))

    def _profiled(self, call: ModelFunctionCall, where: _Where, counts: Sequence[int]) -> list[CallCost]:
        """A call's price from profiles and device figures, for each of `counts` micro-batches."""
        sizes = call.n_seqs, call.group_size, call.mini_batches, call.chunks
        key = call.name, call.role, call.kind, sizes, where
        known = self._costs.setdefault(key, {})
        if missing := [count for count in counts if count not in known]:
            price: Callable[[_OnMesh, ModelFunctionCall, int], CallCost] = {
                "generate": _generate,
                "inference": _infer,
                "train_step": _train,
            }[call.kind]
            local = self._sizes(call.role, where.strategy)
            trained = self._trained_sizes(call.role, where.strategy)
            timing = self._timing(call.role, where.strategy.tp, where.crossings.tp, where.classes)
            mesh = _OnMesh(timing, self.workload, local, trained, where.strategy, where.crossings)
            known.update((count, price(mesh, call, count)) for count in missing)
        return [known[count] for count in counts]

    def classes_of(self, placement: Placement) -> tuple[int, ...]:
        """Numbers of the device classes of a placement's devices, ascending."""
        if len(self.classes.profiles) == 1:
            return (0,)
        return self.classes.within(min(placement.devices), len(placement.devices))

    def parameter_bytes(self, role: str, placement: Placement) -> tuple[int, ...]:
        """[stages] bytes of a role's parameters on a device of each stage; of one with adapters, bytes of these."""
        trained, pp = self._trained_sizes(role, placement.strategy), placement.strategy.pp
        return tuple(count * self.workload.itemsize for count in trained.parameters_by_stage(pp))

    def layer_bytes(self, role: str, tp: int) -> float:
        """Bytes of a layer of what a role moves on a device, with a layer's part of embedding and head
        (planner/pricing/moves.py, Held)."""
        trained = self._trained_sizes(role, ParallelStrategy(tp=tp))
        return trained.stage_parameters(1, 0) * self.workload.itemsize / trained.layers

    def frozen_bytes(self, role: str, placement: Placement) -> tuple[int, ...]:
        """[stages] bytes of the frozen weights below a role's adapters; 0 for a role without adapters."""
        s = placement.strategy
        if self.models[role].lora is None:
            return (0,) * s.pp
        local = self._sizes(role, s)
        return tuple(count * self.workload.itemsize for count in local.parameters_by_stage(s.pp))

    def frozen_weights(self, role: str, changes: bool) -> Hashable:
        """What a role's frozen weights are known by: roles with equal ones share them where placements are equal.

        changes  whether the role's parameters change during a run, or its adapters where it has some
        """
        model = self.models[role]
        shares = model.weights and not (changes and model.lora is None)
        return (model.weights, model.shape, model.head) if shares else role

    def training_bytes(self, role: str, placement: Placement) -> tuple[float, ...]:
        """[stages] bytes of trained parameters, gradients and optimizer on a training device of each stage."""
        s = placement.strategy
        trained = self._trained_sizes(role, s)
        per_parameter = self.workload.itemsize + GRADIENT_BYTES + OPTIMIZER_BYTES / s.dp
        return tuple(count * per_parameter for count in trained.parameters_by_stage(s.pp))

    def following_bytes(self, role: str, placement: Placement) -> tuple[float, ...]:
        """[stages] bytes of the parameters and master weights of a role that follows another, on a device of each
        stage."""
        s = placement.strategy
        per_parameter = self.workload.itemsize + MASTER_BYTES / s.dp
        return tuple(
            count * per_parameter for count in self._trained_sizes(role, s).parameters_by_stage(s.pp)
        )

    def evaluation(self, role: str, placement: Placement) -> CallCost:
        """One evaluation of a role on a placement, batch by batch: generation and the rewards of the answers, and a
        forward pass over the rows with their completions.

        The workload must have one. It has no figures of runs: only calls are corrected by these.
        """
        asked = self.workload.evaluation
        assert asked is not None, "the workload has no evaluation"
        where, s = self._where(placement), placement.strategy
        key = role, where
        if key not in self._evaluations:
            timing = self._timing(role, s.tp, where.crossings.tp, where.classes)
            local, trained = self._sizes(role, s), self._trained_sizes(role, s)

            def mesh(prompt_tokens: int, new_tokens: int) -> _OnMesh:
                lengths = {"prompt_tokens": prompt_tokens, "new_tokens": Lengths.fixed(new_tokens)}
                workload = self.workload.model_copy(update={**lengths, "max_new_tokens": new_tokens})
                return _OnMesh(timing, workload, local, trained, s, where.crossings)

            at_once = min(asked.rows_at_once, asked.rows)
            parts = [CallCost(0.0, (0.0,) * s.pp)]
            if asked.answers:
                call = _evaluates(role, "generate", at_once * asked.answers)
                on = mesh(asked.prompt_tokens, asked.new_tokens)
                generated, rewards_s = _generate(on, call, 1), on.share(call) * on.workload.reward_s
                parts.append(CallCost(generated.seconds + rewards_s, generated.active_bytes))
            if asked.completion_tokens:
                on = mesh(max(1, asked.completion_tokens - 1), 1)
                call = _evaluates(role, "inference", at_once)
                parts.append(_infer(on, call, min(s.pp, on.share(call))))
            seconds = -(-asked.rows // at_once) * sum(part.seconds for part in parts)
            active = [part.active_bytes for part in parts]
            self._evaluations[key] = CallCost(seconds, tuple(map(max, zip(*active, strict=True))))
        return self._evaluations[key]

    def onload_s(self, role: str, placement: Placement) -> float:
        """Seconds to copy a role's parameters from host memory: those of the fullest device, as the others wait."""
        held = max(self.parameter_bytes(role, placement))
        return self.classes.host_copy_s(held, self.classes_of(placement))

    def _sizes(self, role: str, strategy: ParallelStrategy) -> Sizes:
        model = self.models[role]
        if strategy.pp > model.shape.layers:
            raise ValueError(f"pp={strategy.pp} exceeds the model's {model.shape.layers} layers.")
        return sizes(model.shape, model.head, strategy.tp)

    def _trained_sizes(self, role: str, strategy: ParallelStrategy) -> Sizes:
        """Sizes of what moves and trains: of the adapters, where the role has some, else of the model."""
        local, model = self._sizes(role, strategy), self.models[role]
        return local if model.lora is None else sizes(model.shape, model.head, strategy.tp, model.lora)

    def _timing(self, role: str, tp: int, crosses: bool, classes: tuple[int, ...]) -> Timing:
        """The times for a role under tp: from measured profiles where there are some, else from rooflines.

        Groups that mix device classes are never measured; their collectives are priced by the devices' links.
        """
        key = (role, tp, crosses, classes)
        if key not in self._timings:
            model, itemsize = self.models[role], self.workload.itemsize
            local = sizes(model.shape, model.head, tp)
            analytic = [
                Roofline(self._inside_calls[number], local, model.head, tp, crosses, itemsize)
                for number in classes
            ]
            profiles = [self.measured[number].get(model.shape) for number in classes]
            timings: list[Timing] = [
                roofline
                if profile is None or tp not in profile.tp_degrees
                else ProfileTables(profile, model.head, tp, crosses)
                for roofline, profile in zip(analytic, profiles, strict=True)
            ]
            self._timings[key] = timings[0] if len(timings) == 1 else Slowest(timings, analytic)
        return self._timings[key]

    def _crossings(self, placement: Placement) -> Crossings:
        """Whether the groups of the placement's first device span hosts; the other groups are taken to be alike."""
        s, at = placement.strategy, placement.device
        home = self.cluster.host(placement.devices[0])

        def spans(devices: Iterable[int]) -> bool:
            return any(self.cluster.host(device) != home for device in devices)

        if not spans(placement.devices):
            return Crossings(False, False, False)
        return Crossings(
            spans(at(0, rank, 0) for rank in range(s.tp)),
            spans(at(rank, 0, 0) for rank in range(s.dp)),
            spans(at(0, 0, rank) for rank in range(s.pp)),
        )


def _evaluates(role: str, kind: CallKind, n_seqs: int) -> ModelFunctionCall:
    return ModelFunctionCall(name="evaluate", role=role, kind=kind, inputs=("input_ids",), n_seqs=n_seqs)


def _by_class(
    classes: DeviceClasses, measured: Sequence[MeasuredProfile]
) -> tuple[dict[ModelShape, MeasuredProfile], ...]:
    """For each class: model shape -> profile. Raises ProfileError for a profile of a device of no class."""
    found: dict[str, dict[ModelShape, MeasuredProfile]] = {p.name: {} for p in classes.profiles}
    for profile in measured:
        if profile.device not in found:
            raise ProfileError(
                f"The profile is of {profile.device}; the cluster has {', '.join(found)}. "
                "Measure the run's devices with prefect-rlhf profile."
            )
        found[profile.device][profile.model] = profile
    return tuple(found.values())


@dataclass(frozen=True)
class _OnMesh:
    """One model under one strategy: seconds and bytes of the terms that a call's price is composed of.

    local    sizes of the model
    trained  the same object; or for a model with adapters, sizes of these
    """

    timing: Timing
    workload: Workload
    local: Sizes
    trained: Sizes
    strategy: ParallelStrategy
    crossings: Crossings

    def share(self, call: ModelFunctionCall, mini_batches: int = 1) -> int:
        """Sequences of the fullest dp rank, of a call's batch or part, or of one of its mini-batches."""
        return -(-(call.n_groups // (mini_batches * call.chunks)) // self.strategy.dp) * call.group_size

    def layers(self, stage: int) -> int:
        return self.local.stage_layers(self.strategy.pp, stage)

    def exchange_s(self, kind: Exchange, ranks: int, size_bytes: float, crosses: bool) -> float:
        return self.timing.exchange_s(kind, ranks, size_bytes, crosses)

    def pass_on_s(self, tokens: float) -> float:
        """Seconds to send the hidden states of `tokens` tokens to the next stage; 0 with one stage."""
        if self.strategy.pp == 1:
            return 0.0
        size_bytes = tokens * self.local.hidden * self.workload.itemsize
        return self.exchange_s("send", 2, size_bytes, self.crossings.pp)

    def each_stage(self, figure: Callable[[int], float]) -> list[float]:
        """A figure of every stage. It is computed once for inner stages with equal numbers of layers."""
        firsts, alike = stage_kinds(self.local.layers, self.strategy.pp)
        found = [figure(stage) for stage in firsts]
        return [found[kind] for kind in alike]

    def stages_s(self, kinds: Sequence[Pass], tokens: float, context: float) -> list[float]:
        """[stages] seconds of passes over a micro-batch."""
        layer_s, first_s, last_s = (
            sum(figure)
            for figure in zip(*(self._pass_s(kind, tokens, context) for kind in kinds), strict=True)
        )

        def stage_s(stage: int) -> float:
            seconds = self.layers(stage) * layer_s
            if stage == 0:
                seconds += first_s
            if stage == self.strategy.pp - 1:
                seconds += last_s
            return seconds

        return self.each_stage(stage_s)

    def _pass_s(self, kind: Pass, tokens: float, context: float) -> tuple[float, float, float]:
        """Seconds of a pass over a micro-batch: (one layer, rest of the first stage, rest of the last stage)."""
        timing = self.timing
        layer_s = timing.layer_s(kind, tokens, context) * self._layer_factor(kind, tokens, context)
        if kind == "backward" and self.workload.recompute:
            layer_s += timing.layer_s("forward", tokens, context) * self._layer_factor(
                "forward", tokens, context
            )
        embedding_s, head_s = timing.embedding_s(kind, tokens), timing.head_s(kind, tokens, context)
        if kind == "backward" and self.has_adapters:  # the frozen embedding and lm head have no gradient
            embedding_s, head_s = 0.0, head_s * (0.5 if self.local.vocab > 1 else 1.0)
        return layer_s, embedding_s, head_s

    @property
    def has_adapters(self) -> bool:
        return self.trained is not self.local

    def _layer_factor(self, kind: Pass, tokens: float, context: float) -> float:
        """FLOPs of a layer's pass with adapters, in those of the pass without, for which there are times.

        A backward pass computes no gradients of frozen matrices, which are as much work as their products.
        """
        if not self.has_adapters:
            return 1.0
        attended = context if kind == "decode" else context / 2
        forward = layer_flops(tokens, attended, self.local.layer, self.local.query)
        frozen, adapters = (layer_flops(tokens, 0, size.layer, 0) for size in (self.local, self.trained))
        if kind == "backward":
            return (2 * forward - frozen + 2 * adapters) / (2 * forward)
        return (forward + adapters) / forward

    def pipelined_s(self, kinds: Sequence[Pass], tokens: float, context: float, micro_batches: int) -> float:
        """Seconds of all micro-batches through all stages: the first fills the pipeline, then the slowest stage
        sets the pace."""
        stages, sends = self.stages_s(kinds, tokens, context), self.pass_on_s(tokens)
        return sum(stages) + (self.strategy.pp - 1) * sends + (micro_batches - 1) * (max(stages) + sends)

    def share_batch_s(self, call: ModelFunctionCall, tokens: float) -> float:
        """Seconds in which a replica's head shares a batch of `tokens` tokens with the replica's ranks."""
        ranks = self.strategy.tp * self.strategy.pp
        size_bytes = len(call.inputs) * tokens * TOKEN_BYTES
        return self.exchange_s("share", ranks, size_bytes, self.crossings.tp or self.crossings.pp)

    @property
    def kept_bytes(self) -> float:
        """Bytes per token that a layer keeps for the backward pass: with recomputation its input alone.

        Else all that a layer of Llama's kind computes with: in float32 the input of each of its two norms, and that
        normalised; the inputs of its products (two norms' outputs, attention's, the gated one); queries and keys as
        rotated, and values; attention's output, sequence by sequence; gate, its activation, and up.
        """
        local, itemsize = self.local, self.workload.itemsize
        if self.workload.recompute:
            return local.hidden * itemsize
        products = 2 * local.hidden + 3 * local.query + 2 * local.kv + 4 * local.intermediate
        return 4 * local.hidden * NORM_BYTES + products * itemsize

    def working_bytes(self, tokens: float, stage: int, gradients: bool) -> float:
        """Bytes of temporary tensors: the larger of one layer's and, on the last stage, the head's."""
        local, itemsize = self.local, self.workload.itemsize
        layer = (
            tokens * (4 * local.hidden + 2 * local.query + 2 * local.kv + 3 * local.intermediate) * itemsize
        )
        logits = 0.0
        if stage == self.strategy.pp - 1:
            logits = tokens * local.vocab * itemsize * (2 if gradients else 1)
        return max(layer * (2 if gradients else 1), logits)


def _infer(mesh: _OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """A forward pass. Python rewards run at the same time, each head's sequences one by one; or they run alone."""
    length, share = mesh.workload.mean_tokens, mesh.share(call)
    tokens, fullest = share * length / micro_batches, -(-share // micro_batches) * length
    scores = "scores" in (call.remap.get(key, key) for key in call.outputs)
    rewards_s = share * mesh.workload.reward_s if scores else 0.0
    if not call.runs_model:
        return CallCost(rewards_s, (0.0,) * mesh.strategy.pp)
    passes_s = mesh.pipelined_s(["forward"], tokens, length, micro_batches)
    seconds = mesh.share_batch_s(call, share * length) + passes_s
    return CallCost(
        max(seconds, rewards_s),
        tuple(mesh.each_stage(lambda stage: mesh.working_bytes(fullest, stage, False))),
    )


def _train(mesh: _OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """An optimizer step per mini-batch and epoch.

    Micro-batches hold whole sequences, and memory is that of the fullest ones: of 5 sequences in 4 micro-batches, the
    first holds 2.
    """
    workload, s = mesh.workload, mesh.strategy
    length = workload.mean_tokens
    tokens = mesh.share(call, call.mini_batches) * length / micro_batches
    gradients_back = (s.pp - 1 + micro_batches) * mesh.pass_on_s(tokens)
    passes_s = mesh.pipelined_s(["forward", "backward"], tokens, length, micro_batches)
    step = passes_s + gradients_back + _update_s(mesh)

    share = fullest_share(call, s.dp)
    fullest = -(-share // micro_batches) * length
    per_token = mesh.each_stage(lambda stage: mesh.layers(stage) * mesh.kept_bytes)
    working = mesh.each_stage(lambda stage: mesh.working_bytes(fullest, stage, True))
    # 1F1B: a stage keeps the activations of as many micro-batches as there are stages from it to the last one.
    in_flight = (min(s.pp - stage, micro_batches) for stage in range(s.pp))
    # Tokens of n micro-batches: each holds share // micro_batches sequences, the first ones one more.
    kept = [(n * (share // micro_batches) + min(n, share % micro_batches)) * length for n in in_flight]
    seconds = mesh.share_batch_s(call, mesh.share(call) * length)
    seconds += step * call.mini_batches * workload.epochs
    active = (n * of_one + besides for n, of_one, besides in zip(kept, per_token, working, strict=True))
    return CallCost(seconds, tuple(active))


def _update_s(mesh: _OnMesh) -> float:
    """Seconds of an optimizer step after the backward passes: reduce gradients, update shares, gather weights."""
    s, itemsize, crossings = mesh.strategy, mesh.workload.itemsize, mesh.crossings
    parameters = max(mesh.trained.parameters_by_stage(s.pp))
    seconds = (
        mesh.exchange_s("reduce_scatter", s.dp, parameters * GRADIENT_BYTES, crossings.dp)
        + mesh.timing.update_s(parameters, s.dp)
        + mesh.exchange_s("all_gather", s.dp, parameters * itemsize, crossings.dp)
    )
    if (
        mesh.has_adapters and s.tp > 1
    ):  # of each adapter, one matrix is on all tp ranks; with a large tp that is most
        seconds += mesh.exchange_s(
            "all_reduce", s.tp * s.dp, parameters * GRADIENT_BYTES, crossings.tp or crossings.dp
        )
    if mesh.trained.tied and s.pp > 1:
        seconds += mesh.exchange_s(
            "all_reduce", 2 * s.dp, mesh.trained.embedding * GRADIENT_BYTES, crossings.pp or crossings.dp
        )
    if s.dp * s.pp > 1:  # the ranks exchange their metrics
        seconds += mesh.exchange_s("all_gather", s.size, 0, any(crossings))
    return seconds


def _generate(mesh: _OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
    """Prefill, then one token per step for every sequence that has not ended, in as many groups as stages."""
    workload, local = mesh.workload, mesh.local
    pp, share = mesh.strategy.pp, mesh.share(call)
    groups = min(pp, share)
    prompt = workload.prompt_tokens
    tokens, fullest = share * prompt / groups, -(-share // groups)
    seconds = mesh.share_batch_s(call, share * prompt)
    seconds += mesh.pipelined_s(["prefill"], tokens, prompt, groups)
    for first, last, running in workload.new_tokens.spans():
        steps = last - max(first, 2) + 1  # the first token comes with the prefill
        rows = max(share * running / groups, 1.0)
        context = prompt + (first + last) / 2
        stages = mesh.stages_s(["decode"], rows, context)
        message = mesh.pass_on_s(rows)  # hidden states; sending the sampled tokens takes about as long
        # Per token, either a stage that serves all groups in turn is the bottleneck, or one group's round trip:
        # its next token needs the previous one.
        seconds += steps * max(groups * (max(stages) + 2 * message), sum(stages) + pp * message)

    def active(stage: int) -> float:
        cache = share * workload.cache_tokens * 2 * local.kv * mesh.layers(stage) * workload.itemsize
        logits = fullest * local.vocab * 4 if stage == pp - 1 else 0.0
        return cache + max(mesh.working_bytes(fullest * prompt, 0, False), logits)

    return CallCost(seconds, tuple(mesh.each_stage(active)))
