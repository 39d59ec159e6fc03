"""Changes between two attempts of a run that its user has accepted: the lines of `accepted.jsonl`. Torch-free.

A run is resumed as its last commit left it. Any difference is refused (flows/run/run_identity.py) unless it is
recorded here. An accepted change drops the samples that the commit has in flight, for they may depend on it.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open

from rlhf_tasks.checkpoint.journals import JournalMarks
from rlhf_tasks.checkpoint.manifest import CheckpointError, Manifest
from rlhf_tasks.spec import Frozen
from rlhf_tasks.system.durable import append_lines

ACCEPTED = "accepted.jsonl"
DRAWN = "old_logprobs/lengths"  # of drawn samples: numbers of tokens
BEGUN = "left_number/values"  # of samples in segments: the number of the one in each place; negative in a free one


class Accepted(Frozen):
    """The changes that were accepted at a commit.

    step      of the commit that the run resumes from
    changes   a sentence for each change
    config    the run's configuration from now on
    journals  each journal -> the part of it that counts as committed, instead of that in the commit's manifest
    """

    step: int = Field(ge=0)
    changes: tuple[str, ...]
    config: dict[str, Any]
    journals: JournalMarks


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
    """Whether the samples that a commit has in flight still count: no change was accepted at this commit, nor at a
    later one, which was lost. Raises CheckpointError naming a damaged file."""
    return all(accepted.step < step for accepted in _read(run_folder, _lines(run_folder / ACCEPTED)))


def has_samples_in_flight(step_folder: Path, manifest: Manifest) -> bool:
    """Whether a commit has samples of iterations to come: drawn ahead of their training, or begun in segments. Files
    that cannot be read are left out."""
    for stored in manifest.files:
        if stored.role in manifest.roles:
            continue
        with suppress(OSError, SafetensorError), safe_open(step_folder / stored.file, "np") as file:
            names = set(file.keys())
            if DRAWN in names and file.get_tensor(DRAWN).any():
                return True
            if BEGUN in names and (file.get_tensor(BEGUN) >= 0).any():
                return True
    return False


def _read(run_folder: Path, lines: Sequence[str]) -> list[Accepted]:
    try:
        return [Accepted.model_validate_json(line) for line in lines]
    except ValidationError:
        raise CheckpointError(f"{run_folder / ACCEPTED} is not as the run wrote it. Put it back.") from None


def _lines(path: Path) -> list[str]:
    """The complete lines of the file. A last line without line end was not acknowledged, so it is ignored."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
