"""The engines that one rank holds: its roles on their placements, residents and copies."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.configurations import RunConfig
from prefect_rlhf.rlhf_tasks.config.models import JUDGE, OptimizerConfig, Role
from prefect_rlhf.rlhf_tasks.config.sampling import Samples
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import HostCopy, copier
from prefect_rlhf.rlhf_tasks.parallel.comm.reallocation import Reallocated, reallocate, union_set
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.parallel.model.context_parallel import ContextRanks
from prefect_rlhf.rlhf_tasks.parallel.model.shares import Shares
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import initialise, load, load_config
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import OptimizerSettings
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, ReallocateNode, SyncNode
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach
from prefect_rlhf.rlhf_tasks.system.invariants import require


class _Drawn(TypedDict):
    """What an engine knows of the tokens that may be drawn."""

    tokens: int | None
    counts_drawn: bool


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class RoleEngines:
    """(role, placement) -> Engine, for the placements that this rank is in.

    A trained role is resident on its training placement; a frozen one on all its placements, except where the plan
    has an onload: there `onload` brings its weights and `offload` frees them. Of a trained role that is offloaded,
    host memory keeps the optimizer's state all the time. `reallocate` makes a copy of a trained role and `release`
    frees it; the engine of a released copy is kept without weights. `sync` blends a trained role's weights into those
    of a role that follows it, on the first placement of that role.

    With adapters, the frozen weights below them are resident wherever the role is used, and only the adapters are
    copied and released. Roles that begin from one folder share such weights where they are on one placement, so a
    reference is the actor without its adapters.

    moved   counts the bytes of the weights that are read or drawn
    tokens  of the run's tokenizer; the judge has its own: a model's further ones are never drawn. A run that
            learns from what it draws does not count them in log-probabilities either
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        config: RunConfig,
        groups: ProcessGroups,
        moved: ByteCount | None = None,
        tokens: int | None = None,
    ) -> None:
        self._tokens, self._counts_drawn = tokens, isinstance(config, Samples)
        self._bytes_filled = moved
        self._plan = plan
        self._groups = groups
        self._roles = config.roles()
        require(
            config.dtype in DTYPES,
            f"the run's dtype is {config.dtype}: it must be decided before a run begins",
        )
        self._dtype = DTYPES[config.dtype]
        self._seed = config.seed
        self._config = config
        self._recompute: Recompute = (
            config.gradient_checkpointing if isinstance(config, TrainingConfig) else "none"
        )
        self._most_tokens = config.micro_batch_tokens if isinstance(config, TrainingConfig) else None
        self._frozen: dict[tuple[Role, Placement], dict[str, Tensor]] = {}
        self._shares: dict[tuple[Role, Placement], Shares] = {}
        self._engines: dict[tuple[str, Placement], Engine] = {}
        self._absent: set[tuple[str, Placement]] = set()
        self._copier = copier(groups.device)
        self._host_copies: dict[tuple[str, Placement], HostCopy] = {}
        onloaded = plan.onloaded
        for role, parts in self._roles.items():
            planned = plan.roles[role]
            for number, placement in enumerate(planned.placements):
                if groups.rank not in placement.devices:
                    continue
                copy = planned.trained and number > 0
                layout, comes_and_goes = self._layout(role, placement), (role, placement) in onloaded
                away = comes_and_goes and not planned.trained
                if copy and layout.lora is None:
                    continue  # its weights come with its first reallocation
                blended = bool(planned.follows) and number == 0
                stage = self._filled(parts, layout, away, changes=planned.trained or blended)
                settings = optimizer_settings(parts.optimizer) if parts.optimizer and not copy else None
                self._engines[role, placement] = Engine(
                    stage,
                    layout,
                    self._view(role, placement),
                    settings,
                    blended=blended,
                    micro_batch_tokens=self._most_tokens,
                    copies=self._copier if planned.trained and placement in planned.offloaded else None,
                    **self._drawn(role),
                )
                if copy:
                    self._drop(role, placement)
                if comes_and_goes:
                    self._host_copies[role, placement] = self._away(role, self._engines[role, placement])

    def get(self, role: str, placement: Placement) -> Engine:
        """The engine of a role on a placement, whose weights must be there. Waits for a copy that is in progress."""
        key = (role, placement)
        require(key in self._engines, f"role {role!r} has never been on {placement}")
        require(key not in self._absent, f"the copy of role {role!r} on {placement} was released")
        if key in self._host_copies:
            away = self._host_copies[key].is_away
            require(not away, f"role {role!r} on {placement} is offloaded: onload it first")
            self._host_copies[key].wait()
        return self._engines[key]

    @contextmanager
    def at_hand(self, role: str, placement: Placement) -> Iterator[Engine | None]:
        """The engine of a role on a placement, whose weights are on this rank's device meanwhile, also where they are
        offloaded. None where this rank has none."""
        held = self._host_copies.get((role, placement))
        fetched = held if held is not None and held.is_away else None
        if fetched is not None:
            fetched.onload()
        yield self.get(role, placement) if self._groups.rank in placement.devices else None
        if fetched is not None:
            fetched.offload()

    def changing(self) -> Iterator[tuple[str, Engine]]:
        """The roles whose weights change that this rank owns a part of."""
        for (role, _), engine in self._engines.items():
            if engine.master is not None:
                yield role, engine

    def versions(self) -> dict[str, int]:
        """Role -> version, for the roles whose weights change that this rank owns a part of."""
        return {role: engine.version for role, engine in self.changing()}

    def reallocate(self, node: ReallocateNode, version: int) -> Reallocated:
        """Make a node's copy; the source must have `version`. Collective over both placements."""
        moved = self._moved(node, node.role, version)
        if moved.slices is not None:
            self._install(node.role, node.destination, moved)
            reach(Point.REALLOCATED)
        return moved

    def sync(self, node: SyncNode, version: int, share: float | None) -> Reallocated | None:
        """Count a new version of a role that follows another, and blend the other's weights into its own.

        version  that the other role must have
        share    of the other role's weights; None: nothing moves, and the weights stay
        Collective over both placements.
        """
        moved = None if share is None else self._moved(node, node.leader, version)
        engine = self._engines.get((node.role, node.destination))
        if engine is not None:
            assert engine.master is not None, f"{node.name}: role {node.role!r} is frozen here"
            if share is not None and moved is not None and moved.slices is not None:
                engine.master.blend(moved.slices, share)
            engine.version += 1
        return moved

    def _moved(self, node: ReallocateNode | SyncNode, role: str, version: int) -> Reallocated:
        """A trained role's weights on a node's destination; the source must have `version`."""
        source, destination = self._layout(role, node.source), self._layout(role, node.destination)
        owner = self.get(role, node.source) if (role, node.source) in self._engines else None
        if owner is not None:
            held = owner.version
            require(held == version, f"{node.name}: the source has version {held}, the plan says {version}")
        moved = reallocate(
            source,
            destination,
            owner.stage.held_weights() if owner is not None else None,
            self._dtype,
            self._groups.view(node.name, [union_set(node.source, node.destination)]),
            self._plan.devices_per_host,
            version=owner.version if owner is not None else version,
            state=owner.state if owner is not None else None,
        )
        came = moved.version
        require(came == version, f"{node.name}: version {came} was received, the plan says {version}")
        return moved

    def release(self, role: str, placement: Placement) -> None:
        """Free the weights of a copy on this rank."""
        engine = self.get(role, placement)
        require(engine.optimizer is None, f"role {role!r} on {placement} is trained: it is not a copy")
        self._drop(role, placement)

    def onload(self, role: str, placement: Placement) -> None:
        """Start copying an offloaded role's weights to this rank's device."""
        self._host_copies[role, placement].onload()
        reach(Point.ONLOAD)

    def offload(self, role: str, placement: Placement) -> None:
        """Free an offloaded role's weights on this rank's device. Those that train are in host memory before."""
        self._host_copies[role, placement].offload()
        reach(Point.OFFLOAD)

    def close(self) -> None:
        """End the copies between host and device."""
        self._copier.close()

    def _away(self, role: str, engine: Engine) -> HostCopy:
        """The weights of an engine, in host memory from now on."""
        what = f"onload of {role!r} on rank {self._groups.rank}"
        if (master := engine.master) is not None:
            return HostCopy(
                [master.weights],
                lambda tensors: master.use(*tensors),
                self._copier,
                changes=True,
                what=what,
                named=engine.stage.held_weights,
            )
        if (shares := engine.stage.shares) is not None:
            return HostCopy(
                [shares.flat],
                lambda tensors: setattr(shares, "flat", *tensors),
                self._copier,
                what=what,
                named=shares.ranges,
            )
        return HostCopy.of_module(engine.stage, self._copier, what)

    def _install(self, role: str, placement: Placement, moved: Reallocated) -> None:
        key = (role, placement)
        assert moved.slices is not None
        if key not in self._engines:
            layout = self._layout(role, placement)
            stage = self._stage(self._roles[role], layout)
            groups = self._view(role, placement)
            self._engines[key] = Engine(
                stage, layout, groups, micro_batch_tokens=self._most_tokens, **self._drawn(role)
            )
        engine = self._engines[key]
        engine.stage.hold_weights(moved.slices)
        engine.version, engine.state = moved.version, moved.state
        self._absent.discard(key)

    def _drop(self, role: str, placement: Placement) -> None:
        self._engines[role, placement].stage.hold_weights(None)
        self._absent.add((role, placement))

    def _view(self, role: str, placement: Placement) -> ProcessGroups:
        """The groups of a placement, for the calls that run a role there."""
        calls = [
            name
            for name, nodes in self._plan.calls.items()
            if (nodes[0].call.role, nodes[0].placement) == (role, placement)
        ]
        return self._groups.view(f"call {' or '.join(calls) or role}", device_sets(placement))

    def _drawn(self, role: str) -> _Drawn:
        has_tokenizer = role == JUDGE and self._tokens is not None
        tokens = Tokenizer.from_folder(self._roles[role].folder).size if has_tokenizer else self._tokens
        return {"tokens": tokens, "counts_drawn": self._counts_drawn}

    def _layout(self, role: str, placement: Placement) -> Layout:
        parts = self._roles[role]
        shape = read_shape(parts.folder)
        return Layout(shape, parts.head, placement, self._config.adapters_of(role, shape))

    def _filled(self, parts: Role, layout: Layout, away: bool, changes: bool) -> Stage:
        """A stage with its weights. Those that stay frozen are shared by all roles that begin from the same ones.

        away     its weights come and go, so they are its own
        changes  all its weights change, or its adapters where it has some
        """
        key = (parts._replace(optimizer=None), layout.placement)
        trained = layout.specs if changes else {}
        if layout.placement.strategy.weight_shares > 1:
            alone = away or not layout.whole.specs.keys() - trained.keys()
            stage = self._stage(parts, layout, shares=None if alone else self._shares.get(key))
            assert stage.shares is not None
            fill(stage, parts, self._seed, stage.shares.filled, self._bytes_filled)
            if not alone:
                self._shares[key] = stage.shares
            return stage
        frozen = self._frozen.setdefault(key, {})
        shared = {} if away else {name: given for name, given in frozen.items() if name not in trained}
        stage = self._stage(parts, layout, shared)
        fill(stage, parts, self._seed, shared, self._bytes_filled)
        if not away:
            frozen |= {name: mine for name, mine in stage.named_slices().items() if name not in trained}
        return stage

    def _stage(
        self,
        parts: Role,
        layout: Layout,
        shared: Mapping[str, Tensor] | None = None,
        shares: Shares | None = None,
    ) -> Stage:
        rank, placement = self._groups.rank, layout.placement
        if shares is None and placement.strategy.weight_shares > 1:
            shares = Shares(layout.whole, self._groups, self._dtype)
        return Stage(
            load_config(parts.folder),
            layout,
            placement.coordinate(rank),
            self._groups[placement.tp_group(rank)],
            device=self._groups.device,
            dtype=self._dtype,
            recompute=self._recompute,
            shared=shared,
            context=ContextRanks.of(layout, self._groups),
            shares=shares,
        )


def optimizer_settings(config: OptimizerConfig) -> OptimizerSettings:
    """The engine's optimizer settings from a configuration's."""
    return OptimizerSettings(
        betas=config.adam_betas,
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def fill(stage: Stage, parts: Role, seed: int, shared: Collection[str], moved: ByteCount | None) -> None:
    """Give a resident its weights, except for those that are shared and there.

    Raises ValueError when a frozen role's head would be random.
    """
    if parts.random_init:
        initialise(stage, seed, moved)
        return
    missing = load(stage, parts.folder, seed, shared, moved)
    if missing and parts.optimizer is None:
        raise ValueError(
            f"Model folder {parts.folder!r} has no {missing[0]}: it holds a language model, whose scores would "
            "be random. Name a reward model, such as one that `prefect-rlhf run reward_model` has made."
        )
