"""The dataflow graph of an algorithm: model function calls joined by data keys and by parameter versions."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import networkx as nx

from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall

FETCH = "fetch"
INSERTED = ("transfer_", "reallocate_", "release_", "onload_", "offload_", "sync_", "save_", "evaluate_")
"""How the names of nodes begin that a plan inserts; `FETCH` is the node that reads the rows."""

CallGraph: TypeAlias = "nx.DiGraph[str]"


class GraphError(ValueError):
    """The dataflow graph cannot run; the message gives the reason in one sentence."""


class VersionEdge(NamedTuple):
    """`reader` of iteration t uses the parameters of `role` that `writer` left in iteration t - 1."""

    writer: str
    reader: str
    role: str


class DataEdge(NamedTuple):
    """`reader` of iteration t reads `keys` that `writer` made for it in iteration t - lag, since it runs ahead."""

    writer: str
    reader: str
    keys: tuple[str, ...]
    lag: int


class DataflowGraph:
    """The calls of one iteration, with the data and version edges that order them.

    name          the algorithm, e.g. "ppo"
    calls         in a topological order, as close to the given order as possible
    dataset_keys  keys that the data set provides
    decisions     decision -> the call by whose metrics it is made
    digraph       networkx.DiGraph of one iteration. Nodes are call names (attribute `call`). An edge has `keys`, the
                  data that flows along it, and `roles`, the roles whose parameter versions order its two calls
    across        version edges from each iteration to the next
    lagged        data edges to later iterations, from calls that run ahead
    n_seqs        sequences per iteration
    group_size    number of consecutive sequences that stay together

    A reader of a trained role uses the version from before the iteration's train_step, unless its data depend
    on that train_step.

    evaluated      roles that are evaluated after their train_step
    on_start       they are also evaluated before the first iteration
    follows        role -> the trained role whose parameters are blended into its own after the train_step. One of its
                   calls runs its model
    Raises GraphError for duplicate names, a key produced twice, a missing key, a role trained twice, calls of
    different sizes or groups, a call that runs ahead of what it reads, a cycle, a role that follows none that
    trains, and calls that cannot be cut into parts.
    """

    def __init__(
        self,
        calls: Sequence[ModelFunctionCall],
        dataset_keys: Iterable[str],
        *,
        name: str = "graph",
        evaluated: Collection[str] = (),
        on_start: bool = False,
        follows: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.dataset_keys = tuple(dataset_keys)
        _check_names(calls)
        _check_sizes(calls)
        producers = _producers(calls, self.dataset_keys)
        _check_parts(calls, producers)
        graph = _data_graph(calls, producers, self.dataset_keys)
        _refuse_cycle(graph)
        by_name = {call.name: call for call in calls}
        self.decisions = _decisions(calls)
        _add_decision_edges(graph, calls, self.decisions)
        _refuse_cycle(graph)
        data = graph.copy()
        self.lagged = _cut_lagged(graph, by_name)
        self._trainers = _trainers(calls)
        self.evaluated, self.on_start = tuple(evaluated), on_start
        frozen = sorted(set(self.evaluated) - self._trainers.keys())
        if frozen:
            raise GraphError(f"Role {frozen[0]!r} is evaluated, but no call of {name} trains it.")
        self.follows = dict(follows or {})
        self._followers = {
            role: _follower(role, leader, calls, self._trainers) for role, leader in self.follows.items()
        }
        self.across = _add_version_edges(graph, calls, self._trainers)
        _refuse_cycle(graph)
        position = {call.name: i for i, call in enumerate(calls)}
        whole = nx.compose(data, graph)  # a call also comes after what it reads of earlier iterations
        order = nx.lexicographical_topological_sort(whole, key=position.__getitem__)
        self.digraph: CallGraph = graph
        self.calls = tuple(by_name[name] for name in order)
        self._by_name, self._producers = by_name, producers
        late = next((call for call in calls if call.lead > self.source.lead), None)
        if late is not None:
            raise GraphError(
                f"Call {late.name!r} runs {late.lead} iterations ahead, but {self.source.name!r}, which reads the "
                f"data set first, {self.source.lead}. Let it run ahead no farther."
            )
        self._after_training: dict[str, set[str]] = {
            role: descendants(graph, trainer.name) for role, trainer in self._trainers.items()
        }

    @property
    def n_seqs(self) -> int:
        return self.calls[0].n_seqs * self.calls[0].rounds

    @property
    def group_size(self) -> int:
        return self.calls[0].group_size

    @property
    def chunks(self) -> int:
        """Parts into which calls are cut; 1 where none is."""
        return max(call.chunks for call in self.calls)

    @property
    def roles(self) -> tuple[str, ...]:
        """Role names in the order of their first call."""
        return tuple(dict.fromkeys(call.role for call in self.calls))

    @property
    def source(self) -> ModelFunctionCall:
        """The first call that reads the data set: its data-parallel heads fetch the rows."""
        return next(call for call in self.calls if set(call.inputs) & set(self.dataset_keys))

    def call(self, name: str) -> ModelFunctionCall:
        """The call of that name. Raises GraphError naming the calls there are."""
        if name not in self._by_name:
            raise GraphError(f"{self.name} has no call {name!r}; its calls are {', '.join(self._by_name)}.")
        return self._by_name[name]

    def producer(self, key: str) -> str | None:
        """The call that produces a key; None for a key of the data set."""
        return self._producers.get(key)

    def last_node(self, decision: str) -> tuple[str, ...]:
        """The node at whose end a decision is last made in an iteration; none where nothing decides that."""
        return self.decisions[decision].nodes[-1:] if decision in self.decisions else ()

    def decided_before(self, call: ModelFunctionCall, part: int) -> set[str]:
        """The nodes of an iteration whose decisions a part of a call waits for."""
        source = self.decisions.get(call.when)
        if source is None:
            return set()
        if call.chunks > 1:
            return {source.nodes[part - 1]} if part else set()
        return {source.nodes[-1]} if self.digraph.has_edge(source.name, call.name) else set()

    def trainer(self, role: str) -> ModelFunctionCall | None:
        """The train_step of a role; None when the role is frozen."""
        return self._trainers.get(role)

    def follower(self, role: str) -> ModelFunctionCall | None:
        """The call that runs the model of a role that follows another; None for other roles."""
        return self._followers.get(role)

    def changes(self, role: str) -> bool:
        """Whether a role's parameters change during a run."""
        return role in self._trainers or role in self._followers

    def reads_updated(self, call: ModelFunctionCall) -> bool:
        """Whether a call reads its role's parameters after the train_step of its own iteration."""
        return call.name in self._after_training.get(call.role, ())

    def while_idle(self, role: str) -> set[str]:
        """The calls that may run before a role's first call has begun or after its last one has ended."""
        own = {call.name for call in self.calls if call.role == role}
        after = own.union(*(descendants(self.digraph, name) for name in own))
        between = {name for name in after if descendants(self.digraph, name) & own}
        return {call.name for call in self.calls} - own - between


