"""Exports a trained role of a commit to a Hugging Face folder, one parameter at a time, in one process."""

from pathlib import Path

import torch

from rlhf_tasks.algorithms.configurations import RunConfig
from rlhf_tasks.checkpoint.manifest import CheckpointError, RoleRecord, verify
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.model.export import FolderWriter
from rlhf_tasks.parallel.state.files import read_shards
from rlhf_tasks.parallel.train.optimizer import StateShard
from rlhf_tasks.rank.role_engines import DTYPES

_ALONE = Placement((0,), ParallelStrategy())


def export_commit(commit: Path, config: RunConfig, role: str, folder: Path) -> None:
    """Write a trained role of a commit as a Hugging Face folder, in the run's dtype.

    commit  a `step-NNNNNNNN` folder; it is verified first
    config  the run's; it names the model folder whose config, tokenizer and chat template are copied
    Raises CheckpointError when the commit is incomplete or has no such role, FileExistsError when `folder` exists.
    """
    manifest = verify(commit)
    if role not in manifest.roles:
        raise CheckpointError(f"{commit} has the trained roles {sorted(manifest.roles)}, not {role!r}.")
    record: RoleRecord = manifest.roles[role]
    whole = Layout(record.shape, record.head, _ALONE)
    dtype = DTYPES[config.dtype]
    stored = torch.float64 if dtype == torch.float64 else torch.float32  # of master weights
    wanted = (
        StateShard(spec.name, "master", 0, spec.size, torch.empty(spec.size, dtype=stored))
        for spec in whole.parameters
    )
    files = [commit / file.file for file in manifest.files if file.role == role]
    writer = FolderWriter(folder, Path(config.roles()[role].folder), whole, dtype)
    for shard in read_shards(files, record.layout, whole, 0, wanted):
        writer.add(shard.name, shard.tensor.view(whole.specs[shard.name].shape).to(dtype))
    writer.close()
