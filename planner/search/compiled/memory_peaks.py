"""The memory that devices and hosts lack under a choice of options, compiled: as planner.pricing.plans has it.

Common parameters: template, the number of the plan template; rows, [calls] int64 rows of options; chains, [slots]
int64, 0 for idle slots.
"""

import numpy as np

from prefect_rlhf.planner.search.compiled.arrays import (
    CALL,
    OFFLOAD,
    ONLOAD,
    REALLOCATE,
    RELEASE,
    SYNC,
    Arrays,
    Rows,
)
from prefect_rlhf.planner.search.compiled.compile import Bools, Floats, Ints, inner


@inner
def _counts(options: Rows, weights: Ints, rows: Ints, call: int) -> bool:
    """Whether a call's frozen bytes count: of the calls that share them at one placement, only the first one's do."""
    for other in range(call):
        there = options[rows[other]]
        if weights[other] == weights[call] and there.place == options[rows[call]].place and there.frozen > 0:
            return False
    return True


@inner
def excesses(arrays: Arrays, template: int, rows: Ints, chains: Ints) -> Floats:
    """[orders] float64: bytes that the fullest device lacks.

    Along the devices, the bytes held change only where a stage begins or a mesh ends, and at an end they only shrink.
    The memory available changes only where a run of another device class begins. So the first devices of all stages
    and of all runs stand for all devices.
    """
    worst = np.zeros(arrays.templates.order.shape[1])
    stage = np.empty(len(rows), np.int64)
    for c in range(len(rows)):
        option = arrays.options[rows[c]]
        for p in range(option.pp):
            _note_excess(
                arrays, template, rows, chains, option.first + p * option.dp * option.tp, stage, worst
            )
    for run in range(1, len(arrays.memories)):
        _note_excess(arrays, template, rows, chains, arrays.memories[run].first, stage, worst)
    return worst


@inner
def _note_excess(
    arrays: Arrays, template: int, rows: Ints, chains: Ints, device: int, stage: Ints, worst: Floats
) -> None:
    """Raises worst, [orders] missing bytes, to those of a device. stage: [calls] int64, working memory."""
    there = memory_of(arrays, device)
    resident, most = _stages_on(arrays, template, rows, chains, device, stage)
    if most > there:
        for order in range(len(worst)):
            worst[order] = max(worst[order], _peak(arrays, template, order, chains, stage, resident) - there)


@inner
def memory_of(arrays: Arrays, device: int) -> float:
    """Bytes of memory of a device."""
    return arrays.memories[_run_of(arrays, device)].bytes


@inner
def _run_of(arrays: Arrays, device: int) -> int:
    """The row of a device in Arrays.memories."""
    run = 0
    while run + 1 < len(arrays.memories) and arrays.memories[run + 1].first <= device:
        run += 1
    return run


@inner
def _stages_on(
    arrays: Arrays, template: int, rows: Ints, chains: Ints, device: int, stage: Ints
) -> tuple[float, float]:
    """Writes the row of each call's stage on a device to stage, [calls] int64; -1 if the device is not in its mesh.

    Returns (resident bytes, upper bound on the peak: resident bytes, all copies, and the largest call).
    """
    resident, copies, active = 0.0, 0.0, 0.0
    for c in range(len(rows)):
        option = arrays.options[rows[c]]
        stage[c] = -1
        if option.first <= device < option.first + option.size:
            # A stage has dp * tp consecutive devices; its rows are consecutive from option.stage on.
            stage[c] = option.stage + (device - option.first) // (option.dp * option.tp)
            active = max(active, arrays.stages[stage[c]].active)
            resident += arrays.stages[stage[c]].resident
            if _counts(arrays.options, arrays.weights, rows, c):
                resident += arrays.stages[stage[c]].frozen
    for i in range(arrays.templates.size[template]):
        slot = arrays.templates.slots[template, i]
        onloads = slot.kind == ONLOAD and arrays.options[rows[slot.call]].onloaded
        if stage[slot.call] < 0:
            continue
        if onloads and not chains[i]:
            resident += arrays.stages[stage[slot.call]].copy
        elif onloads or slot.kind == REALLOCATE or slot.kind == SYNC:
            copies += arrays.stages[stage[slot.call]].copy
    return resident, resident + copies + active


@inner
def _peak(arrays: Arrays, template: int, order: int, chains: Ints, stage: Ints, resident: float) -> float:
    """The most bytes that a device holds in an order. stage: as `_stages_on` writes it."""
    held, peak = resident, 0.0
    for j in range(arrays.templates.size[template]):
        i = arrays.templates.order[template, order, j]
        slot = arrays.templates.slots[template, i]
        at = stage[slot.call]
        if at < 0 or not chains[i]:
            continue
        if slot.kind == REALLOCATE or slot.kind == ONLOAD:
            held += arrays.stages[at].copy
            peak = max(peak, held)
        elif slot.kind == RELEASE or slot.kind == OFFLOAD:
            held -= arrays.stages[at].copy
        elif slot.kind == SYNC:
            peak = max(peak, held + arrays.stages[at].copy)
        elif slot.kind == CALL:
            peak = max(peak, held + arrays.stages[at].active)
    return peak


@inner
def host_excess(arrays: Arrays, template: int, rows: Ints, chains: Ints) -> float:
    """The most bytes that any host lacks; 0 if none lacks any.

    From one host to the next, the bytes kept grow only on a host where a stage begins, and on the host after it if
    the stage reaches over. Their memory changes where a run of another device class begins.
    """
    away = np.zeros(len(rows), np.bool_)  # whether parameters that train come and go
    for i in range(arrays.templates.size[template]):
        slot = arrays.templates.slots[template, i]
        if slot.kind == ONLOAD and chains[i] and arrays.trainer[slot.call] == slot.call:
            away[slot.call] = True
    most = 0.0
    for c in range(len(rows)):
        option = arrays.options[rows[c]]
        most += (option.host + away[c] * option.copy) * min(option.size, arrays.per_host)
    if most <= arrays.host_bytes:
        return 0.0
    worst = 0.0
    for c in range(len(rows)):
        option = arrays.options[rows[c]]
        for p in range(option.pp):
            first = option.first + p * option.dp * option.tp
            worst = max(worst, _host_lacks(arrays, rows, away, first // arrays.per_host))
            if first // arrays.per_host < (first + option.dp * option.tp - 1) // arrays.per_host:
                worst = max(worst, _host_lacks(arrays, rows, away, first // arrays.per_host + 1))
    for run in range(1, len(arrays.memories)):
        worst = max(worst, _host_lacks(arrays, rows, away, arrays.memories[run].first // arrays.per_host))
    return worst


@inner
def _host_lacks(arrays: Arrays, rows: Ints, away: Bools, host: int) -> float:
    """Bytes that a host lacks; negative if some are left. away: [calls] whether parameters that train come and go."""
    begin, kept = host * arrays.per_host, 0.0
    end = begin + arrays.per_host
    for c in range(len(rows)):
        option = arrays.options[rows[c]]
        width = option.dp * option.tp
        for p in range(max(0, (begin - option.first) // width), option.pp):
            first = option.first + p * width
            if first >= end:
                break
            there = min(end, first + width) - max(begin, first)
            if there > 0:
                stage = arrays.stages[option.stage + p]
                kept += there * (stage.host + away[c] * stage.copy)
    return kept - arrays.memories[_run_of(arrays, begin)].host
