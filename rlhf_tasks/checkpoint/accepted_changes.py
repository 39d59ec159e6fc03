"""Changes between two attempts of a run that its user has said are wanted, one line of `accepted.jsonl` each.

A run goes on as its last commit left it: whatever differs is refused (flows/run/run_identity.py) until it stands
here.
Torch-free.
"""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from rlhf_tasks.checkpoint.journals import JournalMarks
from rlhf_tasks.checkpoint.manifest import CheckpointError
from rlhf_tasks.spec import Frozen
from rlhf_tasks.system.durable import append_lines

ACCEPTED = "accepted.jsonl"


class Accepted(Frozen):
    """What was accepted at a commit.

    step      of the commit that the run goes on from
    changes   a sentence for each
    config    the run's configuration from here on
    journals  each journal -> what of it counts as committed, in place of what the commit's manifest says
    """

    step: int = Field(ge=0)
    changes: tuple[str, ...]
    config: dict[str, Any]
    journals: JournalMarks


def write_accepted(run_folder: Path, accepted: Accepted) -> None:
    """Write down, durably, what was accepted. Raises OSError."""
    path = run_folder / ACCEPTED
    size_bytes = sum(len(line.encode()) + 1 for line in _lines(path))
    append_lines(path, size_bytes, [accepted.model_dump_json()])


def last_accepted(run_folder: Path) -> Accepted | None:
    """What was accepted last, if anything. Raises CheckpointError naming a file that is not as it was written."""
    path = run_folder / ACCEPTED
    lines = _lines(path)
    try:
        return Accepted.model_validate_json(lines[-1]) if lines else None
    except ValidationError:
        raise CheckpointError(f"{path} is not as the run wrote it. Put it back.") from None


def _lines(path: Path) -> list[str]:
    """The whole lines of the file: one without its end was never counted on."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
