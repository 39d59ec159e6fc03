"""A plan search's tables as arrays for compiled code: options, templates, models, links.

The options of all calls are in one table: option j of call c is row start[c] + j. A template (planner.plan.template)
holds the nodes of all plans with the same pattern, that is, with the same pairs of calls that have equal sides and
equal placements. Its slots are numbered. It contains the onloads and offloads of all calls that have options with
these; where a choice has none for a call, its slots are idle. Orders are those of planner.plan.order.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.planner.plan.build import dealing
from prefect_rlhf.planner.plan.graph import FETCH as FETCHED
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.order import OrderRule, levels, node_order, with_trailing
from prefect_rlhf.planner.plan.steady_state import waits
from prefect_rlhf.planner.plan.template import PlanTemplate, Slot, SlotKind, plan_template, with_transfers
from prefect_rlhf.planner.pricing.options import Option
from prefect_rlhf.planner.pricing.plans import evaluation_s, save_s, transfer_size
from prefect_rlhf.planner.pricing.problem import NO_DEADLINE, Deadline, OptionsTakeTooLongError, Problem
from prefect_rlhf.planner.search.compiled.compile import Floats, Ints
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall

Rows = Any  # np.recarray: table.field is a column and table[i].field a number, here and in compiled code

_KINDS: tuple[SlotKind, ...] = (
    *("call", "transfer", "reallocate", "release", "sync", "save", "evaluate", "onload", "offload"),
)
CALL, TRANSFER, REALLOCATE, RELEASE, SYNC, SAVE, EVALUATE, ONLOAD, OFFLOAD, COPY, OTHER = range(11)
"""Kinds of slots; COPY is the copy from host memory that an onload starts, OTHER what takes its dispatch alone."""

OPTION_ROW = np.dtype(
    [
        *((name, "f8") for name in ("seconds", "save_s", "evaluate_s", "copy_s")),
        *((name, "i8") for name in ("first", "size", "dp", "tp", "pp", "shares", "onloaded")),
        *((name, "i8") for name in ("where", "place", "strategy", "classes", "stage")),
        *((name, "f8") for name in ("resident", "frozen", "copy", "active", "host", "layer")),
        ("layers", "i8"),
    ]
)
"""An option.

seconds, save_s  seconds of the call (of all its parts together), and of the save that follows a train_step, or the
                 call of a role that follows another; both include dispatch
evaluate_s       seconds per iteration of the evaluation that follows a train_step, dispatch included; 0 without one
copy_s           seconds of the copy of its parameters from host memory, or back
first .. pp      mesh and strategy; dp: copies of the model, so cp times as many as the strategy's dp
shares           devices over which what a role moves is cut (planner.pricing.resharding.HeldModel)
onloaded         1 or 0, as in planner.pricing.options.Option
where            row of Arrays.sides; options with equal numbers have every sample on the same rank
place            number of the placement
strategy         number of the strategy together with the device classes along the mesh
classes          row of Arrays.wires: the slowest links of the mesh's device classes
stage            row of its first stage in Arrays.stages
resident .. host  bytes, each the maximum over the stages
layer            bytes of a layer, as a reallocation moves it (planner.pricing.resharding.HeldModel)
layers           layers of the stage that has most
"""

STAGE_ROW = np.dtype([(name, "f8") for name in ("resident", "frozen", "copy", "active", "host")])
"""Bytes of a stage, as in planner.pricing.options.Option."""

SLOT_ROW = np.dtype([("kind", "i8"), ("call", "i8"), ("source", "i8"), ("mask", "i8"), ("moved", "i8")])
"""A slot of a template: planner.plan.template.Slot with calls by number.

