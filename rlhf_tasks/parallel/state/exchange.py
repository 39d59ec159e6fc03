"""Moves a role's state, master weights and where it trains both moments, from one layout to another by messages."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from torch import Tensor

from rlhf_tasks.parallel.comm.groups import ProcessGroups
from rlhf_tasks.parallel.comm.messages import Blank, exchange
from rlhf_tasks.parallel.state.transfer import StatePart, StateTransfer, assemble
from rlhf_tasks.parallel.train.optimizer import StateKind, StateShard
from rlhf_tasks.parallel.train.state_layout import StateLayout


def exchange_state(
    transfer: StateTransfer,
    kept: Iterable[StateShard],
    wanted: Iterable[StateShard],
    groups: ProcessGroups,
    devices: Sequence[int],
) -> Iterator[StateShard]:
    """Send and receive one role's state, bit by bit. Collective over both placements.

    kept     this rank's state in the old layout, on any device; none on a rank outside it
    wanted   the shards that this rank receives; their contents are neither read nor changed
    devices  all devices of both placements; they must have a group
    Yields the wanted shards one by one as they arrive. Every rank must exhaust the iterator, also one that wants no
    shards. Raises ValueError when elements are missing.
    """
    held = {(shard.name, shard.kind): shard for shard in kept}
    asked = {(shard.name, shard.kind): shard for shard in wanted}
    if not held and not asked:
        return
    here = {kind for _, kind in (*held, *asked)}
    kinds: list[StateKind] = [kind for kind in get_args(StateKind) if kind in here]
    rank, group = groups.rank, groups[devices]
    for name in transfer.new.layout.specs:
        parts = list(transfer.parts(name, rank))
        gives = [part for part in parts if part.source == rank]
        takes = [part for part in parts if part.destination == rank]
        for kind in kinds if parts else ():
            outgoing = _outgoing(transfer.old, gives, held.get((name, kind)), groups)
            ours = {rank: outgoing.pop(rank, [])}
            shard = asked.get((name, kind))
            arrived = exchange(outgoing, _incoming(takes, shard, rank), group, groups.device) | ours
            if shard is not None:
                tensors = {source: iter(given) for source, given in arrived.items()}
                parts_of = ((part, next(tensors[source])) for source, _, part in takes)
                yield assemble(transfer.new, rank, shard, parts_of, "what the ranks have kept")


def _outgoing(
    old: StateLayout, gives: Iterable[StatePart], held: StateShard | None, groups: ProcessGroups
) -> dict[int, list[Tensor]]:
    """The rectangles that this rank sends: device (may be itself) -> tensors [rows, columns]."""
    tensors: dict[int, list[Tensor]] = defaultdict(list)
    for _, destination, part in gives:
        assert held is not None
        view = old.columns(held.name, groups.rank).view(held.tensor, held.start, part)
        tensors[destination].append(view.to(groups.device))
    return tensors


def _incoming(takes: Iterable[StatePart], asked: StateShard | None, rank: int) -> dict[int, list[Blank]]:
    """The tensors that arrive from other ranks: device -> their dtypes and shapes."""
    blanks: dict[int, list[Blank]] = defaultdict(list)
    for source, _, part in takes:
        assert asked is not None
        if source != rank:
            blanks[source].append(Blank(asked.tensor.dtype, part.shape))
    return blanks
