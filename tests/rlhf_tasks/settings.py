"""What every attempt must be told, for tests and benchmarks that are about something else."""

from rlhf_tasks.protocol.sequencer import Deadlines

DEADLINES = Deadlines(factor=10.0, floor_s=60.0)
SETTINGS = {
    "snapshot_every": 1,
    "snapshot_max_s": 1800.0,
    "io_floor_s": 300.0,
    "io_least_bytes_per_s": 1e6,
    "max_rebuilds": 3,
    "deadline_factor": DEADLINES.factor,
    "deadline_floor_s": DEADLINES.floor_s,
}
"""Fields of a `RunSpec`."""
STARTUP_S = 500.0  # that the workers of a busy machine may take
