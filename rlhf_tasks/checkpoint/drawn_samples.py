"""Samples that were drawn ahead of their training, in a commit: one safetensors file for each head that has some.

A file has, for each key, the packed values, the number of rows of each sample, and the samples' ids. So any other
layout can read it: a head reads the files of all, and keeps its own samples. Its header has the metrics of these
samples, which stand in the lines of the iterations that learn from them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, save

from rlhf_tasks.checkpoint.accepted_changes import samples_count
from rlhf_tasks.checkpoint.commits import step_folder
from rlhf_tasks.checkpoint.manifest import read_manifest
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, SampleStore
from rlhf_tasks.system.durable import ByteCount

_VALUES, _LENGTHS, _IDS = "values", "lengths", "ids"
_METRICS = "metrics"

IterationMetrics = Mapping[int, Mapping[str, float]]
"""Iteration -> metrics of a call on its samples."""


def packed_bytes(batches: Iterable[SampleBatch], metrics: IterationMetrics) -> bytes:
    """Batches of different keys, and the metrics of their samples, as the bytes of a file."""
    tensors = {}
    for batch in batches:
        for key, packed in batch.data.items():
            tensors[f"{key}/{_VALUES}"] = packed.values.detach().cpu().contiguous()
            tensors[f"{key}/{_LENGTHS}"] = torch.tensor(packed.lengths, dtype=torch.int64)
            tensors[f"{key}/{_IDS}"] = torch.tensor(batch.ids, dtype=torch.int64)
    return save(tensors, {_METRICS: json.dumps(metrics)})


def unpacked(data: bytes) -> list[SampleBatch]:
    """The batches that `packed_bytes` packed, one for each key."""
    tensors, found = load(data), []
    for key in sorted(name.removesuffix(f"/{_IDS}") for name in tensors if name.endswith(f"/{_IDS}")):
        lengths, ids = (tuple(tensors[f"{key}/{what}"].tolist()) for what in (_LENGTHS, _IDS))
        found.append(SampleBatch(ids, {key: Packed(tensors[f"{key}/{_VALUES}"], lengths)}))
    return found


class DrawnSamples:
    """The samples that a commit has for the iterations after it.

    ready         whether it has some that count (`samples_count`), else they are drawn again. It has none at step 0
    first_sample  global id of the first of them, where there are some
    moved         counts the bytes that are read
    """

    def __init__(self, run_folder: Path, step: int | None, calls: Sequence[str], moved: ByteCount) -> None:
        self._moved, self._files, self.first_sample = moved, dict[str, list[Path]](), 0
        if step and calls and samples_count(run_folder, step):
            folder = step_folder(run_folder, step)
            manifest = read_manifest(folder)
            self.first_sample = manifest.cursor
            self._files = {c: [folder / f.file for f in manifest.files if f.role == c] for c in calls}
        self.ready = bool(self._files) and all(self._files.values())

    def metrics(self, call: str) -> dict[int, dict[str, float]]:
        """The metrics of a call on the samples of the iterations to come, which all heads have."""
        with safe_open(self._files[call][0], "pt") as file:
            of_iterations = json.loads((file.metadata() or {}).get(_METRICS, "{}"))
        return {int(iteration): metrics for iteration, metrics in of_iterations.items()}

    def of(self, call: str) -> SampleStore:
        """All that the commit has of the samples of a call, from the files of all heads."""
        found = SampleStore()
        for path in self._files[call]:
            data = path.read_bytes()
            self._moved.add(len(data))
            for batch in unpacked(data):
                found.put(batch)
        return found
