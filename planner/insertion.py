"""The nodes that make an assignment legal: fetch, transfers, reallocations, releases and saves, with what
they wait for.

None is inserted where nothing moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.graph import DataflowGraph
from rlhf_tasks.parallel.topology import Placement
from rlhf_tasks.spec import (
    CallAssignment,
    CallNode,
    DataSide,
    FetchNode,
    ModelFunctionCall,
    PlanNode,
    ReallocateNode,
    ReleaseNode,
    RolePlacements,
    SaveNode,
    TransferNode,
)

FETCH = "fetch"


@dataclass
class Draft:
    """Nodes without edges, and the edges beside them.

    after, across  node -> what must have finished in the same iteration, in the one before
    follows        node -> the node that it follows directly in the total order (releases and saves)
    """

    nodes: dict[str, PlanNode] = field(default_factory=dict)
    after: dict[str, set[str]] = field(default_factory=dict)
    across: dict[str, set[str]] = field(default_factory=dict)

    def add(self, node: PlanNode, after: set[str] | None = None, across: set[str] | None = None) -> None:
        assert node.name not in self.nodes, f"two plan nodes are named {node.name!r}"
        self.nodes[node.name] = node
        self.after[node.name] = set(after or ())
        self.across[node.name] = set(across or ())


def draft(graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> Draft:
    """All nodes of one iteration with their data and version edges."""
    made = Draft()
    source = assignments[graph.source.name]
    made.add(
        FetchNode(
            name=FETCH,
            call=graph.source.name,
            placement=source.placement,
            keys=graph.dataset_keys,
            mini_batches=graph.source.mini_batches,
        )
    )
    for call in graph.calls:
        made.add(CallNode(name=call.name, call=call, assignment=assignments[call.name]))
    _insert_copies(made, graph, assignments)
    _insert_transfers(made, graph, assignments)
    _insert_saves(made, graph, assignments)
    return made


def role_placements(
    graph: DataflowGraph, assignments: Mapping[str, CallAssignment]
) -> dict[str, RolePlacements]:
    """Where each role lives: a trained one at its training placement, then wherever its copies are built."""
    found = {}
    for role in graph.roles:
        trainer = graph.trainer(role)
        calls = [call for call in graph.calls if call.role == role]
        if trainer is not None:
            calls.insert(0, trainer)
        placements = dict.fromkeys(assignments[call.name].placement for call in calls)
        found[role] = RolePlacements(trained=trainer is not None, placements=tuple(placements))
    return found


def _insert_copies(made: Draft, graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> None:
    """Version edges of every trained role, and a reallocation and release around the readers of each copy."""
    for role in graph.roles:
        trainer = graph.trainer(role)
        if trainer is None:
            continue
        home = assignments[trainer.name].placement
        readers: dict[tuple[Placement, bool], list[str]] = {}
        for call in graph.calls:
            if call.role == role and call.name != trainer.name:
                key = assignments[call.name].placement, graph.reads_updated(call)
                readers.setdefault(key, []).append(call.name)
        for (placement, updated), names in readers.items():
            if placement == home:
                _order_readers(made, trainer.name, names, updated)
                continue
            reallocate = f"reallocate_{role}_to_{names[0]}"
            made.add(ReallocateNode(name=reallocate, role=role, source=home, destination=placement))
            _order_readers(made, trainer.name, [reallocate], updated)
            for name in names:
                made.after[name].add(reallocate)
            made.add(
                ReleaseNode(name=f"release_{role}_of_{names[0]}", role=role, placement=placement),
                after=set(names),
            )


def _order_readers(made: Draft, trainer: str, readers: list[str], updated: bool) -> None:
    """Readers of the training placement's parameters come between one train_step and the next."""
    for reader in readers:
        if updated:
            made.after[reader].add(trainer)
        else:
            made.across[reader].add(trainer)
            made.after[trainer].add(reader)


