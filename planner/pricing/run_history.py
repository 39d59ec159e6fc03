"""What earlier runs found of their calls: kept beside the measured profiles, and used to correct the next plan.

A profile predicts a call from its parts; a run shows the whole of it. Where the two drift apart by more than LIMIT,
the run's figures are kept, and the cost model goes by them (docs/adr/0006-measured-figures.md).
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pydantic import Field, TypeAdapter

from planner.plan.workload import RoleModel, Workload
from planner.pricing.device_classes import DeviceClasses
from planner.pricing.kept_figures import read_kept, write_kept
from rlhf_tasks.config.files import read_document
from rlhf_tasks.profiling.measurements import LEAST_S, MOST_BYTES, MOST_S
from rlhf_tasks.spec import CallAssignment, Frozen, ModelFunctionCall

LIMIT = 0.25
"""Measured seconds or bytes that are further from the planned ones than this share of them have drifted."""


class FiguresError(ValueError):
    """A file of measured figures that cannot be used: one sentence naming it."""


class RanCall(Frozen):
    """A call as it ran: under which assignment, its median seconds, and, where its memory drifted, the bytes beyond
    parameters that it took on the fullest device."""

    call: str
    assignment: CallAssignment
    seconds: float = Field(ge=LEAST_S, le=MOST_S, allow_inf_nan=False)
    active_bytes: float | None = Field(default=None, ge=0, le=MOST_BYTES, allow_inf_nan=False)


class Factor(NamedTuple):
    """What a price is multiplied by: a call's seconds, and its memory beyond parameters.

    added_s  seconds of a call that has no price (Python rewards of no stated cost): nothing multiplies that
    """

    seconds: float = 1.0
    memory: float = 1.0
    added_s: float = 0.0


LEAST_PRICE_S = 1e-9
"""A call of a shorter price has none."""

logger = logging.getLogger(__name__)
_FIGURES = TypeAdapter(tuple[RanCall, ...])


def drifted(planned: float, measured: float) -> bool:
    """Whether measured seconds or bytes are off the planned ones by more than LIMIT."""
    return abs(measured - planned) > LIMIT * planned


def figures_file(
    folder: Path,
    devices: DeviceClasses,
    models: Mapping[str, RoleModel],
    workload: Workload,
    calls: Iterable[ModelFunctionCall],
) -> Path:
    """Where the figures of runs of some calls lie. The name holds a hash of all that they depend on."""
    subject = {
        "devices": str(devices),
        "models": {role: [asdict(model.shape), model.head] for role, model in models.items()},
        "workload": workload.model_dump(mode="json"),
        "calls": [call.model_dump(mode="json") for call in calls],
    }
    digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
    return folder / f"ran-{digest[:16]}.json"


def read_figures(path: Path) -> tuple[RanCall, ...]:
    """The figures in a file; none where there is no file. Raises FiguresError."""
    if not path.exists():
        return ()
    return read_document(path, _FIGURES, "no measured figures of runs", FiguresError)


def keep_figures(path: Path, found: Sequence[RanCall]) -> None:
    """Add figures; those of the same call under the same assignment are replaced. Raises OSError."""
    before, warnings = read_kept(path, read_figures, ())
    for warning in warnings:
        logger.warning(warning)
    kept = {(ran.call, ran.assignment): ran for ran in (*before, *found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_kept(path, _FIGURES.dump_json(tuple(kept.values()), indent=1))


def factor_of(ran: RanCall, seconds: float, active_bytes: float) -> Factor:
    """What a run says of a call that was priced at so many seconds and bytes (of the fullest device)."""
    memory = 1.0 if ran.active_bytes is None or active_bytes < 1 else ran.active_bytes / active_bytes
    if seconds < LEAST_PRICE_S:
        return Factor(memory=memory, added_s=ran.seconds)
    return Factor(ran.seconds / seconds, memory)


def factor_elsewhere(factors: Collection[Factor]) -> Factor:
    """The factor of assignments that have not run, from those that have.

    Of times the geometric mean: twice too slow and twice too fast are no error on the whole. Of seconds without a
    price the mean. Of memory the largest, and never less than planned: too little of it ends a run, too much only
    makes a plan slower.
    """
    if not factors:
        return Factor()
    seconds = exp(fmean(log(factor.seconds) for factor in factors))
    added_s = fmean(factor.added_s for factor in factors)
    return Factor(seconds, max(1.0, *(factor.memory for factor in factors)), added_s)