def _check_names(calls: Sequence[ModelFunctionCall]) -> None:
    if not calls:
        raise GraphError("The graph has no calls.")
    seen: set[str] = set()
    for call in calls:
        if call.name == FETCH or call.name.startswith(INSERTED):
            raise GraphError(
                f"A call is named {call.name!r}, as nodes are that plans insert ({FETCH}, "
                f"{', '.join(f'{start}...' for start in INSERTED)}). Choose another name."
            )
        if call.name in seen:
            raise GraphError(f"Two calls are named {call.name!r}. Rename one of them.")
        seen.add(call.name)
        stray = set(call.remap) - {*call.inputs, *call.outputs}
        if stray:
            raise GraphError(
                f"Call {call.name!r} renames {sorted(stray)}, which are neither its inputs nor its outputs."
            )


def groups_of(call: ModelFunctionCall) -> str:
    """The sequences of a call, for a message: "64 sequences", or "8 groups of 8 sequences"."""
    if call.group_size == 1:
        return f"{call.n_seqs} sequences"
    return f"{call.n_groups} groups of {call.group_size} sequences"


def _check_sizes(calls: Sequence[ModelFunctionCall]) -> None:
    first = calls[0]
    for call in calls:
        if call.n_seqs * call.rounds != first.n_seqs * first.rounds:
            raise GraphError(
                f"Call {call.name!r} processes {call.n_seqs} sequences, {first.name!r} {first.n_seqs}: "
                "all calls of an iteration process the same ones."
            )
        if call.group_size != first.group_size:
            raise GraphError(
                f"Call {call.name!r} keeps {call.group_size} sequences together, {first.name!r} {first.group_size}: "
                "all calls of an iteration have the same groups."
            )
        if call.n_seqs % call.group_size:
            raise GraphError(
                f"Call {call.name!r} processes {call.n_seqs} sequences: no whole groups of {call.group_size}."
            )
        if call.mini_batches > call.n_groups:
            raise GraphError(
                f"Call {call.name!r} cuts {groups_of(call)} into {call.mini_batches} mini-batches. "
                "Choose fewer mini-batches or a larger batch."
            )


