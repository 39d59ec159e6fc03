"""How many samples a commit has in flight: drawn for iterations to come, or not to their end. Torch-free."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from rlhf_tasks.checkpoint.manifest import Manifest

DRAWN = "old_logprobs"  # the key that drawn samples have
BEGUN = "left_number"  # the key of the number of the sample in each place; negative in a free one


def in_flight(step_folder: Path, manifest: Manifest) -> tuple[int, int]:
    """(samples drawn ahead, samples that were begun) of a commit.

    Files that cannot be read are left out: whoever resumes from the commit refuses it.
    """
    drawn, begun = set[int](), set[int]()
    for stored in manifest.files:
        if stored.role in manifest.roles:
            continue
        try:
            with safe_open(step_folder / stored.file, "np") as file:
                names = set(file.keys())
                if f"{DRAWN}/ids" in names:
                    ids, lengths = (file.get_tensor(f"{DRAWN}/{what}") for what in ("ids", "lengths"))
                    drawn.update(ids[lengths > 0].tolist())
                if f"{BEGUN}/values" in names:
                    numbers: np.ndarray = file.get_tensor(f"{BEGUN}/values")
                    begun.update(numbers[numbers >= 0].tolist())
        except (OSError, SafetensorError):
            continue
    return len(drawn), len(begun)
