"""Which nodes a plan has and what they wait for, before the devices are known.

This depends only on which calls have their samples on the same ranks and which have the same placement. So building
a plan and searching for one share this code: calls are given labels to compare, real placements in a plan,
numbers in the search.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prefect_rlhf.planner.plan.graph import FETCH, DataflowGraph
from prefect_rlhf.rlhf_tasks.spec import EVALUATE, IN_FLIGHT, STOP, WHOLE, ModelFunctionCall, Part

SlotKind = Literal[
    "fetch",
    "call",
    "transfer",
    "reallocate",
    "release",
    "onload",
    "offload",
    "sync",
    "save",
    "save_samples",
    "evaluate",
    "evaluate_first",
]


TRAILING: frozenset[SlotKind] = frozenset(
    {"release", "offload", "sync", "save", "save_samples", "evaluate", "evaluate_first"}
)
"""The kinds of slots that directly follow others: the last reader, or the train_step, or both, or the fetch."""


class Slot(NamedTuple):
    """A node without its devices.

    call    the call that it serves. Of a call: itself; of a fetch: the source call; of a transfer: the consumer; of
            a reallocation or release: the first reader; of an onload or offload: the first reader of a frozen role,
            the train_step of a trained one; of a save or an evaluation: the train_step that it follows; of a sync,
            and of the save that follows it: the call that runs the role's model; of a save of samples: the call that
            runs ahead
    source  of a transfer: the call whose placement holds the keys, or FETCH; of a reallocation or release: the
            role's train_step; of a sync: that of the role that it follows; otherwise `call`
    keys    what a fetch or transfer brings
    part    of a call or transfer: whose samples
    """

    name: str
    kind: SlotKind
    call: str
    source: str
    keys: tuple[str, ...] = ()
    part: Part = WHOLE


@dataclass
class PlanTemplate:
    """Slots by name, and their edges.

    after, across  slot -> the slots that must have finished in the same iteration; in the iteration before
    """

    slots: dict[str, Slot] = field(default_factory=dict[str, "Slot"])
    after: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    across: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def add(self, slot: Slot, after: set[str] | None = None) -> None:
        assert slot.name not in self.slots, f"two plan nodes are named {slot.name!r}"
        self.slots[slot.name] = slot
        self.after[slot.name] = set(after or ())
        self.across[slot.name] = set()

    def join(self, other: "PlanTemplate") -> None:
        """Adds the slots and edges of another template; slots of one name are the same."""
        for name, slot in other.slots.items():
            if name not in self.slots:
                self.add(slot)
            self.after[name] |= other.after[name]
            self.across[name] |= other.across[name]

    @property
    def moving(self) -> list[str]:
        """The slots whose order is chosen: all but those that directly follow others."""
        return [name for name, slot in self.slots.items() if slot.kind not in TRAILING]


def plan_template(
    graph: DataflowGraph,
    where: Mapping[str, Hashable],
    placement: Mapping[str, Hashable],
    dealt_by: Mapping[str, str] | None = None,
    offloaded: Collection[str] = (),
    moved: "PlanTemplate | None" = None,
) -> PlanTemplate:
    """The slots of one iteration with their data and version edges. Where nothing moves, there is no slot.

    where      call or FETCH -> label; equal labels mean that every sample lies on the same rank for both
    placement  call -> label; equal labels mean the same devices under the same strategy
    dealt_by   call whose samples are dealt by tokens -> the key that gives the samples' lengths
    offloaded  calls whose role's parameters come and go: of a frozen role's calls on one placement, all or none; of a
               trained role's, none but the train_step
    moved      `with_transfers` of the same graph, sides and lengths; made here where it is not given
    """
    moved = moved or with_transfers(graph, where, dealt_by or {})
    template = _with_calls(graph)
    _add_copies(template, graph, placement)
    _add_onloads(template, graph, placement, offloaded)
    template.join(moved)
    _add_syncs(template, graph)
    _add_saves(template, graph)
    _add_sample_saves(template, graph)
    _add_onloads_of_trained(template, graph, placement, offloaded)
    return template


def _with_calls(graph: DataflowGraph) -> PlanTemplate:
    """The fetch, and the calls' nodes one after another."""
    template, source = PlanTemplate(), graph.source.name
    template.add(Slot(FETCH, "fetch", source, source, graph.dataset_keys))
    for call in graph.calls:
        for number, name in enumerate(call.nodes):
            before = {call.nodes[number - 1]} if number else set[str]()
            before |= graph.decided_before(call, number)
            template.add(
                Slot(name, "call", call.name, call.name, part=Part(number, call.chunks)), after=before
            )
    return template


def with_transfers(
    graph: DataflowGraph, where: Mapping[str, Hashable], dealt_by: Mapping[str, str]
) -> PlanTemplate:
    """The calls and their transfers, which do not depend on placements. Arguments as in `plan_template`."""
    template = _with_calls(graph)
    _add_transfers(template, graph, where, dealt_by)
    return template


