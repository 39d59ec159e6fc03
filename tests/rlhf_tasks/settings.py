"""What every attempt must be told, for tests and benchmarks that are about something else."""

from typing import Any

from prefect_rlhf.rlhf_tasks.config.cluster import Limits
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Deadlines

DEADLINES = Deadlines(factor=10.0, floor_s=60.0)
STARTUP_S = 500.0  # that the workers of a busy machine may take


def limits(**changes: Any) -> Limits:
    """Limits of a test: those given, and defaults."""
    made = Limits.of(snapshot_every=1, snapshot_max_s=1800.0)
    of_tests = {"deadline_factor": DEADLINES.factor, "deadline_floor_s": DEADLINES.floor_s}
    return Limits(**made.model_dump() | of_tests | changes)


def with_limits(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a `RunSpec`, among which limits may stand by their names."""
    own = {name: value for name, value in options.items() if name in Limits.model_fields}
    others = {name: value for name, value in options.items() if name not in own}
    return {"limits": limits(**own), **others}
