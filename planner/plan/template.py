"""Which nodes a plan has and what they wait for, before anyone knows the devices.

That depends on two equalities alone: which calls have their samples on the same ranks, and which have the same
placement. So a plan and a plan search share this one rule: a plan gives real placements as labels, the
search numbers.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from planner.plan.graph import DataflowGraph

FETCH = "fetch"

SlotKind = Literal["fetch", "call", "transfer", "reallocate", "release", "onload", "offload", "save"]


class Slot(NamedTuple):
    """A node without its devices.

    call    whom it serves: itself, the source call of a fetch, the consumer of a transfer, the first reader of
            a copy or of offloaded parameters, the train_step that a save follows
    source  a transfer: the call on whose side the keys lie, or FETCH; a reallocation or release: the role's
            train_step; else `call`
    keys    what a fetch or transfer brings
    """

    name: str
    kind: SlotKind
    call: str
    source: str
    keys: tuple[str, ...] = ()


@dataclass
class Skeleton:
    """Slots by name, and their edges.

    after, across  slot -> what must have finished in the same iteration, in the one before
    """

    slots: dict[str, Slot] = field(default_factory=dict)
    after: dict[str, set[str]] = field(default_factory=dict)
    across: dict[str, set[str]] = field(default_factory=dict)

    def add(self, slot: Slot, after: set[str] | None = None) -> None:
        assert slot.name not in self.slots, f"two plan nodes are named {slot.name!r}"
        self.slots[slot.name] = slot
        self.after[slot.name] = set(after or ())
        self.across[slot.name] = set()

    @property
    def moving(self) -> list[str]:
        """The slots that an order is chosen for: all but releases, offloads and saves, which directly follow
        others."""
        return [name for name, slot in self.slots.items() if slot.kind not in ("release", "offload", "save")]


def skeleton(
    graph: DataflowGraph,
    where: Mapping[str, Hashable],
    placement: Mapping[str, Hashable],
    dealt_by: Mapping[str, str] | None = None,
    offloaded: Collection[str] = (),
) -> Skeleton:
    """The slots of one iteration with their data and version edges. None is there where nothing moves.

    where      call or FETCH -> label; equal labels: every sample lies on the same rank for both
    placement  call -> label; equal labels: the same devices under the same strategy
    dealt_by   call whose samples are dealt by tokens -> the key whose lengths deal them
    offloaded  calls whose frozen role is offloaded on their placement; of one placement all or none
    """
    made = Skeleton()
    source = graph.source.name
    made.add(Slot(FETCH, "fetch", source, source, graph.dataset_keys))
    for call in graph.calls:
        made.add(Slot(call.name, "call", call.name, call.name))
    _add_copies(made, graph, placement)
    _add_onloads(made, graph, placement, offloaded)
    _add_transfers(made, graph, where, dealt_by or {})
    _add_saves(made, graph)
    return made


def _add_copies(made: Skeleton, graph: DataflowGraph, placement: Mapping[str, Hashable]) -> None:
    """Version edges of every trained role, and a reallocation and release around the readers of each copy."""
    for role in graph.roles:
        trainer = graph.trainer(role)
        if trainer is None:
            continue
        readers: dict[tuple[Hashable, bool], list[str]] = {}
        for call in graph.calls:
            if call.role == role and call.name != trainer.name:
                readers.setdefault((placement[call.name], graph.reads_updated(call)), []).append(call.name)
        for (place, updated), names in readers.items():
            if place == placement[trainer.name]:
                _order_readers(made, trainer.name, names, updated)
                continue
            reallocate = f"reallocate_{role}_to_{names[0]}"
            made.add(Slot(reallocate, "reallocate", names[0], trainer.name))
            _order_readers(made, trainer.name, [reallocate], updated)
            for name in names:
                made.after[name].add(reallocate)
            release = Slot(f"release_{role}_of_{names[0]}", "release", names[0], trainer.name)
            made.add(release, after=set(names))


def _order_readers(made: Skeleton, trainer: str, readers: list[str], updated: bool) -> None:
    """Readers of the training placement's parameters come between one train_step and the next."""
    for reader in readers:
        if updated:
            made.after[reader].add(trainer)
        else:
            made.across[reader].add(trainer)
            made.after[trainer].add(reader)