def _add_copies(template: PlanTemplate, graph: DataflowGraph, placement: Mapping[str, Hashable]) -> None:
    """The version edges of every trained role, and a reallocation before and a release after each copy's readers."""
    for role in graph.roles:
        trainer = graph.trainer(role)
        if trainer is None:
            continue
        readers: dict[tuple[Hashable, bool], list[str]] = {}
        for call in graph.calls:
            if call.role == role and call.name != trainer.name:
                readers.setdefault((placement[call.name], graph.reads_updated(call)), []).append(call.name)
        for (place, updated), names in readers.items():
            nodes = [node for name in names for node in graph.call(name).nodes]
            if place == placement[trainer.name]:
                _order_readers(template, trainer.name, nodes, updated)
                continue
            reallocate = f"reallocate_{role}_to_{names[0]}"
            template.add(Slot(reallocate, "reallocate", names[0], trainer.name))
            _order_readers(template, trainer.name, [reallocate], updated)
            for node in nodes:
                template.after[node].add(reallocate)
            release = Slot(f"release_{role}_of_{names[0]}", "release", names[0], trainer.name)
            template.add(release, after=set(nodes))


def _order_readers(template: PlanTemplate, trainer: str, readers: list[str], updated: bool) -> None:
    """Version edges that keep each reader of the trained parameters between one train_step and the next."""
    for reader in readers:
        if updated:
            template.after[reader].add(trainer)
        else:
            template.across[reader].add(trainer)
            template.after[trainer].add(reader)


def _add_onloads(
    template: PlanTemplate,
    graph: DataflowGraph,
    placement: Mapping[str, Hashable],
    offloaded: Collection[str],
) -> None:
    """An onload before, and an offload after, the readers of every offloaded frozen role on each placement."""
    readers: dict[tuple[str, Hashable], list[str]] = {}
    for call in graph.calls:
        if call.name in offloaded and graph.trainer(call.role) is None:
            readers.setdefault((call.role, placement[call.name]), []).append(call.name)
    for (role, _), names in readers.items():
        onload = f"onload_{role}_to_{names[0]}"
        template.add(Slot(onload, "onload", names[0], names[0]))
        nodes = [node for name in names for node in graph.call(name).nodes]
        for node in nodes:
            template.after[node].add(onload)
        template.add(Slot(f"offload_{role}_of_{names[0]}", "offload", names[0], names[0]), after=set(nodes))


def _add_onloads_of_trained(
    template: PlanTemplate,
    graph: DataflowGraph,
    placement: Mapping[str, Hashable],
    offloaded: Collection[str],
) -> None:
    """An onload before all nodes that read an offloaded trained role where it trains, and an offload after them.

    An evaluation before the first iteration is none of them: it brings the parameters for itself.
    """
    for call in graph.calls:
        if call.name not in offloaded or call.kind != "train_step":
            continue
        at_home = {
            c.name for c in graph.calls if c.role == call.role and placement[c.name] == placement[call.name]
        }
        readers = {name for name, slot in template.slots.items() if _reads(slot, call.name, at_home)}
        onload = f"onload_{call.role}_to_{call.name}"
        template.add(Slot(onload, "onload", call.name, call.name))
        before = set[str]()  # what readers that directly follow others follow
        for name in readers:
            if template.slots[name].kind in TRAILING:
                before |= template.after[name]
            else:
                template.after[name].add(onload)
        offload = Slot(f"offload_{call.role}_of_{call.name}", "offload", call.name, call.name)
        template.add(offload, after=readers | before)


def _reads(slot: Slot, trainer: str, at_home: Collection[str]) -> bool:
    """Whether a slot needs a role's parameters on its train_step's placement. at_home: the role's calls there."""
    match slot.kind:
        case "call":
            return slot.call in at_home
        case "reallocate" | "sync":
            return slot.source == trainer
        case "save" | "evaluate":
            return slot.call == trainer
        case _:
            return False


def _add_syncs(template: PlanTemplate, graph: DataflowGraph) -> None:
    """A sync and a save of each role that follows another: after the train_step and the call that runs its model.

    Both calls of the next iteration wait for the sync, and the call that runs the model for the save.
    """
    for role, leader in graph.follows.items():
        reader, trainer = graph.follower(role), graph.trainer(leader)
        assert reader is not None, "the graph has checked this"
        assert trainer is not None, "the graph has checked this"
        sync, save = f"sync_{role}", f"save_{role}"
        template.add(Slot(sync, "sync", reader.name, trainer.name), after={*reader.nodes, trainer.name})
        template.add(Slot(save, "save", reader.name, reader.name), after={*reader.nodes, trainer.name, sync})
        for node in reader.nodes:
            template.across[node] |= {sync, save}
        template.across[trainer.name].add(sync)


