"""The pieces in which a model's parameters move between two placements, compiled.

Parameters that are split alike are cut at the borders of the slices of both sides. So each piece has one set of ranks
that holds it, and one set of ranks that needs it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.compiled.compile import inner
from rlhf_tasks.parallel.layout.shape import Head, Lora, ModelShape
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement

Ints = NDArray[np.int64]

LAYER, FIRST, LAST, ENDS = range(4)  # ParameterSpec.place
PIECE = 8  # numbers per piece
WHOLE = -1  # the kind of parameters that are not sharded


class Parts(NamedTuple):
    """A model as reallocation sees it.

    entries   [entries, 4] int64: an entry is all parameters of one layer that are split alike; entries are in the
              order of their first parameters. Columns: place (LAYER ..), layer (-1 outside the layers), kind of split
              (row of `kinds`, or WHOLE), elements per row (if WHOLE: elements of all rows)
    kinds     [kinds, 3] int64 (total, group, unit): tp rank t holds the units floor(floor(t total / tp) / group) ..
              ceil(floor((t + 1) total / tp) / group) - 1, of `unit` rows each. In attention, a unit is a head of
              keys and values, which `group` query heads share, so several ranks may hold it; else group is 1
    layers    number of layers
    itemsize  bytes of an element
    """

    entries: Ints
    kinds: Ints
    layers: int
    itemsize: int


def parts(shape: ModelShape, head: Head, itemsize: int, lora: Lora | None = None) -> Parts:
    """The parts of a model, or of what `lora` trains. itemsize: bytes of an element."""
    whole = Layout(shape, head, Placement((0,), ParallelStrategy()), lora)
    places = {"layer": LAYER, "first": FIRST, "last": LAST, "ends": ENDS}
    totals = {"query_head": shape.query_heads, "column": shape.intermediate, "vocab": shape.vocab}
    kinds: dict[tuple[str, int, int], int] = {}
    entries: dict[tuple[int, int, int], int] = {}
    for spec in whole.parameters:
        kind = WHOLE
        if spec.unit is not None:
            kind = kinds.setdefault((spec.unit, spec.unit_size, spec.length), len(kinds))
        key = (places[spec.place], -1 if spec.layer is None else spec.layer, kind)
        entries[key] = entries.get(key, 0) + (spec.size if kind == WHOLE else spec.row_size)
    heads = shape.query_heads, shape.query_heads // shape.kv_heads
    splits = [(*(heads if unit == "kv_head" else (totals[unit], 1)), size) for unit, size, _ in kinds]
    return Parts(
        np.array([(*key, elements) for key, elements in entries.items()], np.int64),
        np.array(splits, np.int64),
        shape.layers,
        itemsize,
    )


@inner
def _stage(place: int, layer: int, layers: int, pp: int) -> int:
    """The stage that holds an entry; `pp` stands for both ends of a pipeline."""
    if place == LAYER:
        # Stage s begins at layer floor(s * layers / pp); this is the last s whose beginning is at most `layer`.
        return ((layer + 1) * pp - 1) // layers
    if place == FIRST or pp == 1:
        return 0
    return pp - 1 if place == LAST else pp


@inner
def _rows(kind: Ints, tp: int, rank: int) -> tuple[int, int]:
    """(first row, row after the last) of a tp rank. kind: a row of Parts.kinds."""
    # Rounded down at the start and up at the end: a rank holds each unit that any of its heads needs.
    total, group, unit = kind
    return rank * total // tp // group * unit, ((rank + 1) * total // tp + group - 1) // group * unit


@inner
def devices(side: Ints, stage: int, low: int, high: int, pool: Ints, n: int) -> int:
    """Writes the devices of a stage's tp ranks low .. high - 1, ascending, to pool[n:]; returns the new end.

    side   [4] int64: first device, dp, tp, pp
    stage  a stage, or pp for both ends
    """
    first, dp, tp, pp = side[0], side[1], side[2], side[3]
    for p in range(pp):
        if p == stage or (stage == pp and (p == 0 or p == pp - 1)):
            for d in range(dp):
                for t in range(low, high):
                    pool[n] = first + (p * dp + d) * tp + t  # placements are pp-major, then dp, then tp
                    n += 1
    return n


@inner
def _covering(kind: Ints, tp: int, start: int, stop: int) -> tuple[int, int]:
    """(first, last + 1) of the tp ranks that hold all rows start .. stop - 1; they are consecutive."""
    low, high = -1, 0
    for t in range(tp):
        first, after = _rows(kind, tp, t)
        if first <= start and stop <= after:
            if low < 0:
                low = t
            high = t + 1
    return low, high


@inner
def _cuts(kind: Ints, tp_a: int, tp_b: int, cuts: Ints) -> int:
    """Writes the different borders of both sides' slices, in rows, ascending; returns their number."""
    n = 0
    # i runs over both borders of every rank: first those of side a, then those of side b. Insertion sort.
    for i in range(2 * (tp_a + tp_b)):
        tp = tp_a if i < 2 * tp_a else tp_b
        cut = _rows(kind, tp, (i if i < 2 * tp_a else i - 2 * tp_a) // 2)[i % 2]
        at = n
        while at > 0 and cuts[at - 1] > cut:
            at -= 1
        if at == 0 or cuts[at - 1] != cut:
            for j in range(n, at, -1):
                cuts[j] = cuts[j - 1]
            cuts[at] = cut
            n += 1
    return n


@inner
def pieces(model: Parts, source: Ints, destination: Ints, out: Ints) -> tuple[int, int, int]:
    """Writes the pieces of all parameters to out, PIECE int64 numbers for each.

    They are: the source's stage, the destination's stage, elements per row, rows (0: whole parameters), and first and
    last + 1 of the tp ranks that hold the piece, of the source and of the destination.

    source, destination  [4] int64: first device, dp, tp, pp
    Returns (number of pieces, upper bounds on the devices and on the needs that reallocation_s lists for them).
    """
    cuts, n, n_devices, needs = np.empty(2 * (source[2] + destination[2]), np.int64), 0, 0, 0
    groups = np.empty((len(model.entries), 4), np.int64)
    for g in range(_groups(model, source[3], destination[3], groups)):
        kind, n_cuts = groups[g, 2], 2
        if kind != WHOLE:
            n_cuts = _cuts(model.kinds[kind], source[2], destination[2], cuts)
        for i in range(n_cuts - 1):
            at = PIECE * n
            out[at], out[at + 1], out[at + 2], out[at + 3] = groups[g, 0], groups[g, 1], groups[g, 3], 0
            low_a, high_a, low_b, high_b = 0, source[2], 0, destination[2]
            if kind != WHOLE:
                out[at + 3] = cuts[i + 1] - cuts[i]
                low_a, high_a = _covering(model.kinds[kind], source[2], cuts[i], cuts[i + 1])
                low_b, high_b = _covering(model.kinds[kind], destination[2], cuts[i], cuts[i + 1])
            out[at + 4], out[at + 5], out[at + 6], out[at + 7] = low_a, high_a, low_b, high_b
            # Twice dp, because both ends of a pipeline may have the piece. `_add_near` may list a device that needs
            # the piece twice. `_cut_into` cuts a need into at most 8 parts, or as many as it has holders: the holders
            # of one host in that host's need, and all of them again in the need of hosts without a holder.
            holders, wanters = 2 * source[1] * (high_a - low_a), 2 * destination[1] * (high_b - low_b)
            n_devices += holders + 2 * wanters
            needs += 2 * holders + 8 * (wanters + 1)
            n += 1
    return n, n_devices, needs


@inner
def _groups(model: Parts, pp_a: int, pp_b: int, out: Ints) -> int:
    """Merges entries that are split alike and are on the same stages of both sides. Returns the number of groups.

    out  [entries, 4] int64, output, in the order of the first entries: source's stage, destination's stage, kind,
         elements per row
    """
    n = 0
    number = np.full((pp_a + 1) * (pp_b + 1) * (len(model.kinds) + 1), -1)
    for i in range(len(model.entries)):
        place, layer, kind = model.entries[i, 0], model.entries[i, 1], model.entries[i, 2]
        a, b = _stage(place, layer, model.layers, pp_a), _stage(place, layer, model.layers, pp_b)
        # A stage is 0 .. pp, where pp stands for both ends; a kind is WHOLE = -1 or a row of `kinds`.
        key = (a * (pp_b + 1) + b) * (len(model.kinds) + 1) + kind + 1
        if number[key] < 0:
            number[key] = n
            out[n, 0], out[n, 1], out[n, 2], out[n, 3] = a, b, kind, 0
            n += 1
        out[number[key], 3] += model.entries[i, 3]
    return n
