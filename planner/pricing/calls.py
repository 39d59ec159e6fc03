"""Seconds and bytes of every model function call under every assignment.

The formulas of the kinds of calls are in planner/pricing/call_formulas.py.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload, fullest_share
from prefect_rlhf.planner.pricing.analytic import with_measured_moves
from prefect_rlhf.planner.pricing.call_formulas import (
    generate_beside,
    generate_in_turns,
    infer,
    train,
    unreduced,
)
from prefect_rlhf.planner.pricing.device_classes import DeviceClasses
from prefect_rlhf.planner.pricing.devices import DeviceProfile
from prefect_rlhf.planner.pricing.figures import (
    Factor,
    MeasuredProfile,
    ProfileError,
    ProfileTables,
    RanCall,
    as_it_ran,
    factor_elsewhere,
    factor_of,
)
from prefect_rlhf.planner.pricing.rooflines import (
    GRADIENT_BYTES,
    OfStage,
    Roofline,
    Sizes,
    Slowest,
    Timing,
    parameters_by_stage,
    sizes,
    stage_sizes,
)
from prefect_rlhf.planner.pricing.terms import AtStage, CallCost, Crossings, OnMesh
from prefect_rlhf.rlhf_tasks.config.models import JUDGE
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.shares import Gathering, gathering
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout, check_context_parallel
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import CHUNK
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, CallKind, ModelFunctionCall

MASTER_BYTES = 4  # per parameter: master weight in float32 (optimizer.py)
PASSES_OF_HANDOVER = 4  # over the weights: they are written, hashed by both sides, and read
OPTIMIZER_BYTES = 3 * MASTER_BYTES  # per parameter: master weight and two moments


class _Circumstances(NamedTuple):
    """What a call's price depends on besides its micro-batches.

    classes  numbers of the mesh's device classes
    streams  the optimizer's state passes from host memory through the devices
    """

    strategy: ParallelStrategy
    crossings: Crossings
    classes: tuple[int, ...]
    streams: bool = False


class CostModel:
    """Prices calls on the devices of a cluster.

    device    peaks, memory and links of all devices, or of each class
    classes   (attribute) the same by class, with links as measured for transfers
    models    role -> its model
    measured  profiles of some of the models on these devices. Other models, and tp degrees that were not measured,
              are priced by `device`
    history   figures of earlier runs of the same calls. Under an assignment that ran, a call costs what it did then.
              Under any other assignment its price is multiplied by a factor: how far off the prices of the
              assignments that ran were (planner/pricing/figures.py). Responses of several turns are priced as the
              newest were
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
        history: Sequence[RanCall] = (),
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
        self._costs: dict[tuple[Any, ...], dict[int, CallCost]] = {}
        self._evaluations: dict[tuple[Any, ...], CallCost] = {}
        self.history = tuple(history)
        self._as_it_ran = as_it_ran(workload, history)
        self._factors: dict[str, dict[tuple[_Circumstances, int], Factor]] = {}

    def without_history(self) -> "CostModel":
        """The same prices, not corrected by earlier runs."""
        model = copy(self)
        model.history, model._costs, model._evaluations, model._factors = (), {}, {}, {}
        model._as_it_ran = self.workload
        return model

    def call(self, call: ModelFunctionCall, assignment: CallAssignment) -> CallCost:
        """Seconds and bytes of a call, or of each of its parts. Of the mesh only its strategy, crossings and device
        classes matter."""
        return self.calls(call, assignment.placement, [assignment.micro_batches], assignment.offload)[0]

    def calls(
        self,
        call: ModelFunctionCall,
        placement: Placement,
        micro_batches: Sequence[int],
        offload: bool = False,
    ) -> list[CallCost]:
        """The cost of a call, or of each of its parts, on a placement with each of some numbers of micro-batches.

        offload  as in its assignment: a train_step takes longer
        """
        if not self.routes_alike(call.role, placement):
            raise ValueError(
                f"tp={placement.strategy.tp} splits the experts of {call.role} over devices of unlike classes, whose "
                "routers may choose unlike experts for a token. Choose a tp within the hosts of one class."
            )
        if call.kind == "generate" and placement.strategy.cp > 1:
            raise ValueError(
                f"cp={placement.strategy.cp} divides the tokens of a sequence, but a generate call draws one after "
                "the other. Choose a larger dp or tp instead."
            )
        where = self._where(placement, call, offload)
        found = self._profiled(call, where, micro_batches)
        if not (self.history and (factors := self._factors_of(call))):
            return found
        elsewhere = self.correction(call)
        return [
            cost.times(factors.get((where, count), elsewhere))
            for cost, count in zip(found, micro_batches, strict=True)
        ]

    def correction(self, call: ModelFunctionCall) -> Factor:
        """The factor on a call's price under assignments that have not run."""
        return factor_elsewhere(self._factors_of(call).values())

    def _factors_of(self, call: ModelFunctionCall) -> Mapping[tuple["_Circumstances", int], Factor]:
        """(place, micro-batches) -> what a call took there, divided by the price from profiles."""
        if call.name not in self._factors:
            found = self._factors[call.name] = {}
            for ran in self.history:
                if ran.call == call.name:
                    given = ran.assignment
                    where, count = self._where(given.placement, call, given.offload), given.micro_batches
                    (priced,) = self._profiled(call, where, [count])
                    if call.kind == "generate" and self.workload.of_role(call.role).other is not None:
                        # Of the rank; the engine's is not measured.
                        ran = ran.model_copy(update={"active_bytes": None})
                    found[where, count] = factor_of(ran, priced.seconds, max(priced.active_bytes))
        return self._factors[call.name]

    def _where(
        self, placement: Placement, call: ModelFunctionCall | None = None, offload: bool = False
    ) -> _Circumstances:
        streams = offload and call is not None and call.kind == "train_step"
        return _Circumstances(
            placement.strategy, self._crossings(placement), self.classes_of(placement), streams
        )

    def _profiled(
        self, call: ModelFunctionCall, where: _Circumstances, counts: Sequence[int]
    ) -> list[CallCost]:
        """A call's price from profiles and device figures, for each of `counts` micro-batches."""
        if where.streams:
            kept = self._profiled(call, where._replace(streams=False), counts)
            streams_s = call.mini_batches * self.workload.epochs * self._streams_s(call.role, where)
            return [replace(cost, seconds=cost.seconds + streams_s) for cost in kept]
        sizes = call.n_seqs, call.group_size, call.mini_batches, call.chunks, call.segment_tokens
        key = call.name, call.role, call.kind, sizes, where
        known = self._costs.setdefault(key, {})
        if missing := [count for count in counts if count not in known]:
            price: Callable[[OnMesh, ModelFunctionCall, int], CallCost] = {
                "generate": self._generated_after_handover,
                "inference": infer,
                "train_step": train,
            }[call.kind]
            mesh = self._mesh(call.role, where, self._as_it_ran.of_role(call.role))
            sequences = self._sequences(call, where)
            known.update((count, price(mesh, sequences, count)) for count in missing)
        return [known[count] for count in counts]

    def _sequences(self, call: ModelFunctionCall, where: _Circumstances) -> ModelFunctionCall:
        """A call as the sequences that it computes. The judge's are as many as its questions about the fullest rank's
        samples, and each has a prompt of its own."""
        work = self.workload.judge
        if call.role != JUDGE or work is None:
            return call
        n_seqs = fullest_share(call, where.strategy.dp) * where.strategy.dp * call.blocks * work.questions
        return call.model_copy(update={"n_seqs": n_seqs, "group_size": 1})

    def _generated(self, mesh: OnMesh, call: ModelFunctionCall, micro_batches: int) -> CallCost:
        """The price of a generation by whoever draws and has the weights. Another engine knows no micro-batches."""
        if mesh.workload.other is None:
            return generate_in_turns(mesh, call, micro_batches)
        whole, itemsize = self._sizes(call.role, ParallelStrategy()), self.workload.itemsize
        (parameters,) = parameters_by_stage([whole])
        size_bytes = parameters * itemsize
        cached = 2 * whole.cached * whole.layers * itemsize
        return generate_beside(mesh, call, cached, self.models[call.role].shape.kv_heads, size_bytes)

    def _generated_after_handover(
        self, mesh: OnMesh, call: ModelFunctionCall, micro_batches: int
    ) -> CallCost:
        """The price of a call's part; its first part hands the weights over, and each has its share of that."""
        cost = self._generated(mesh, call, micro_batches)
        return replace(cost, seconds=cost.seconds + self._handover_s(call.role) / call.chunks)

    def _handover_s(self, role: str) -> float:
        """Seconds in which another engine takes a role's weights."""
        if (other := self.workload.of_role(role).other) is None:
            return 0.0
        (parameters,) = parameters_by_stage([self._sizes(role, ParallelStrategy())])
        slowest = min(
            each.memory_bytes_per_s if other.kv_bytes and not each.is_on_host else each.host_copy_bytes_per_s
            for each in self.classes.profiles  # an engine on the same GPUs reads the weights there
        )
        return PASSES_OF_HANDOVER * parameters * self.workload.itemsize / slowest

    def _mesh(self, role: str, where: _Circumstances, workload: Workload) -> OnMesh:
        s, devices = where.strategy, [self._inside_calls[number] for number in where.classes]
        local, trained = self._sizes(role, s), self._trained_sizes(role, s)
        timing = self._timing(role, s.tp, where.crossings.tp, where.classes)
        return OnMesh(
            timing,
            workload,
            local,
            trained,
            s,
            where.crossings,
            overlap=min(device.exchange_overlap for device in devices),
            gpus=not all(device.is_on_host for device in devices),
            gathered=self._gathering(role, s) if s.weight_shares > 1 else None,
            stages=self._stages(role, where, local, timing),
        )

    def _stages(self, role: str, where: _Circumstances, mean: Sizes, timing: Timing) -> tuple[AtStage, ...]:
        """What differs at each stage; nothing where all layers are alike."""
        s, model = where.strategy, self.models[role]
        locals = stage_sizes(model.shape, model.head, s.tp, s.pp)
        if all(local is mean for local in locals):
            return ()
        trained = locals if model.lora is None else self._trained_by_stage(role, s)
        of_mean = self._rooflines(role, mean, where)
        known: dict[tuple[Sizes, Sizes], AtStage] = {}
        for local, moved in zip(locals, trained, strict=True):
            if (local, moved) not in known:
                here = OfStage(timing, of_mean, self._rooflines(role, local, where))
                known[local, moved] = AtStage(here, local, moved)
        return tuple(known[pair] for pair in zip(locals, trained, strict=True))

    def _rooflines(self, role: str, local: Sizes, where: _Circumstances) -> Timing:
        """The times by the devices' figures alone."""
        analytic = self._analytic(role, local, where.strategy.tp, where.crossings.tp, where.classes)
        return analytic[0] if len(analytic) == 1 else Slowest(analytic, analytic)

    def _gathering(self, role: str, s: ParallelStrategy) -> Gathering:
        """What a device gathers of the role's sharded weights."""
        model, one = self.models[role], ParallelStrategy(tp=s.tp)
        return gathering(Layout(model.shape, model.head, Placement(tuple(range(s.tp)), one), model.lora))

    def moved_shares(self, role: str, s: ParallelStrategy) -> int:
        """Number of dp ranks over which what a role moves is cut: adapters are whole, whatever is below them."""
        return s.weight_shares if self.models[role].lora is None else 1

    def _streams_s(self, role: str, where: _Circumstances) -> float:
        """Seconds in which the optimizer's state passes to the fullest device and back, once."""
        most = max(parameters_by_stage(self._trained_by_stage(role, where.strategy)))
        return self.classes.host_copy_s(2 * OPTIMIZER_BYTES * most / where.strategy.copies, where.classes)

    def classes_of(self, placement: Placement) -> tuple[int, ...]:
        """Numbers of the device classes of a placement's devices, ascending."""
        if len(self.classes.profiles) == 1:
            return (0,)
        return self.classes.within(min(placement.devices), len(placement.devices))

    def routes_alike(self, role: str, placement: Placement) -> bool:
        """Whether the ranks of a tp group certainly give a token to the same experts: each of them asks a router of
        its own, and devices of unlike classes round unlike."""
        s = placement.strategy
        if not self.models[role].shape.experts or len(self.classes.profiles) == 1 or s.tp == 1:
            return True
        of_host, host = self.classes.of_host, self.cluster.host
        return all(
            len({of_host[host(device)] for device in placement.devices[first : first + s.tp]}) == 1
            for first in range(0, s.size, s.tp)
        )

    def parameter_bytes(self, role: str, placement: Placement) -> tuple[int, ...]:
        """[stages] bytes of a role's parameters on a device of each stage; of one with adapters, bytes of these. Of
        sharded ones, the device's share."""
        s = placement.strategy
        counts, shares = parameters_by_stage(self._trained_by_stage(role, s)), self.moved_shares(role, s)
        return tuple(-(-count // shares) * self.workload.itemsize for count in counts)

    def _by_stage(self, role: str, s: ParallelStrategy, per_parameter: float) -> tuple[float, ...]:
        """[stages] bytes on a device of each stage of what takes so many per parameter that moves and trains."""
        parameters = parameters_by_stage(self._trained_by_stage(role, s))
        return tuple(count * per_parameter for count in parameters)

    def layer_bytes(self, role: str, s: ParallelStrategy) -> float:
        """Bytes of a layer of what a role moves on a device, with a layer's part of embedding and head
        (planner/pricing/resharding.py, HeldModel)."""
        trained = self._trained_sizes(role, ParallelStrategy(tp=s.tp))
        whole = trained.stage_parameters(1, 0) * self.workload.itemsize / trained.layers
        return whole / self.moved_shares(role, s)

    def frozen_bytes(self, role: str, placement: Placement) -> tuple[int, ...]:
        """[stages] bytes of the frozen weights below a role's adapters; 0 for a role without adapters."""
        s = placement.strategy
        model = self.models[role]
        if model.lora is None:
            return (0,) * s.pp
        counts = parameters_by_stage(stage_sizes(model.shape, model.head, s.tp, s.pp))
        return tuple(-(-count // s.weight_shares) * self.workload.itemsize for count in counts)

    def frozen_weights(self, role: str, changes: bool) -> Hashable:
        """The key of a role's frozen weights: roles with equal keys share them where placements are equal.

        changes  whether the role's parameters change during a run, or its adapters where it has some
        """
        model = self.models[role]
        shares = model.weights and not (changes and model.lora is None)
        return (model.weights, model.shape, model.head) if shares else role

    def training_bytes(
        self, role: str, placement: Placement, offload: bool = False, away: bool = False
    ) -> tuple[float, ...]:
        """[stages] bytes of trained parameters, gradients and optimizer on a training device of each stage.

        offload  the optimizer's state is in host memory, and two chunks of it are on the device
        away     so are the parameters

        Gradients and optimizer are shared out over the copies of the parameters, those of dp and cp ranks. With more
        than one come the gradients that are not shared out yet.
        """
        s = placement.strategy
        copies = s.copies
        stages = self._trained_by_stage(role, s)

        def held(stage: int, count: int) -> float:
            state = 2 * min(CHUNK, count / copies) if offload else count / copies
            parameter = 0 if away else self.workload.itemsize / self.moved_shares(role, s)
            size_bytes = count * (parameter + GRADIENT_BYTES / copies) + OPTIMIZER_BYTES * state
            return size_bytes + (GRADIENT_BYTES * unreduced(stages[stage], s.pp, stage) if copies > 1 else 0)

        return tuple(held(stage, count) for stage, count in enumerate(parameters_by_stage(stages)))

    def following_bytes(self, role: str, placement: Placement) -> tuple[float, ...]:
        """[stages] bytes of the parameters and master weights of a role that follows another, on a device of each
        stage."""
        s = placement.strategy
        weight = self.workload.itemsize / self.moved_shares(role, s)
        return self._by_stage(role, s, weight + MASTER_BYTES / s.copies)

    def state_bytes(self, role: str, placement: Placement, trained: bool) -> tuple[float, ...]:
        """[stages] bytes of the state that a device of each stage has of a role whose weights change: master weights,
        and where it is trained both moments, cut over dp and cp."""
        s = placement.strategy
        return self._by_stage(role, s, (OPTIMIZER_BYTES if trained else MASTER_BYTES) / s.copies)

    def evaluation(self, role: str, placement: Placement) -> CallCost:
        """One evaluation of a role on a placement, batch by batch: generation and the rewards of the answers, and a
        forward pass over the rows with their completions.

        The workload must have one. Figures of earlier runs do not correct its price: they correct only calls.
        """
        asked = self.workload.evaluation
        assert asked is not None, "the workload has no evaluation"
        s = placement.strategy
        # Sharded weights are gathered once, and stay whole: a generation reads all of them for each token.
        whole = replace(placement, strategy=replace(s, shard="gradients"))
        where, key = self._where(whole), (role, self._where(placement))
        if key not in self._evaluations:

            def mesh(prompt_tokens: int, new_tokens: int) -> OnMesh:
                lengths = {"prompt_tokens": prompt_tokens, "new_tokens": Lengths.fixed(new_tokens)}
                others = {"longest_prompt": None, "max_new_tokens": new_tokens, "counted_tokens": None}
                return self._mesh(role, where, self.workload.model_copy(update=lengths | others))

            at_once = min(asked.rows_at_once, asked.rows)
            parts, once_s = [CallCost(0.0, (0.0,) * s.pp)], 0.0
            if asked.answers:
                call = _evaluates(role, "generate", at_once * asked.answers)
                on = mesh(asked.prompt_tokens, asked.new_tokens)
                generated, rewards_s = self._generated(on, call, 1), on.share(call) * on.workload.reward_s
                parts.append(CallCost(generated.seconds + rewards_s, generated.active_bytes))
                once_s = self._handover_s(role)
            if asked.completion_tokens:
                on = mesh(max(1, asked.completion_tokens - 1), 1)
                call = _evaluates(role, "inference", at_once)
                parts.append(infer(on, call, min(s.pp, on.share(call))))
            seconds = once_s + -(-asked.rows // at_once) * sum(part.seconds for part in parts)
            active = [max(of_stage) for of_stage in zip(*(part.active_bytes for part in parts), strict=True)]
            if s.weight_shares > 1:
                on = self._mesh(role, self._where(placement), self.workload)
                seconds += on.gather_s()
                active = [size + self._gathering(role, s).total * self.workload.itemsize for size in active]
            self._evaluations[key] = CallCost(seconds, tuple(active))
        return self._evaluations[key]

    def onload_s(self, role: str, placement: Placement) -> float:
        """Seconds to copy a role's parameters from host memory or back: those of the fullest device, as the others
        wait."""
        held = max(self.parameter_bytes(role, placement))
        return self.classes.host_copy_s(held, self.classes_of(placement))

    def _sizes(self, role: str, strategy: ParallelStrategy) -> Sizes:
        model = self.models[role]
        if strategy.pp > model.shape.layers:
            raise ValueError(f"pp={strategy.pp} exceeds the model's {model.shape.layers} layers.")
        check_context_parallel(model.shape, strategy)
        return sizes(model.shape, model.head, strategy.tp)

    def _trained_sizes(self, role: str, strategy: ParallelStrategy) -> Sizes:
        """Sizes of what moves and trains: of the adapters, where the role has some, else of the model."""
        local, model = self._sizes(role, strategy), self.models[role]
        return local if model.lora is None else sizes(model.shape, model.head, strategy.tp, model.lora)

    def _trained_by_stage(self, role: str, s: ParallelStrategy) -> tuple[Sizes, ...]:
        """[stages] the same for each stage."""
        self._sizes(role, s)  # refuses too many stages
        model = self.models[role]
        return stage_sizes(model.shape, model.head, s.tp, s.pp, model.lora)

    def _analytic(
        self, role: str, local: Sizes, tp: int, crosses: bool, classes: tuple[int, ...]
    ) -> list[Roofline]:
        """[classes] rooflines of a role's devices."""
        head, itemsize = self.models[role].head, self.workload.itemsize
        return [
            Roofline(self._inside_calls[number], local, head, tp, crosses, itemsize) for number in classes
        ]

    def _timing(self, role: str, tp: int, crosses: bool, classes: tuple[int, ...]) -> Timing:
        """The times for a role under tp: from measured profiles where there are some, else from rooflines.

        Groups that mix device classes are never measured; their collectives are priced by the devices' links.
        """
        model = self.models[role]
        analytic = self._analytic(role, sizes(model.shape, model.head, tp), tp, crosses, classes)
        profiles = [self.measured[number].get(model.shape) for number in classes]
        timings: list[Timing] = [
            roofline
            if profile is None or tp not in profile.tp_degrees
            else ProfileTables(profile, model.head, tp, crosses)
            for roofline, profile in zip(analytic, profiles, strict=True)
        ]
        return timings[0] if len(timings) == 1 else Slowest(timings, analytic)

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
            spans(placement.dp_group(placement.devices[0])),
            spans(at(0, 0, rank) for rank in range(s.pp)),
            spans(at(0, 0, 0, rank) for rank in range(s.cp)),
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