def _add_saves(template: PlanTemplate, graph: DataflowGraph) -> None:
    """After each train_step a save, then an evaluation where the role is evaluated. The next train_step waits.

    An evaluation before the first iteration directly follows the fetch, so all other nodes on its devices come later.
    """
    for role in graph.roles:
        trainer = graph.trainer(role)
        if trainer is not None:
            decided = graph.last_node(STOP)
            template.add(
                Slot(f"save_{role}", "save", trainer.name, trainer.name), after={trainer.name, *decided}
            )
            template.across[trainer.name].add(f"save_{role}")
        if (
            trainer is not None and role in graph.evaluated
        ):  # after the save, whose files are written meanwhile
            decided = graph.last_node(EVALUATE)
            template.add(
                Slot(f"evaluate_{role}", "evaluate", trainer.name, trainer.name),
                after={trainer.name, *decided},
            )
            template.across[trainer.name].add(f"evaluate_{role}")
            if graph.on_start:
                first = f"evaluate_{role}_at_start"
                template.add(Slot(first, "evaluate_first", trainer.name, trainer.name), after={FETCH})
                template.across[first].add(trainer.name)


def _add_sample_saves(template: PlanTemplate, graph: DataflowGraph) -> None:
    """After each call that runs ahead, or generates in segments, a save of what it has made for later iterations."""
    for call in graph.calls:
        if call.outlasts:
            slot = Slot(f"save_samples_of_{call.name}", "save_samples", call.name, call.name)
            template.add(slot, after=set(call.nodes))


class _Holding(NamedTuple):
    """A key on one side (a `where` label).

    call   the call (or FETCH) of that side
    lead   of that call
    nodes  what brought the key there: one node, or one for each part
    """

    call: str
    lead: int
    nodes: tuple[str, ...]

    def of(self, part: Part) -> set[str]:
        """The nodes that brought the samples of a part."""
        return {self.nodes[part.number]} if len(self.nodes) == part.of else set(self.nodes)

    def before(self, template: PlanTemplate, name: str, part: Part, lag: int) -> None:
        """Let slot `name` wait for the samples of a part, which were brought `lag` iterations ago.

        Those of two iterations ago or more are there without an edge: that iteration has ended
        (docs/explanation/protocol.md, delivery).
        """
        if lag < IN_FLIGHT:
            (template.across if lag else template.after)[name].update(self.of(part))


class _Keys:
    """Which side holds which key, while the calls are walked in data order."""

    def __init__(self, graph: DataflowGraph, where: Mapping[str, Hashable]) -> None:
        self._graph, self.where = graph, where
        self.held: dict[str, dict[Hashable, _Holding]] = {}
        for key in graph.dataset_keys:
            self.put(key, FETCH, (FETCH,))

    def put(self, key: str, call: str, nodes: tuple[str, ...]) -> None:
        """The nodes have brought `key` to the side of `call`."""
        lead = self._graph.source.lead if call == FETCH else self._graph.call(call).lead
        self.held.setdefault(key, {})[self.where[call]] = _Holding(call, lead, nodes)

    def home(self, key: str) -> Hashable:
        """The side where a key was produced or fetched."""
        return self.where[self._graph.producer(key) or FETCH]

    def sources(self, missing: list[str]) -> dict[Hashable, list[str]]:
        """Source side -> keys to take from it.

        A key comes from its home. It comes from another side only if the consumer takes another key from that side
        anyway, and the call that produced that other key reads this one. So a consumer never waits for a call whose
        outputs it does not use, and there are few transfers.
        """
        chosen: dict[Hashable, list[str]] = {}
        movable = list[str]()
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
    template: PlanTemplate, graph: DataflowGraph, where: Mapping[str, Hashable], dealt_by: Mapping[str, str]
) -> None:
    """Walk the calls in data order, and add transfers for the keys that a call lacks: one per source side, for each
    of its parts."""
    keys = _Keys(graph, where)
    for call in graph.calls:
        here, dealing = where[call.name], dealt_by.get(call.name)
        missing, parts = [key for key in call.inputs if here not in keys.held[key]], _parts(call)
        for part, node in parts:
            for key in call.inputs:
                if key not in missing:
                    holding = keys.held[key][here]
                    holding.before(template, node, part, holding.lead - call.lead)
        # The key whose lengths deal this call's samples comes first: the other transfers need the lengths.
        sources = sorted(keys.sources(missing).items(), key=lambda item: dealing not in item[1])
        for source, moved in sources:
            native = next(key for key in moved if keys.home(key) == source)
            names = tuple(f"transfer_{graph.producer(native) or FETCH}_to_{node}" for node in call.nodes)
            for (part, node), name in zip(parts, names, strict=True):
                held_by = keys.held[native][source].call
                template.add(Slot(name, "transfer", call.name, held_by, tuple(moved), part))
                needed = [keys.held[key][source] for key in moved]
                if dealing is not None and dealing not in moved:
                    needed.append(keys.held[dealing][here])
                for holding in needed:
                    holding.before(template, name, part, holding.lead - call.lead)
                template.after[node].add(name)
            for key in moved:
                keys.put(key, call.name, names)
        for key in call.outputs:
            keys.put(key, call.name, call.nodes)


def _parts(call: ModelFunctionCall) -> list[tuple[Part, str]]:
    """The parts of a call and their nodes; of one that is not cut, the whole."""
    return [(Part(number, call.chunks), node) for number, node in enumerate(call.nodes)]
