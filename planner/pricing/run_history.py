"""Measured figures of calls from earlier runs: kept beside the profiles, and used to correct the next plan.

A profile predicts a call from its parts; a run measures it as a whole. If the two differ by more than LIMIT, the
run's figures are kept, and the cost model uses them (docs/adr/0006-measured-figures.md).
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import Field, TypeAdapter

from planner.plan.workload import RoleModel, Workload
from planner.pricing.device_classes import DeviceClasses
from planner.pricing.kept_figures import read_kept, write_kept
from rlhf_tasks.config.files import read_document
from rlhf_tasks.profiling.measurements import LEAST_S, MOST_BYTES, MOST_S
from rlhf_tasks.spec import CallAssignment, Frozen, ModelFunctionCall

LIMIT = 0.25
"""Measured seconds or bytes have drifted if they differ from the planned ones by more than this share of them."""


class FiguresError(ValueError):
    """A file of measured figures cannot be used; the message names it."""


class RanCall(Frozen):
    """A call as it ran.

    seconds       median of its durations; of a call that is cut, the mean over its parts
    active_bytes  memory beyond parameters on the fullest device, if it drifted; else None
    """

    call: str
    assignment: CallAssignment
    seconds: float = Field(ge=LEAST_S, le=MOST_S, allow_inf_nan=False)
    active_bytes: float | None = Field(default=None, ge=0, le=MOST_BYTES, allow_inf_nan=False)


class Factor(NamedTuple):
    """Corrects a price: factors on a call's seconds and on its memory beyond parameters.

    added_s  seconds added to a call whose price is 0 (Python rewards without a stated cost): no factor corrects that
    """

    seconds: float = 1.0
    memory: float = 1.0
    added_s: float = 0.0


LEAST_PRICE_S = 1e-9
"""A call with a price of fewer seconds counts as having no price."""

logger = logging.getLogger(__name__)
_FIGURES = TypeAdapter(tuple[RanCall, ...])


def drifted(planned: float, measured: float) -> bool:
    """Whether measured seconds or bytes differ from the planned ones by more than LIMIT."""
    return abs(measured - planned) > LIMIT * planned


def figures_file(
    folder: Path,
    devices: DeviceClasses,
    models: Mapping[str, RoleModel],
    workload: Workload,
    calls: Iterable[ModelFunctionCall],
) -> Path:
    """The path of the figures of runs of some calls. Its name contains a hash of everything they depend on."""
    subject = {
        "devices": str(devices),
        "models": {role: _described(model) for role, model in models.items()},
        "workload": workload.model_dump(mode="json"),
        "calls": [call.model_dump(mode="json") for call in calls],
    }
    digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
    return folder / f"ran-{digest[:16]}.json"


def _described(model: RoleModel) -> list[Any]:
    adapters = [] if model.lora is None else [asdict(model.lora)]
    return [asdict(model.shape), model.head, *adapters]


def read_figures(path: Path) -> tuple[RanCall, ...]:
    """The figures in a file; none if there is no file. Raises FiguresError."""
    if not path.exists():
        return ()
    return read_document(path, _FIGURES, "no measured figures of runs", FiguresError)


def keep_figures(path: Path, found: Sequence[RanCall]) -> None:
    """Add figures to a file; they replace those of the same call under the same assignment. Raises OSError."""
    before, warnings = read_kept(path, read_figures, ())
    for warning in warnings:
        logger.warning(warning)
    kept = {(ran.call, ran.assignment): ran for ran in (*before, *found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_kept(path, _FIGURES.dump_json(tuple(kept.values()), indent=1))


def factor_of(ran: RanCall, seconds: float, active_bytes: float) -> Factor:
    """The factor from a call's price (seconds; active_bytes of the fullest device) to what a run measured."""
    memory = 1.0 if ran.active_bytes is None or active_bytes < 1 else ran.active_bytes / active_bytes
    if seconds < LEAST_PRICE_S:
        return Factor(memory=memory, added_s=ran.seconds)
    return Factor(ran.seconds / seconds, memory)


def factor_elsewhere(factors: Collection[Factor]) -> Factor:
    """The factor for assignments that have not run, from the factors of those that have.

    seconds  geometric mean: one call twice too slow and one twice too fast cancel out
    added_s  mean
    memory   largest, at least 1: a plan with too little memory fails, one with too much is only slower
    """
    if not factors:
        return Factor()
    seconds = exp(fmean(log(factor.seconds) for factor in factors))
    added_s = fmean(factor.added_s for factor in factors)
    return Factor(seconds, max(1.0, *(factor.memory for factor in factors)), added_s)
