"""A train call as an anomaly has left it, on disk: what `prefect-rlhf replay` computes again. Torch-free.

RUN/anomalies/ROLE-iteration-NNNNNNNN has one safetensors file of each rank with its part of the role's state before
the first step that was an anomaly (as in a commit), one of each replica's head with its samples, and a manifest.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError, Contents, RoleRecord, verify

ANOMALIES = "anomalies"
SCHEMA = 1


class Dump(Contents):
    """The manifest of a dump.

    version        of prefect-rlhf, which alone computes the call as it was; torch: of torch
    anomaly        a sentence
    call, role, iteration, first_sample, n_seqs, micro_batches  as in `CallContext`; micro_batches of one replica
    tokens         of the tokenizer (`Engine.tokens`)
    before         the role's state (`Engine.state`) when the call began
    record         the role at the dump, and where its tensors are
    n_before       steps of the call before the dump: the tensors are those after them
    steps          the report of each step of the call, in order (`Engine.train_step`)
    metrics        of the call; none where it has not ended
    config         the run's configuration
    """

    schema_version: int = SCHEMA
    version: str
    torch: str
    run: str
    anomaly: str
    call: str
    role: str
    iteration: int = Field(ge=0)
    first_sample: int = Field(ge=0)
    n_seqs: int = Field(gt=0)
    micro_batches: int = Field(gt=0)
    tokens: int | None
    before: dict[str, Any]
    record: RoleRecord
    n_before: int = Field(ge=0)
    steps: tuple[dict[str, float], ...]
    metrics: dict[str, float]
    config: dict[str, Any]


def dump_folder(run_folder: Path, role: str, iteration: int) -> Path:
    """The folder of a dump."""
    return run_folder / ANOMALIES / f"{role}-iteration-{iteration:08d}"


def dumps_of(run_folder: Path, role: str = "*") -> list[Path]:
    """The folders of a run's dumps, of one role or of all."""
    return sorted((run_folder / ANOMALIES).glob(f"{role}-iteration-????????"))


def read_dump(folder: Path, version: str) -> Dump:
    """A dump whose files have all been checked.

    version  of prefect-rlhf here
    Raises CheckpointError naming the file that is missing, has changed, or is of another version.
    """
    dump = verify(folder, Dump)
    if dump.version != version:
        raise CheckpointError(
            f"{folder} was written by prefect-rlhf {dump.version}, and this is {version}, which may compute other "
            f"values. Replay it with that version."
        )
    return dump