def _insert_saves(made: Draft, graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> None:
    for role in graph.roles:
        trainer = graph.trainer(role)
        if trainer is not None:
            placement = assignments[trainer.name].placement
            made.add(SaveNode(name=f"save_{role}", role=role, placement=placement), after={trainer.name})
            made.across[trainer.name].add(f"save_{role}")


def data_side(call: ModelFunctionCall, assignment: CallAssignment) -> DataSide:
    """How a call wants its samples."""
    return DataSide(
        placement=assignment.placement, balance=assignment.balance, mini_batches=call.mini_batches
    )


@dataclass(frozen=True)
class _Where:
    """What decides whether two data sides hold every sample on the same rank."""

    heads: tuple[int, ...]
    dealing: tuple[str, ...]


@dataclass(frozen=True)
class _Holding:
    """A key on one side, and the node that brought it there."""

    side: DataSide
    node: str


def _where(call: ModelFunctionCall, side: DataSide) -> _Where:
    """Where a call's samples lie (docs/interfaces.md, "who gets which sample").

    With one dp rank all samples are on its head. Dealt by count, the mini-batches matter only if dp does not
    divide them. Dealt by tokens, sides are alike if their mini-batches are and one key gives the lengths.
    """
    placement, mini_batches = side.placement, side.mini_batches
    dp = placement.strategy.dp
    if dp == 1:
        return _Where(placement.heads, ())
    if side.balance == "tokens":
        return _Where(placement.heads, ("tokens", str(mini_batches), call.token_key))
    if call.n_seqs % (dp * mini_batches) == 0:
        return _Where(placement.heads, ("count",))
    return _Where(placement.heads, ("count", str(mini_batches)))


class _Keys:
    """Which keys lie where, while the calls are walked in data order."""

    def __init__(self, graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> None:
        self._graph = graph
        self.sides = {call.name: data_side(call, assignments[call.name]) for call in graph.calls}
        self.where = {call.name: _where(call, self.sides[call.name]) for call in graph.calls}
        fetched = DataSide(
            placement=assignments[graph.source.name].placement, mini_batches=graph.source.mini_batches
        )
        self._fetched = _where(graph.source, fetched)
        self.held: dict[str, dict[_Where, _Holding]] = {
            key: {self._fetched: _Holding(fetched, FETCH)} for key in graph.dataset_keys
        }

    def put(self, key: str, call: str, node: str) -> None:
        """`node` has brought `key` to the side of `call`."""
        self.held.setdefault(key, {})[self.where[call]] = _Holding(self.sides[call], node)

    def home(self, key: str) -> _Where:
        """The side where a key came into being."""
        producer = self._graph.producer(key)
        return self._fetched if producer is None else self.where[producer]

    def sources(self, missing: list[str]) -> dict[_Where, list[str]]:
        """Source side -> keys to take from it.

        A key comes from its home; from another side only if the consumer must use that side anyway, for a key
        that a call made there after reading this one. So no transfer makes a call wait for another call than
        those whose outputs it uses, and there are few of them.
        """
        chosen: dict[_Where, list[str]] = {}
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

    def _read_there(self, key: str, side: _Where, made_there: list[str]) -> bool:
        if side not in self.held[key]:
            return False
        producers = [name for name in map(self._graph.producer, made_there) if name is not None]
        return any(key in self._graph.call(name).inputs for name in producers)


def _insert_transfers(made: Draft, graph: DataflowGraph, assignments: Mapping[str, CallAssignment]) -> None:
    """Walk the calls in data order and bring each its missing keys, one transfer per source."""
    keys = _Keys(graph, assignments)
    for call in graph.calls:
        here = keys.where[call.name]
        missing = [key for key in call.inputs if here not in keys.held[key]]
        made.after[call.name] |= {keys.held[key][here].node for key in call.inputs if key not in missing}
        # The key whose lengths deal this call's samples comes first: the other transfers ask for them.
        dealt_by = call.token_key if keys.sides[call.name].balance == "tokens" else None
        sources = keys.sources(missing)
        for source, moved in sorted(sources.items(), key=lambda item: dealt_by not in item[1]):
            native = next(key for key in moved if keys.home(key) == source)
            name = f"transfer_{graph.producer(native) or FETCH}_to_{call.name}"
            made.add(
                TransferNode(
                    name=name,
                    consumer=call.name,
                    source=keys.held[native][source].side,
                    destination=keys.sides[call.name],
                    keys=tuple(moved),
                ),
                after={keys.held[key][source].node for key in moved},
            )
            if dealt_by is not None and dealt_by not in moved:
                made.after[name].add(keys.held[dealt_by][here].node)
            made.after[call.name].add(name)
            for key in moved:
                keys.put(key, call.name, name)
        for key in call.outputs:
            keys.put(key, call.name, call.name)