def blocks_of(call: ModelFunctionCall) -> str:
    """What a call's sequences are cut into, for a message: "4 mini-batches", or "2 parts"."""
    return f"{call.mini_batches} mini-batches" if call.chunks == 1 else f"{call.chunks} parts"


def _check_parts(calls: Sequence[ModelFunctionCall], producers: Mapping[str, str]) -> None:
    """Raises GraphError unless parts are whole groups, equally many, and made from parts."""
    by_name = {call.name: call for call in calls}
    for call in calls:
        if call.chunks == 1:
            continue
        if call.kind == "train_step":
            raise GraphError(
                f"Call {call.name!r} trains: it takes all samples, and cannot be cut into parts."
            )
        if call.n_groups % call.chunks:
            raise GraphError(
                f"Call {call.name!r} cuts {groups_of(call)} into {call.chunks} parts, which would not be equal. "
                f"Choose a number of chunks that divides {call.n_groups}."
            )
        for key in call.inputs:
            made = by_name.get(producers.get(key, ""), call)
            if made.chunks != call.chunks:
                raise GraphError(
                    f"Call {call.name!r} is cut into {call.chunks} parts, but {made.name!r}, which makes {key!r} for "
                    f"it, into {made.chunks}. Cut both alike."
                )


def _producers(calls: Sequence[ModelFunctionCall], dataset_keys: Sequence[str]) -> dict[str, str]:
    """Key -> the call that produces it."""
    producers: dict[str, str] = {}
    for call in calls:
        for key in call.outputs:
            if key in dataset_keys:
                raise GraphError(
                    f"Key {key!r} is produced twice: by the data set and by call {call.name!r}. Rename one."
                )
            if key in producers:
                raise GraphError(
                    f"Key {key!r} is produced twice: by calls {producers[key]!r} and {call.name!r}. "
                    "Rename one."
                )
            producers[key] = call.name
    return producers


def _decisions(calls: Sequence[ModelFunctionCall]) -> dict[str, ModelFunctionCall]:
    """Decision -> the call by whose metrics it is made."""
    deciding: dict[str, ModelFunctionCall] = {}
    for call in calls:
        for decision in call.decides:
            if decision.name in deciding:
                raise GraphError(
                    f"Calls {deciding[decision.name].name!r} and {call.name!r} both decide {decision.name!r}. Rename "
                    "one of the decisions."
                )
            deciding[decision.name] = call
    ahead = [call.name for call in calls if call.outlasts] if deciding else []
    if ahead:
        raise GraphError(
            f"{next(iter(deciding))!r} is decided by what an iteration has measured, but {ahead[0]!r} works for "
            "later iterations. Set staleness: 0, and leave out sampling.segment_tokens."
        )
    for call in calls:
        if call.when and call.when not in deciding:
            raise GraphError(
                f"Call {call.name!r} runs by {call.when!r}, which no call decides; decided are "
                f"{', '.join(deciding) or 'none'}. Name one of them."
            )
        source = deciding.get(call.when, call)
        parts = any(one.each_part for one in source.decides if one.name == call.when)
        if call.when and ((call.chunks > 1) != parts or (source.chunks != call.chunks and parts)):
            raise GraphError(
                f"Call {call.name!r} in {call.chunks} parts runs by {call.when!r}, which {source.name!r} decides "
                f"{f'in {source.chunks} parts' if parts else 'for the whole iteration'}. Cut both alike."
            )
    return deciding


def _add_decision_edges(
    graph: CallGraph, calls: Sequence[ModelFunctionCall], deciding: Mapping[str, ModelFunctionCall]
) -> None:
    """A call that runs by a decision comes after the call that makes it, unless it leads there: then it runs by that
    of the iteration before. Parts have edges of their own."""
    for call in calls:
        source = deciding.get(call.when)
        if (
            source is not None
            and call.chunks == 1
            and source.name not in {call.name} | descendants(graph, call.name)
        ):
            _add_edge(graph, source.name, call.name, decision=call.when)


def _trainers(calls: Sequence[ModelFunctionCall]) -> dict[str, ModelFunctionCall]:
    """Role -> its train_step."""
    trainers: dict[str, ModelFunctionCall] = {}
    for call in calls:
        if call.kind != "train_step":
            continue
        if call.role in trainers:
            raise GraphError(
                f"Role {call.role!r} is trained by two calls, {trainers[call.role].name!r} and "
                f"{call.name!r}. Merge them, or use two roles."
            )
        trainers[call.role] = call
    return trainers


