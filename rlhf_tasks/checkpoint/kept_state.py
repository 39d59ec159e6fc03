"""State kept across generations: when the plan changes, trained roles move by messages instead of files.

A rank that is reset for a change of plan keeps the state of its engines. If every rank still has its part of the
commit that the next generation starts from, the ranks exchange the state. Otherwise all read the commit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from rlhf_tasks.checkpoint.commits import step_folder
from rlhf_tasks.checkpoint.manifest import read_manifest
from rlhf_tasks.checkpoint.snapshots import ChangingRole, counted, stored_role, take_state
from rlhf_tasks.parallel.comm.groups import ProcessGroups, all_reduce
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.state.exchange import exchange_state
from rlhf_tasks.parallel.state.transfer import StateTransfer
from rlhf_tasks.parallel.train.optimizer import StateShard
from rlhf_tasks.parallel.train.state_layout import StateLayout
from rlhf_tasks.protocol.messages import GenerationSpec
from rlhf_tasks.system.byte_count import ByteCount
from rlhf_tasks.system.invariants import InvariantError, require


class KeptState(NamedTuple):
    """The state of one rank's engines at a commit: trained role -> this rank's shards, in host memory."""

    run: str
    attempt: int
    step: int
    shards: dict[str, list[StateShard]]


def host_shards(engines: Mapping[str, ChangingRole]) -> dict[str, list[StateShard]]:
    """The state of trained roles in host memory. On a CPU it is not copied: do not use the engines any more."""
    found: dict[str, list[StateShard]] = {}
    for role, engine in engines.items():
        assert engine.master is not None, f"role {role!r} does not change here"
        found[role] = [
            shard._replace(tensor=shard.tensor.detach().cpu()) for shard in engine.master.shard_state()
        ]
    return found


class KeptCommit:
    """The commit that a generation starts from, from the state that its ranks may have kept.

    kept    this rank's state; None when it has none
    groups  of the generation; must have a group of all ranks
    moved   counts the bytes that arrive
    Building it and `take_over` are collective over all ranks.
    """

    def __init__(
        self,
        kept: KeptState | None,
        spec: GenerationSpec,
        groups: ProcessGroups,
        moved: ByteCount | None = None,
    ) -> None:
        self._moved = moved or ByteCount()
        if spec.restore_step is None:
            raise InvariantError("the generation begins at no commit, so no rank can have kept one")
        self._folder = step_folder(Path(spec.run_folder), spec.restore_step)
        self._manifest = read_manifest(self._folder)
        self._groups, self._ranks = groups, range(spec.n_ranks)
        here = kept is not None and kept[:3] == (spec.run, spec.attempt, spec.restore_step)
        self._shards = kept.shards if kept is not None and here else {}
        self.is_whole = self._ask_all()

    def _ask_all(self) -> bool:
        """Whether every device that has written a part of the commit is a rank that still has this part."""
        owners = {role: set(record.placement.devices) for role, record in self._manifest.roles.items()}
        owned = {role for role, devices in owners.items() if self._groups.rank in devices}
        here = all(devices <= set(self._ranks) for devices in owners.values())
        has = torch.tensor(int(here and owned <= self._shards.keys()))
        return bool(all_reduce(has, self._groups[self._ranks], dist.ReduceOp.MIN))

    def take_over(self, role: str, layout: Layout, engine: ChangingRole | None) -> None:
        """Set a role to the commit: weights, moments, version and state.

        layout  the role's new training layout
        engine  this rank's engine; None on a rank outside that layout's placement
        Raises the same errors as `snapshots.restore`.
        """
        require(self.is_whole, "some rank lacks its part: read the commit")
        record = stored_role(role, layout, self._manifest, self._folder)
        wanted = [] if engine is None or engine.master is None else list(engine.master.shard_state())
        transfer = StateTransfer(StateLayout(record.layout), StateLayout(layout))
        kept = self._shards.get(role, [])
        shards = counted(exchange_state(transfer, kept, wanted, self._groups, self._ranks), self._moved)
        if engine is not None:
            take_state(engine, shards, record)
        else:
            for shard in shards:
                raise AssertionError(f"{shard.name} of role {role!r} arrived, which does not change here")
