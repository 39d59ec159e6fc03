"""What the report of a run is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.flows.view.clocks import Span
from prefect_rlhf.flows.view.pictures.bars import Measured
from prefect_rlhf.flows.view.pictures.curves import Curve
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan


@dataclass(frozen=True, slots=True)
class Samples:
    """Some samples of one iteration (from 0), as the run wrote them."""

    iteration: int
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Contents:
    """What the page shows of one run; what the run has not written is empty.

    run, folder      its name and its folder
    algorithm        type of its configuration
    model            what it trains
    complete, total  iterations that are committed; None: unknown how many there should be
    ended            how the run has ended, in words
    curves           metric -> its values
    plan, nodes      the plan of the last iterations, and the seconds of its nodes
    lanes            label of devices -> their bars in the planned iteration, in seconds
    spans            of the last iterations, for the timeline
    looked_at        iterations (from 0) whose seconds were looked at, the first and the last
    work_s           rank -> kind of work, `waiting` or `overhead` -> seconds in these iterations
    summary          summary.json
    samples          early and late ones
    lineage          heading -> rows of a table
    configuration    YAML without secrets
    """

    run: str
    folder: str
    algorithm: str
    model: str
    complete: int
    total: int | None
    ended: str
    curves: Mapping[str, Curve]
    plan: ExecutionPlan | None
    nodes: Sequence[Measured]
    lanes: Mapping[str, Sequence[Span]]
    spans: Sequence[Span]
    looked_at: tuple[int, int]
    work_s: Mapping[int, Mapping[str, float]]
    summary: Mapping[str, Any]
    samples: Sequence[Samples]
    lineage: Mapping[str, Sequence[Mapping[str, Any]]]
    configuration: str
    versions: str