def _follower(
    role: str, leader: str, calls: Sequence[ModelFunctionCall], trainers: Mapping[str, ModelFunctionCall]
) -> ModelFunctionCall:
    """The one call that runs the model of a role that follows another."""
    if leader not in trainers or role in trainers:
        raise GraphError(
            f"Role {role!r} cannot follow {leader!r}: a role that no call trains follows one that a call trains."
        )
    running = [call for call in calls if call.role == role and call.runs_model]
    if len(running) != 1:
        names = " and ".join(repr(call.name) for call in running) or "none"
        raise GraphError(f"Role {role!r} follows {leader!r}, so one call must run its model, not {names}.")
    return running[0]


def _data_graph(
    calls: Sequence[ModelFunctionCall], producers: Mapping[str, str], dataset_keys: Sequence[str]
) -> CallGraph:
    graph: CallGraph = nx.DiGraph()
    for call in calls:
        graph.add_node(call.name, call=call)
    for call in calls:
        for key in call.inputs:
            if key in dataset_keys:
                continue
            if key not in producers:
                raise GraphError(
                    f"Call {call.name!r} needs key {key!r}, which neither the data set "
                    f"({', '.join(dataset_keys) or 'no keys'}) nor another call provides."
                )
            _add_edge(graph, producers[key], call.name, key=key)
    if not any(key in dataset_keys for call in calls for key in call.inputs):
        raise GraphError(
            f"No call reads the data set's keys ({', '.join(dataset_keys) or 'there are none'})."
        )
    return graph


def descendants(graph: CallGraph, name: str) -> set[str]:
    """The calls that a path leads to from a call."""
    return nx.descendants(graph, name)  # pyright: ignore[reportUnknownMemberType]


def _cut_lagged(graph: CallGraph, calls: Mapping[str, ModelFunctionCall]) -> tuple[DataEdge, ...]:
    """Takes the data edges to later iterations out of the graph of one iteration, and returns them."""
    found = list[DataEdge]()
    for a, b, edge in list(graph.edges(data=True)):
        lag = calls[a].lead - calls[b].lead
        if lag < 0:
            raise GraphError(
                f"Call {b!r} runs {-lag} iterations ahead of {a!r}, but needs {' and '.join(edge['keys'])} of it. "
                "Let it run ahead no farther."
            )
        if lag:
            found.append(DataEdge(a, b, edge["keys"], lag))
            graph.remove_edge(a, b)
    return tuple(found)


def _add_edge(
    graph: CallGraph,
    a: str,
    b: str,
    *,
    key: str | None = None,
    role: str | None = None,
    decision: str | None = None,
) -> None:
    if not graph.has_edge(a, b):
        graph.add_edge(a, b, keys=(), roles=())
    edge = graph.edges[a, b]
    if key is not None:
        edge["keys"] = (*edge["keys"], key)
    if role is not None:
        edge["roles"] = (*edge["roles"], role)
    if decision is not None:
        edge["decision"] = decision


def _add_version_edges(
    graph: CallGraph, calls: Sequence[ModelFunctionCall], trainers: Mapping[str, ModelFunctionCall]
) -> tuple[VersionEdge, ...]:
    """Order readers against the train_step of their role; returns the edges to the next iteration.

    Within an iteration, readers of the old version come before the train_step, and readers of the new version
    (those that depend on the train_step) come after it. The train_step and the old-version readers of the next
    iteration follow this iteration's train_step.
    """
    across, within = list[VersionEdge](), list[tuple[str, str, str]]()
    for role, trainer in trainers.items():
        updated = descendants(graph, trainer.name)
        for call in calls:
            if call.role != role:
                continue
            if call.name in updated:
                within.append((trainer.name, call.name, role))
                continue
            across.append(VersionEdge(trainer.name, call.name, role))
            if call.name != trainer.name:
                within.append((call.name, trainer.name, role))
    for a, b, role in within:
        _add_edge(graph, a, b, role=role)
    return tuple(across)


def _refuse_cycle(graph: CallGraph) -> None:
    try:
        cycle = cast(list[tuple[str, str]], nx.find_cycle(graph))  # pyright: ignore[reportUnknownMemberType]
    except nx.NetworkXNoCycle:
        return
    names = [a for a, _ in cycle]
    reasons = [_reason(graph.edges[a, b]) for a, b in pairwise([*names, names[0]])]
    steps = "; ".join(
        f"{b!r} needs {reason} of {a!r}"
        for (a, b), reason in zip(pairwise([*names, names[0]]), reasons, strict=True)
    )
    raise GraphError(f"The calls wait for each other in a cycle: {steps}. Remove one of these inputs.")


def _reason(edge: Mapping[str, Any]) -> str:
    if edge["keys"]:
        return " and ".join(edge["keys"])
    if "decision" in edge:
        return f"the decision {edge['decision']}"
    return f"the parameters of {' and '.join(edge['roles'])}"
