"""Disk space: whether there is enough for a run's commits and exported model, checked before it starts; and whether
an error was caused by a full disk."""

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from rlhf_tasks.checkpoint.commits import step_folders
from rlhf_tasks.config.base import TrainingConfig
from rlhf_tasks.parallel.layout.shape import ModelShape, parameters, trained_parameters
from rlhf_tasks.protocol.commit import MOST_UNWRITTEN
from rlhf_tasks.system.durable import existing

FULL_BYTES = (
    1 << 20
)  # free; with less, the disk counts as full: SQLite and others report that in their own words
STATE_FLOATS = 3  # numbers per parameter in a commit: master weight and two moments (optimizer.py)


class DiskNeed(NamedTuple):
    """Bytes of one commit, the maximum number of commits at once, and bytes of the exported model."""

    commit_bytes: int
    commits: int
    export_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.commit_bytes * self.commits + self.export_bytes


NO_DISK = DiskNeed(0, 0, 0)


def disk_need(
    config: RunConfig, shapes: Mapping[str, ModelShape], iterations: int, itemsize: int
) -> DiskNeed:
    """The disk space that a run needs, without its journals and samples.

    shapes    role -> its model's shape
    itemsize  bytes of a parameter of the exported model
    """
    exports, sizes = dict[str, int](), dict[str, int]()
    roles = config.roles()
    for name, role in roles.items():
        if role.optimizer is not None:
            shape, lora = shapes[name], config.adapters_of(name, shapes[name])
            exports[name] = sizes[name] = sum(spec.size for spec in parameters(shape, role.head))
            if lora is not None:
                sizes[name] = sum(spec.size for spec in trained_parameters(shape, role.head, lora))
                exports[name] = sizes[name] if config.exports_adapters else exports[name]
    if not sizes:
        return NO_DISK
    followers = sum(sum(s.size for s in parameters(shapes[n], roles[n].head)) for n in config.follows)
    evaluation = config.evaluation if isinstance(config, TrainingConfig) else None
    best = 0 if evaluation is None else evaluation.keep_best
    state_itemsize = max(itemsize, 4)  # bfloat16 is trained in float32
    every = 1 if isinstance(config.snapshot_every, str) else config.snapshot_every
    written = -(-iterations // every) + 1  # at most, with step 0
    exported = exports.get("actor", next(iter(exports.values())))
    return DiskNeed(
        state_itemsize
        * (STATE_FLOATS * sum(sizes.values()) + followers),  # of followers master weights alone
        min(config.keep_last + best + MOST_UNWRITTEN, written),
        itemsize * exported,
    )


def refuse_full_disk(need: DiskNeed, place: Path) -> None:
    """Raises ConfigError when the disk of `place` has too little space for what the run will write.

    place  the run folder, whose existing commits count as space, or the folder in which it will be made
    """
    there_bytes = sum(path.stat().st_size for folder in step_folders(place) for path in folder.iterdir())
    needed_bytes = need.total_bytes - min(there_bytes, need.commit_bytes * need.commits)
    free_bytes = shutil.disk_usage(existing(place)).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{place} needs {needed_bytes} bytes and its disk has {free_bytes} free: {need.commits} commits of "
            f"{need.commit_bytes} bytes (keep_last, keep_best and two being written) and {need.export_bytes} for "
            "the exported model. Free some space, lower keep_last, or set output_dir to another disk."
        )


def full_disk(error: BaseException, folder: Path, needed_bytes: int | None = None) -> str | None:
    """A sentence with path and free bytes, if an error was caused by a full disk; else None.

    folder        the folder that the run writes to
    needed_bytes  bytes of what was being written; None where that is unknown
    """
    path, full = folder, False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            path, full = Path(cause.filename or folder), True
            break
        full = full or "No space left on device" in str(cause)
        cause = cause.__cause__ or cause.__context__
    free_bytes = shutil.disk_usage(existing(folder)).free
    if not full and free_bytes > FULL_BYTES:
        return None
    needs = "" if needed_bytes is None else f" needs {needed_bytes} bytes,"
    return f"No space left on device: {path}{needs} {free_bytes} are free. Free some space."