def _add_onloads(
    made: Skeleton, graph: DataflowGraph, placement: Mapping[str, Hashable], offloaded: Collection[str]
) -> None:
    """An onload and an offload around the readers of every offloaded role on a placement."""
    readers: dict[tuple[str, Hashable], list[str]] = {}
    for call in graph.calls:
        if call.name in offloaded:
            readers.setdefault((call.role, placement[call.name]), []).append(call.name)
    for (role, _), names in readers.items():
        onload = f"onload_{role}_to_{names[0]}"
        made.add(Slot(onload, "onload", names[0], names[0]))
        for name in names:
            made.after[name].add(onload)
        made.add(Slot(f"offload_{role}_of_{names[0]}", "offload", names[0], names[0]), after=set(names))


def _add_saves(made: Skeleton, graph: DataflowGraph) -> None:
    for role in graph.roles:
        trainer = graph.trainer(role)
        if trainer is not None:
            made.add(Slot(f"save_{role}", "save", trainer.name, trainer.name), after={trainer.name})
            made.across[trainer.name].add(f"save_{role}")


class _Holding(NamedTuple):
    """A key on one side: the call (or FETCH) whose side it is, and the node that brought it there."""

    call: str
    node: str


class _Keys:
    """Which keys lie where, while the calls are walked in data order."""

    def __init__(self, graph: DataflowGraph, where: Mapping[str, Hashable]) -> None:
        self._graph, self.where = graph, where
        self.held: dict[str, dict[Hashable, _Holding]] = {}
        for key in graph.dataset_keys:
            self.put(key, FETCH, FETCH)

    def put(self, key: str, call: str, node: str) -> None:
        """`node` has brought `key` to the side of `call`."""
        self.held.setdefault(key, {})[self.where[call]] = _Holding(call, node)

    def home(self, key: str) -> Hashable:
        """The side where a key came into being."""
        return self.where[self._graph.producer(key) or FETCH]

    def sources(self, missing: list[str]) -> dict[Hashable, list[str]]:
        """Source side -> keys to take from it.

        A key comes from its home; from another side only if the consumer must use that side anyway, for a key
        that a call made there after reading this one. So no transfer makes a call wait for another call than
        those whose outputs it uses, and there are few of them.
        """
        chosen: dict[Hashable, list[str]] = {}
        movable = []
        for key in missing:
            if len(self.held[key]) == 1:
                chosen.setdefault(self.home(key), []).append(key)
            else:
                movable.append(key)
        for key in movable:
            source = self.home(key)
            if source not in chosen:
                source = next((side for side in chosen if self._read_there(key, side, chosen[side])), source)
            chosen.setdefault(source, []).append(key)
        return {source: sorted(keys, key=missing.index) for source, keys in chosen.items()}

    def _read_there(self, key: str, side: Hashable, made_there: list[str]) -> bool:
        if side not in self.held[key]:
            return False
        producers = [name for name in map(self._graph.producer, made_there) if name is not None]
        return any(key in self._graph.call(name).inputs for name in producers)


def _add_transfers(
    made: Skeleton, graph: DataflowGraph, where: Mapping[str, Hashable], dealt_by: Mapping[str, str]
) -> None:
    """Walk the calls in data order and bring each its missing keys, one transfer per source."""
    keys = _Keys(graph, where)
    for call in graph.calls:
        here, dealing = where[call.name], dealt_by.get(call.name)
        missing = [key for key in call.inputs if here not in keys.held[key]]
        made.after[call.name] |= {keys.held[key][here].node for key in call.inputs if key not in missing}
        # The key whose lengths deal this call's samples comes first: the other transfers ask for them.
        sources = sorted(keys.sources(missing).items(), key=lambda item: dealing not in item[1])
        for source, moved in sources:
            native = next(key for key in moved if keys.home(key) == source)
            name = f"transfer_{graph.producer(native) or FETCH}_to_{call.name}"
            slot = Slot(name, "transfer", call.name, keys.held[native][source].call, tuple(moved))
            made.add(slot, after={keys.held[key][source].node for key in moved})
            if dealing is not None and dealing not in moved:
                made.after[name].add(keys.held[dealing][here].node)
            made.after[call.name].add(name)
            for key in moved:
                keys.put(key, call.name, name)
        for key in call.outputs:
            keys.put(key, call.name, call.name)