mask   bit c: the slot occupies the mesh of call c
moved  of a transfer, its index in Templates.transfers
"""

MEMORY_ROW = np.dtype([("first", "i8"), ("bytes", "f8"), ("host", "f8")])
"""Bytes of memory of each device, and of its host for what a plan keeps there, from device `first` on."""

TRANSFER_ROW = np.dtype([("bytes", "f8"), ("overhead_s", "f8")])
"""What a transfer moves: bytes of all samples, and seconds besides its messages, dispatch included."""


class Templates(NamedTuple):
    """The plan templates of all patterns.

    of             [patterns] int64: number of a pattern's template (planner.search.compiled.evaluator.pattern)
    size           [templates] int64: number of slots
    slots          [templates, slots] SLOT_ROW
    after, across  [templates, slots, most] int64: slots of the same iteration, of the previous iteration that must
                   have finished; padded with -1
    order          [templates, orders, slots] int16: slots in the total order
    transfers      [different transfers] TRANSFER_ROW
    """

    of: Ints
    size: Ints
    slots: Rows
    after: Ints
    across: Ints
    order: NDArray[np.int16]
    transfers: Rows


class Arrays(NamedTuple):
    """Everything that the price of a choice needs.

    memory_bytes  bytes for tensors on the smallest device; host_bytes: for what a plan keeps, on the smallest host
    memories    [runs] MEMORY_ROW: those of all devices, ascending
    per_host    devices of a host
    dispatch_s  seconds of a node besides its work
    sync_share  of all iterations, those in which a role that follows another is blended
    role        [calls] int64: number of the call's role
    trainer     [calls] int64: the call that trains its role, -1 if none does
    chunks      [calls] int64: parts into which the call is cut
    while_idle  [calls] int64, bit c: call c may run while the call's role is idle; where it is frozen, all bits
    weights     [calls] int64: number of its role's initial weights; calls with equal numbers share what is frozen
    start       [calls + 1] int64: row of each call's first option
    offloaded   [calls] int64: row of the first of its offloaded options; the next call's start if there are none. The
                rows from start to here are the same options in the same order, resident. An option that fits only
                offloaded stands there offloaded too
    options     [options of all calls] OPTION_ROW
    stages      [stages of all different options] STAGE_ROW
    sides       [sides, 4] int64: first head, distance of heads, dp, number of blocks that are dealt separately
    wires       [sets of device classes, 4] float64: planner.pricing.resharding.Wires of the slowest class
    layers      [roles] int64: numbers of layers of their models
    overhead_s  [roles] float64: seconds of a reallocation besides its messages, its dispatch included
    """

    n_calls: int
    memory_bytes: float
    host_bytes: float
    memories: Rows
    dispatch_s: float
    sync_share: float
    per_host: int
    role: Ints
    trainer: Ints
    chunks: Ints
    while_idle: Ints
    weights: Ints
    start: Ints
    offloaded: Ints
    options: Rows
    stages: Rows
    sides: Ints
    wires: Floats
    templates: Templates
    layers: Ints
    overhead_s: Floats


def make_arrays(
    problem: Problem,
    options: Sequence[Sequence[Option]],
    orders: Sequence[tuple[str, ...]],
    before: Arrays | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> Arrays:
    """The arrays of a problem with these options and orders of calls.

    before  those of other options with the same orders, whose templates serve where the same calls can be offloaded
    Raises OptionsTakeTooLongError when the deadline passes first.
    """
    graph, model = problem.graph, problem.model
    number = {call.name: i for i, call in enumerate(graph.calls)}
    trainers = [graph.trainer(call.role) for call in graph.calls]
    trained_by = [-1 if call is None else number[call.name] for call in trainers]
    shapes = [model.models[role].shape for role in graph.roles]
    roles = [graph.roles.index(call.role) for call in graph.calls]
    rows, stages, sides, wires = _option_rows(problem, options)
    idle = [graph.while_idle(call.role) if graph.trainer(call.role) else number for call in graph.calls]
    weights = _Numbers()
    per_host = problem.cluster.devices_per_host
    memories = [
        (
            first,
            float(model.classes.rooms[number]),
            float(per_host * model.classes.profiles[number].host_room_bytes),
        )
        for first, number in model.classes.runs
    ]
    start = np.cumsum([0, *map(len, options)])
    resident = [len(of_call) // 2 if of_call[-1].offload else len(of_call) for of_call in options]
    offloaded = start[:-1] + np.array(resident)
    patterns = [*_patterns(graph, rows, start)]
    if (
        before is not None
        and ((before.offloaded < before.start[1:]) == (offloaded < start[1:])).all()
        and (before.templates.of[[number for number, *_ in patterns]] >= 0).all()
    ):
        templates = before.templates
    else:
        offloadable = {
            call.name for call, of_call in zip(graph.calls, options, strict=True) if of_call[-1].onloaded
        }
        templates = _templates(problem, patterns, orders, offloadable, deadline)
    return Arrays(
        n_calls=len(graph.calls),
        memory_bytes=min(device for _, device, _ in memories),
        host_bytes=min(host for _, _, host in memories),
        memories=_table(MEMORY_ROW, memories),
        dispatch_s=model.classes.dispatch_s,
        sync_share=1 / model.workload.sync_every,
        per_host=per_host,
        role=np.array(roles),
        trainer=np.array(trained_by),
        chunks=np.array([call.chunks for call in graph.calls]),
        while_idle=np.array([sum(1 << number[name] for name in names) for names in idle]),
        weights=np.array([weights[problem.frozen_weights(call.role)] for call in graph.calls]),
        start=start,
        offloaded=offloaded,
        options=rows,
        stages=stages,
        sides=sides,
        wires=wires,
        templates=templates,
        layers=np.array([shape.layers for shape in shapes]),
        overhead_s=np.array([model.classes.reallocation_overhead_s(shape.layers) for shape in shapes])
        + model.classes.dispatch_s,
    )


def _table(row: np.dtype, rows: Iterable[tuple]) -> Rows:
    return np.array([*rows], row).view(np.recarray)


def _option_rows(problem: Problem, options: Sequence[Sequence[Option]]) -> tuple[Rows, Rows, Ints, Floats]:
    """([options] OPTION_ROW, [stages] STAGE_ROW, [sides, 4] int64, [sets of classes, 4] float64): Arrays.options,
    stages, sides and wires."""
    classes, dispatch_s = problem.model.classes, problem.model.classes.dispatch_s
    rows: list[tuple] = []
    stages: list[tuple[float, ...]] = []
    sides, places, strategies, wires = _Numbers(), _Numbers(), _Numbers(), _Numbers()
    layouts = {
        mesh: classes.layout(*mesh) for of_call in options for mesh in {(o.first, o.size) for o in of_call}
    }
    for call, of_call in zip(problem.graph.calls, options, strict=True):
        model = problem.model.models[call.role]
        trained = problem.graph.trainer(call.role) is not None
        known: dict[tuple, tuple] = {}  # figures that options share if they differ only in their place
        for option in of_call:
            s, mesh = option.strategy, (option.first, option.size)
            degrees, layout = (s.copies, s.tp, s.pp), layouts[mesh]
            alike = (s, layout, option.micro_batches, option.offload)
            if alike not in known:
                by_stage = option.resident, option.frozen, option.copy, option.active, option.host
                most = tuple(map(max, by_stage))
                within = tuple(sorted({number for _, number in layout}))
                layer, placement = problem.model.layer_bytes(call.role, s), option.assignment.placement
                known[alike] = (
                    save_s(call.role, placement, problem.model, trained) + dispatch_s,
                    evaluation_s(call.role, placement, problem.model) + dispatch_s
                    if call.role in problem.graph.evaluated
                    else 0.0,
                    classes.host_copy_s(most[2], within),
                    problem.model.moved_shares(call.role, s),
                    strategies[s, layout],
                    *_dealt(call, s),
                    (wires[within], len(stages), *most, layer, -(-model.shape.layers // s.pp)),
                )
                stages += zip(*by_stage, strict=True)
            saved_s, evaluated_s, copy_s, shares, strategy, last, distance, blocks, figures = known[alike]
            where, place = sides[option.first + last, distance, s.dp, blocks], places[option.first, s]
            seconds = option.seconds + call.chunks * dispatch_s
            place = (*mesh, *degrees, shares, option.onloaded, where, place, strategy)
            rows.append((seconds, saved_s, evaluated_s, copy_s, *place, *figures))
    slowest = np.array([classes.wires(within) for within in wires], np.float64)
    return _table(OPTION_ROW, rows), _table(STAGE_ROW, stages), np.array(list(sides), np.int64), slowest


def _dealt(call: ModelFunctionCall, s: ParallelStrategy) -> tuple[int, int, int]:
    """prefect_rlhf.planner.plan.build.where as numbers: (devices before the first head, distance of heads, number of
    blocks that are dealt separately). With the first device and dp they form a row of Arrays.sides."""
    blocks = (*dealing(call, s.dp, "count"), "1", "1")[1]
    return (s.pp - 1) * s.copies * s.tp, s.cp * s.tp if s.dp > 1 else 1, int(blocks)


class _Numbers(dict[Any, int]):
    """Numbers keys from 0, in the order in which they are first looked up."""

    def __missing__(self, key: object) -> int:
        self[key] = len(self)
        return self[key]


Pattern = tuple[int, dict[str, int], dict[str, int]]
"""The number of a pattern, call -> side, call -> placement."""


def _templates(
    problem: Problem,
    patterns: Iterable[Pattern],
    orders: Sequence[tuple[str, ...]],
    offloadable: Collection[str],
    deadline: Deadline,
) -> Templates:
    """The templates of patterns. offloadable: names of the calls that have options with onloads."""

    def refuse_late() -> None:
        if deadline.is_past():
            raise OptionsTakeTooLongError(
                f"Laying out the plans of the {len(graph.calls)} calls of {graph.name} takes longer than the time "
                "limit. Raise it."
            )

    graph = problem.graph
    found: dict[tuple, int] = {}
    different: list[PlanTemplate] = []
    of = np.full(n_patterns(graph), -1)
    moved = dict[
        tuple[str | int, ...], PlanTemplate
    ]()  # by sides: a few patterns of placements have the same
    for pattern, where, placement in patterns:
        refuse_late()
        sides = tuple(where.values())
        where = {**where, FETCHED: where[graph.source.name]}
        if sides not in moved:
            moved[sides] = with_transfers(graph, where, {})
        template = plan_template(graph, where, placement, offloaded=offloadable, moved=moved[sides])
        key = (
            tuple(template.slots.values()),
            *(frozenset(e[n]) for n in template.slots for e in (template.after, template.across)),
        )
        if key not in found:
            found[key] = len(different)
            different.append(template)
        of[pattern] = found[key]
    onloads = [[n for n, slot in template.slots.items() if slot.kind == "onload"] for template in different]
    # Edges of the same iteration, with a COPY slot after the template's own slots for each onload.
    before = [waits(template.after, own) for template, own in zip(different, onloads, strict=True)]
    n_slots = max(map(len, before))
    most = max(
        len(e) for edges in (*before, *(template.across for template in different)) for e in edges.values()
    )
    slots = np.zeros((len(different), n_slots), SLOT_ROW).view(np.recarray)
    after, across = (np.full((len(different), n_slots, most), -1) for _ in range(2))
    order = np.zeros((len(different), len(orders), n_slots), np.int16)
    rule = OrderRule(levels(graph), [node_order(graph, order) for order in orders])
    row_of = _SlotRows(problem)
    for i, template in enumerate(different):
        refuse_late()
        started_by = [template.slots[name] for name in onloads[i]]
        rows = [row_of[slot] for slot in template.slots.values()]
        rows += [(COPY, *row_of[slot][1:]) for slot in started_by]
        slots[i, : len(rows)] = rows
        place = {name: j for j, name in enumerate(before[i])}
        for table, edges in ((after, before[i]), (across, template.across)):
            for name, earlier in edges.items():
                if earlier:
                    table[i, place[name], : len(earlier)] = sorted(place[other] for other in earlier)
        places = with_trailing(template, rule.places(template))
        copies = places[:, [place[name] for name in onloads[i]]] + 1  # the place directly after their onloads
        order[i, :, : len(rows)] = np.hstack([places, copies]).argsort(axis=1)
    sizes = np.array([*map(len, before)])
    return Templates(of, sizes, slots, after, across, order, _table(TRANSFER_ROW, row_of.transfers))


class _SlotRows(dict[Slot, tuple[int, int, int, int, int]]):
    """Slot -> its SLOT_ROW. transfers: TRANSFER_ROW of its transfers -> their number."""

    def __init__(self, problem: Problem) -> None:
        self._graph, self._model = problem.graph, problem.model
        self._number = {call.name: i for i, call in enumerate(problem.graph.calls)}
        self.transfers = _Numbers()

    def __missing__(self, slot: Slot) -> tuple[int, int, int, int, int]:
        call, moved = self._number[slot.call], 0
        source = self._number[self._graph.source.name if slot.source == FETCHED else slot.source]
        mask = 1 << call
        if slot.kind in ("transfer", "reallocate", "sync"):
            mask |= 1 << source
        if slot.kind == "transfer":
            size_bytes, overhead_s = transfer_size(slot.keys, self._graph.n_seqs // slot.part.of, self._model)
            moved = self.transfers[size_bytes, overhead_s + self._model.classes.dispatch_s]
        kind = _KINDS.index(slot.kind) if slot.kind in _KINDS else OTHER
        self[slot] = kind, call, source, mask, moved
        return self[slot]


# A pattern says which calls have equal sides, and which calls of a trained role have equal placements. Its number has
# mixed radix. Each call has two digits: the first call with an equal side; and the first call of its role with an
# equal placement (frozen roles have no such digit). The last call's digits are the least significant.


def radices(graph: DataflowGraph) -> list[tuple[list[int], list[int]]]:
    """For each call: (candidates for the first call with an equal side, for the first one with an equal placement).

    The numbers of candidates are the radices of a pattern's digits.
    """
    names = [call.name for call in graph.calls]
    found = []
    for i, call in enumerate(graph.calls):
        trained = graph.trainer(call.role) is not None
        own = [names.index(c.name) for c in graph.calls[: i + 1] if c.role == call.role] if trained else [i]
        found.append((list(range(i + 1)), own))
    return found


def n_patterns(graph: DataflowGraph) -> int:
    """The number of patterns, including impossible ones."""
    return math.prod(len(sides) * len(places) for sides, places in radices(graph))


class _Common(dict[int, Set[tuple[int, int]]]):
    """Set of calls -> the values that all of them may have. Bit c of a set stands for call c. of_calls: [calls] the
    values that each may have"""

    def __init__(self, of_calls: Sequence[Set[tuple[int, int]]]) -> None:
        super().__init__((1 << call, values) for call, values in enumerate(of_calls))

    def __missing__(self, calls: int) -> Set[tuple[int, int]]:
        last = 1 << (calls.bit_length() - 1)
        self[calls] = self[calls ^ last] & self[last]
        return self[calls]


def _may_be(firsts: Sequence[int], common: _Common) -> bool:
    """Whether calls can have values of their own so that those with one first call, and only they, have the same.

    Calls whose values are certain are told apart; of the others only their number is looked at.
    """
    alike: dict[int, int] = {}
    for call, first in enumerate(firsts):
        alike[first] = alike.get(first, 0) | 1 << call
    values = [common[calls] for calls in alike.values()]
    certain = [of_calls for of_calls in values if len(of_calls) == 1]
    return (
        all(values)
        and len(set().union(*certain)) == len(certain)
        and (max(map(len, values)) >= len(values) or len(set().union(*values)) >= len(values))
    )


def _patterns(graph: DataflowGraph, rows: Rows, start: Ints) -> Iterator[Pattern]:
    """The patterns that options may have. rows, start: Arrays.options, Arrays.start."""
    names = [call.name for call in graph.calls]
    digits = radices(graph)
    own_sides = _Common([{(0, side) for side in rows["where"][a:b].tolist()} for a, b in pairwise(start)])
    # Only calls of one trained role are asked whether their placements are equal.
    own_places = _Common(
        [
            {(firsts[0], place) for place in rows["place"][a:b].tolist()}
            for (a, b), (_, firsts) in zip(pairwise(start), digits, strict=True)
        ]
    )

    def grow(number: int, sides: list[int], places: list[int]) -> Iterator[tuple[int, list[int], list[int]]]:
        i = len(sides)
        if i == len(names):
            yield number, sides, places
            return
        for a, side in enumerate(digits[i][0]):
            # A first call with an equal side is its own first one.
            if (side != i and sides[side] != side) or not _may_be([*sides, side], own_sides):
                continue
            for b, place in enumerate(digits[i][1]):
                if place in (i, *places) and _may_be([*places, place], own_places):
                    following = (number * len(digits[i][0]) + a) * len(digits[i][1]) + b
                    yield from grow(following, [*sides, side], [*places, place])

    for number, sides, places in grow(0, [], []):
        yield number, dict(zip(names, sides, strict=True)), dict(zip(names, places, strict=True))
