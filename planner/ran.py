"""What earlier runs found of their calls: kept beside the measured profiles, and used to correct the next plan.

A profile predicts a call from its parts; a run shows the whole of it. Where the two drift apart by more than LIMIT,
the run's figures are kept, and the cost model goes by them (docs/adr/0006-measured-figures.md).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import fmean

from pydantic import Field, TypeAdapter, ValidationError

from planner.device_classes import DeviceClasses
from planner.workload import RoleModel, Workload
from rlhf_tasks.spec import CallAssignment, Frozen, ModelFunctionCall

LIMIT = 0.25
"""A measured time that is further from the planned one than this share of it has drifted."""


class FiguresError(ValueError):
    """A file of measured figures that cannot be used: one sentence naming it."""


class RanCall(Frozen):
    """A call as it ran: under which assignment, and its median seconds."""

    call: str
    assignment: CallAssignment
    seconds: float = Field(gt=0)


_FIGURES = TypeAdapter(tuple[RanCall, ...])


def drifted(planned: float, measured: float) -> bool:
    """Whether a measured time is off the planned one by more than LIMIT."""
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
    try:
        return _FIGURES.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise FiguresError(
            f"{path} holds no measured figures of runs. Remove it, and plans go by profiles alone."
        ) from None


def keep_figures(path: Path, found: Sequence[RanCall]) -> None:
    """Add figures; those of the same call under the same assignment are replaced. The file appears whole."""
    kept = {(ran.call, ran.assignment): ran for ran in (*read_figures(path), *found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(_FIGURES.dump_json(tuple(kept.values()), indent=1))
    partial.replace(path)


def mean_factor(factors: Iterable[float]) -> float:
    """The geometric mean: twice too slow and twice too fast are no error on the whole."""
    return exp(fmean(map(log, factors)))
