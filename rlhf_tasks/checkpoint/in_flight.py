"""What a commit has in flight: samples drawn for iterations to come, or not to their end. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from rlhf_tasks.checkpoint.manifest import Manifest

DRAWN = "old_logprobs"  # the key that drawn samples have
NUMBER = "number"  # of samples drawn in segments: the key of their numbers; those of others are their ids
BEGUN = "left_number"  # the key of the number of the sample in each place; negative in a free one
GROUPS_BEGUN = "left_groups_begun"  # the key of the number of groups that were begun


class InFlight(NamedTuple):
    """The samples that a commit has in flight, by their numbers in the order of the run.

    drawn         they were drawn ahead of their training
    begun         they were begun in segments
    groups_begun  groups that were begun in segments, from the first one of the run on; 0: nothing is in segments
    keys          call -> the keys of its samples, in all its files; no call with a file that cannot be read: whoever
                  resumes from the commit refuses that
    """

    drawn: frozenset[int]
    begun: frozenset[int]
    groups_begun: int
    keys: Mapping[str, frozenset[str]]

    def if_let_go(self, first_sample: int, group_size: int) -> tuple[list[int], list[int]]:
        """The numbers of the prompts that are never learned from, and of those that are learned from twice, where the
        run goes on from a sample without these."""
        going = {number // group_size for number in self.drawn | self.begun}
        first = first_sample // group_size
        lost = sorted(prompt for prompt in going if prompt < first)
        return lost, [prompt for prompt in range(first, self.groups_begun) if prompt not in going]


def in_flight(step_folder: Path, manifest: Manifest) -> InFlight:
    """The samples that a commit has in flight. Files that cannot be read are left out."""
    drawn, begun, groups_begun = set[int](), set[int](), 0
    keys, damaged = dict[str, frozenset[str]](), set[str]()
    for stored in manifest.files:
        if stored.role in manifest.roles:
            continue
        try:
            with safe_open(step_folder / stored.file, "np") as file:
                tensors = file.keys()  # it is not a mapping
                names = frozenset(name.removesuffix("/ids") for name in tensors if name.endswith("/ids"))
                keys[stored.role] = keys.get(stored.role, frozenset()) | names
                if DRAWN in names:
                    ids, lengths = (file.get_tensor(f"{DRAWN}/{what}") for what in ("ids", "lengths"))
                    samples: list[int] = ids[lengths > 0].tolist()
                    numbers = _numbers(file) if NUMBER in names else {}
                    drawn.update(numbers.get(sample, sample) for sample in samples)
                if BEGUN in names:
                    in_places: np.ndarray = file.get_tensor(f"{BEGUN}/values")
                    begun.update(in_places[in_places >= 0].tolist())
                if GROUPS_BEGUN in names:
                    groups_begun = int(file.get_tensor(f"{GROUPS_BEGUN}/values").max())
        except (OSError, SafetensorError):
            damaged.add(stored.role)
    readable = {call: names for call, names in keys.items() if call not in damaged}
    return InFlight(frozenset(drawn), frozenset(begun), groups_begun, readable)


def _numbers(file: safe_open) -> dict[int, int]:
    """Id of a sample that ended in segments -> its number."""
    ids, numbers = (file.get_tensor(f"{NUMBER}/{what}").tolist() for what in ("ids", "values"))
    return dict(zip(ids, numbers, strict=True))
