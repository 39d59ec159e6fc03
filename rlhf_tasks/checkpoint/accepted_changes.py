"""Changes between two attempts of a run that its user has accepted: the lines of `accepted.jsonl`. Torch-free.

A run is resumed as its last commit left it. Any difference is refused (flows/run/run_identity.py) unless it is
recorded here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from rlhf_tasks.checkpoint.journals import JournalMarks
from rlhf_tasks.checkpoint.manifest import CheckpointError
from rlhf_tasks.spec import Frozen
from rlhf_tasks.system.durable import append_lines

ACCEPTED = "accepted.jsonl"


class Accepted(Frozen):
    """The changes that were accepted at a commit.

    step          of the commit that the run resumes from
    changes       a sentence for each change
    config        the run's configuration from now on
    journals      each journal -> the part of it that counts as committed, instead of that in the commit's manifest
    samples_stay  whether the samples in flight still count, since they depend on nothing that has changed
    """

    step: int = Field(ge=0)
    changes: tuple[str, ...]
    config: dict[str, Any]
    journals: JournalMarks
    samples_stay: bool = False


def write_accepted(run_folder: Path, accepted: Accepted) -> None:
    """Append accepted changes to the file, and sync it. Raises OSError."""
    path = run_folder / ACCEPTED
    size_bytes = sum(len(line.encode()) + 1 for line in _lines(path))
    append_lines(path, size_bytes, [accepted.model_dump_json()])


def last_accepted(run_folder: Path) -> Accepted | None:
    """The changes accepted last; None if there are none. Raises CheckpointError naming a damaged file."""
    found = _read(run_folder, _lines(run_folder / ACCEPTED)[-1:])
    return found[0] if found else None


def samples_count(run_folder: Path, step: int) -> bool:
    """Whether the samples that a commit has in flight still count: the user has accepted no change on which they
    depend, neither at this commit nor at a later one, which was lost. Raises CheckpointError naming a damaged
    file."""
    accepted = _read(run_folder, _lines(run_folder / ACCEPTED))
    return all(each.samples_stay for each in accepted if each.step >= step)


def _read(run_folder: Path, lines: Sequence[str]) -> list[Accepted]:
    try:
        return [Accepted.model_validate_json(line) for line in lines]
    except ValidationError:
        raise CheckpointError(f"{run_folder / ACCEPTED} is not as the run wrote it. Put it back.") from None


def _lines(path: Path) -> list[str]:
    """The complete lines of the file. A last line without line end was not acknowledged, so it is ignored."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
