"""What every attempt must be told, for tests and benchmarks that are about something else."""

from typing import Any

from rlhf_tasks.config.cluster import Limits, RuntimeConfig
from rlhf_tasks.protocol.sequencer import Deadlines

DEADLINES = Deadlines(factor=10.0, floor_s=60.0)
STARTUP_S = 500.0  # that the workers of a busy machine may take


def limits(**changes: Any) -> Limits:
    """Limits of a test: those given, by their names in the configuration, and defaults."""
    runtime: dict[str, Any] = {"deadline_factor": DEADLINES.factor, "deadline_floor_s": DEADLINES.floor_s}
    runtime |= {name: changes.pop(name) for name in list(changes) if name in RuntimeConfig.model_fields}
    return Limits(
        runtime=RuntimeConfig(**runtime), **{"snapshot_every": 1, "snapshot_max_s": 1800.0} | changes
    )


def with_limits(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a `RunSpec`, in which limits may stand by their names in the configuration."""
    names = {*RuntimeConfig.model_fields, *Limits.model_fields} - {"runtime"}
    own = {name: value for name, value in options.items() if name in names}
    return {"limits": limits(**own)} | {name: value for name, value in options.items() if name not in names}
