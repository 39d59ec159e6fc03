"""Exports a trained role of a commit to a Hugging Face folder, one parameter at a time, in one process."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.configurations import RunConfig, make_config
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError, Manifest, RoleRecord, verify
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import adapter_of, weight_files
from prefect_rlhf.rlhf_tasks.parallel.model.weights import FolderWriter, near_zero, opened, stored_rows
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import StateShard
from prefect_rlhf.rlhf_tasks.parallel.train.state_files import read_shards
from prefect_rlhf.rlhf_tasks.rank.role_engines import DTYPES

_ALONE = Placement((0,), ParallelStrategy())


def export_commit(
    commit: Path, config: RunConfig, role: str, folder: Path, merged: bool | None = None
) -> None:
    """Write a trained role of a commit as a Hugging Face folder, in the dtype of the run that committed.

    commit  a `step-NNNNNNNN` folder; it is verified first
    config  the run's; it names the model folder whose config, tokenizer and chat template are copied
    merged  whether adapters are added to the model's weights; False: they become a folder for peft; None: as the
            run's `lora.export` says. It does not matter for a role without adapters, and those of a role that
            began from an adapter's folder are always added
    Raises CheckpointError when the commit is incomplete or has no such role, FileExistsError when `folder` exists.
    """
    manifest = verify(commit)
    if role not in manifest.roles:
        raise CheckpointError(f"{commit} has the trained roles {sorted(manifest.roles)}, not {role!r}.")
    record, source = manifest.roles[role], Path(config.roles()[role].folder)
    dtype = DTYPES[manifest.config["dtype"]]  # not the configuration's, which may be `auto`
    trained = Layout(record.shape, record.head, _ALONE, record.lora)
    stored = torch.float64 if dtype == torch.float64 else torch.float32  # of master weights
    arriving = _masters(commit, manifest, role, trained, stored)
    merge = not config.exports_adapters if merged is None else merged
    merge = merge or adapter_of(source) is not None  # peft takes no adapter of an adapter
    if merge and record.lora is not None:
        trained, arriving = trained.whole, _merged(record, source, arriving, stored)
    writer = FolderWriter(folder, source, trained, dtype)
    for name, whole in arriving:
        writer.add(name, whole.to(dtype))
    writer.close()


def export_written(commit: Path, document: Mapping[str, Any], role: str, folder: Path) -> None:
    """`export_commit` in another process: the configuration comes as the document that it is written down as."""
    export_commit(commit, make_config(document), role, folder)


def _masters(
    commit: Path, manifest: Manifest, role: str, layout: Layout, stored: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole master weights) of all that a role trains, in the layout's order."""
    files = [commit / file.file for file in manifest.files if file.role == role]
    wanted = (
        StateShard(spec.name, "master", 0, spec.size, torch.empty(spec.size, dtype=stored))
        for spec in layout.parameters
    )
    for shard in read_shards(files, manifest.roles[role].layout, layout, 0, wanted):
        yield shard.name, shard.tensor.view(layout.specs[shard.name].shape)


def _merged(
    record: RoleRecord, source: Path, adapters: Iterator[tuple[str, Tensor]], stored: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole weight) of the model in `source` with the adapters added: W + alpha / rank * B A.

    adapters  A and B of every target, and a scalar head, in the order of the model's parameters
    """
    layout, lora = Layout(record.shape, record.head, _ALONE), record.lora
    assert lora is not None
    with opened(weight_files(source, layout.parameters, needs_head=False)) as tensors:
        for spec in layout.parameters:
            if spec.name == "score.weight":
                yield next(adapters)
                continue
            read = stored_rows(tensors, spec, Interval(0, spec.length))
            weight = near_zero(read, spec, stored).to(stored)
            if spec.is_linear and spec.module in lora.targets:
                (_, a), (_, b) = next(adapters), next(adapters)
                weight += lora.scaling * (b @ a)
            yield spec.name, weight
