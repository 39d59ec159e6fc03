"""A rank's part in checkpoints: copies what changes to host memory, writes it in the background, restores it.

Drawn samples are those of iterations to come, drawn ahead of their training: one safetensors file for each head that
has some. A file has, for each key, the packed values, the number of rows of each sample, and the samples' ids. So any
other layout can read it: a head reads the files of all, and keeps its own samples. Its header has their metrics,
which stand in the lines of the iterations that learn from them.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from prefect_rlhf.rlhf_tasks.checkpoint.changes import samples_count
from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder, unfinished_folder
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    PartReport,
    RoleRecord,
    StoredFile,
    read_manifest,
)
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.parallel.comm.checksums import require_same
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, all_reduce
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import host_copies
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import MasterWeights, StateShard
from prefect_rlhf.rlhf_tasks.parallel.train.state_files import (
    Written,
    pieces_of,
    read_shards,
    read_sums,
    state_size_bytes,
    state_sums,
    sum_keys,
    write_checked,
    write_shards,
)
from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec, SavedPart
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount, NotWritable, explained, refuse_full, sync
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, at, reach
from prefect_rlhf.rlhf_tasks.system.invariants import require

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


class ChangingRole(Protocol):
    """The parts of an engine that a checkpoint needs: all that changes during a run."""

    layout: Layout
    groups: ProcessGroups
    master: MasterWeights | None
    version: int
    state: dict[str, Any]


class SnapshotWriter:
    """Saves the roles of one rank whose weights change, in one generation.

    on_saved  called from the writing thread, once per `save`, when the part is durable or has failed; perhaps not for
              the last part of an aborted generation
    moved     counts the bytes that are durable and checked
    """

    def __init__(
        self,
        spec: GenerationSpec,
        on_saved: Callable[[SavedPart], None],
        moved: ByteCount | None = None,
    ) -> None:
        self._spec = spec
        self._on_saved = on_saved
        self._moved = moved
        self._given_up = Event()
        self._written: dict[str, list[list[Tensor]]] = defaultdict(list)  # role -> pinned copies, free again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")

    def save(self, role: str, engine: ChangingRole, step: int) -> None:
        """Copy a role's state to host memory and write the copy in the background.

        The caller waits only for the copy. Saves are written in the order of the calls. Pinned copies are kept and
        used again; others are freed when they are written.
        """
        assert engine.master is not None, f"role {role!r} does not change here: there is nothing to save"
        state, free = list(engine.master.shard_state()), self._written[role]
        of_state, layout = state_sums(engine.layout, self._spec.rank, state), engine.layout
        copies = host_copies([shard.tensor for shard in state], free.pop() if free else ())
        shards = [shard._replace(tensor=copy) for shard, copy in zip(state, copies, strict=True)]
        record = RoleRecord(
            version=engine.version,
            optimizer_step=engine.master.step,
            state=dict(engine.state),
            shape=engine.layout.shape,
            head=engine.layout.head,
            placement=engine.layout.placement,
            lora=engine.layout.lora,
        )
        path, rank, copied = self._path(role, step), self._spec.rank, record.model_copy(deep=True)
        reach(Point.SAVE)

        def write() -> Written:
            try:
                sent, arrived = of_state.flatten().cpu(), state_sums(layout, rank, shards).flatten()
                require_same(f"{role!r} of rank {rank} to host memory", sum_keys(layout), sent, arrived)
                sums = {key: one for key, one in zip(sum_keys(layout), sent.tolist(), strict=True) if one}
                return write_shards(path, rank, shards, self._moved, self._given_up, sums)
            finally:
                if any(copy.is_pinned() for copy in copies):
                    free.append(copies)

        self._in_background(write, path, role, copied, state_size_bytes(shards), step)

    def save_samples(
        self, call: str, batches: Sequence[SampleBatch], metrics: IterationMetrics, step: int
    ) -> None:
        """Copy samples that a call has made for later iterations, with their metrics, and write the copy in the
        background, as `save`."""
        data, path = packed_bytes(batches, metrics), self._path(call, step)

        def write() -> Written:
            return write_checked(path, pieces_of(data), self._moved, self._given_up)

        self._in_background(write, path, call, None, len(data), step)

    def _in_background(
        self,
        write: Callable[[], Written],
        path: Path,
        role: str,
        record: RoleRecord | None,
        size_bytes: int,
        step: int,
    ) -> None:
        writing = self._thread.submit(self._write, write, path, role, record, size_bytes, step)
        # Not add_done_callback: if the write has already ended, the callback would run in the caller's thread.
        self._thread.submit(self._report, writing, path, size_bytes, role, step)

    def close(self, wait: bool = True) -> None:
        """End the thread after all its parts. With wait=False (nobody needs them any more) do not wait for it, and
        write no part to its end: a part may take minutes."""
        if not wait:
            self._given_up.set()
        self._thread.shutdown(wait=wait, cancel_futures=not wait)

    def _path(self, role: str, step: int) -> Path:
        """The file of a part. Its name includes the generation, so that an aborted generation that still writes
        cannot overwrite a file of this one."""
        spec = self._spec
        folder = unfinished_folder(Path(spec.run_folder), step, spec.attempt)
        return folder / f"{role}.rank-{spec.rank:05d}.gen-{spec.generation}.safetensors"

    def _write(
        self,
        write: Callable[[], Written],
        path: Path,
        role: str,
        record: RoleRecord | None,
        size_bytes: int,
        step: int,
    ) -> PartReport:
        spec = self._spec
        with at(spec.rank, step - 1, spec.generation, spec.attempt):
            path.parent.mkdir(parents=True, exist_ok=True)
            refuse_full(path, size_bytes)
            written = write()
            reach(Point.SHARD_SYNCED)
            sync(path.parent)
            reach(Point.PART_DURABLE)
        stored = StoredFile(role=role, file=path.name, **written._asdict())
        return PartReport(stored=stored, record=record)

    def _report(self, done: Future[PartReport], path: Path, needed_bytes: int, role: str, step: int) -> None:
        """Report the end of a save, successful or not."""
        error = done.exception()
        if isinstance(error, OSError):
            error = explained(error, path, needed_bytes)
            reason = str(error)
        else:
            reason = "" if error is None else f"{type(error).__name__}: {error}"
        spec = self._spec
        part = SavedPart(
            run=spec.run,
            attempt=spec.attempt,
            generation=spec.generation,
            step=step,
            role=role,
            rank=spec.rank,
            details={} if error else done.result().model_dump(mode="json"),
            error=reason,
            lasting=isinstance(error, NotWritable),
        )
        self._on_saved(part)


def restore(
    role: str, engine: ChangingRole, run_folder: Path, step: int, moved: ByteCount | None = None
) -> None:
    """Restore a role from a commit: weights, moments, version and state, saved in any layout.

    moved  counts the bytes that are read

    The commit must have been verified (`latest_commit`). Collective over the engine's placement.
    Raises CheckpointError when the commit lacks the role or has another model, ValueError when it lacks elements,
    InvariantError, on every rank, where other bits arrive than those that a device had when it was written.
    """
    assert engine.master is not None, f"role {role!r} does not change here: there is nothing to restore"
    folder, layout = step_folder(run_folder, step), engine.layout
    manifest = read_manifest(folder)
    record = _stored_role(role, layout, manifest, folder)
    files = [folder / stored.file for stored in manifest.files if stored.role == role]
    reach(Point.RESTORE)
    wanted = engine.master.shard_state()
    shards = read_shards(files, record.layout, layout, engine.groups.rank, wanted)
    engine.master.load_shard_state(_counted(shards, moved or ByteCount()), record.optimizer_step)
    engine.version, engine.state = record.version, dict(record.state)
    _require_as_saved(f"restoring {role!r} from {folder}", engine, files)


def _require_as_saved(what: str, engine: ChangingRole, files: Sequence[Path]) -> None:
    """Compare the checksums of a role's state with those of before it was written: whatever the layouts, they are
    equal. Collective over the engine's placement."""
    written, layout, groups = read_sums(files), engine.layout, engine.groups
    if written is None or engine.master is None:
        return
    devices = layout.placement.devices
    here = state_sums(layout, groups.rank, engine.master.shard_state())
    arrived, keys = all_reduce(here, groups[devices]).flatten(), sum_keys(layout)
    sent = [(written[key] + 2**63) % 2**64 - 2**63 for key in keys]
    expected = torch.tensor(sent, dtype=torch.int64, device=arrived.device)
    require_same(f"{what} to ranks {list(devices)}", keys, expected, arrived)


def _counted(shards: Iterable[StateShard], moved: ByteCount) -> Iterator[StateShard]:
    """The same shards; counts the bytes of each."""
    for shard in shards:
        moved.add(shard.tensor.nbytes)
        yield shard


def _stored_role(role: str, layout: Layout, manifest: Manifest, folder: Path) -> RoleRecord:
    """A role's record in a commit. Raises CheckpointError when the commit lacks the role or has another model."""
    if role not in manifest.roles:
        raise CheckpointError(f"{folder} has the roles {sorted(manifest.roles)}, not {role!r}.")
    record = manifest.roles[role]
    difference = record.shape.difference(layout.shape)
    if record.head != layout.head:
        difference["head"] = (record.head, layout.head)
    if record.lora != layout.lora:
        difference["lora"] = (record.lora, layout.lora)
    if difference:
        changes = ", ".join(f"{name} {saved} (now {ours})" for name, (saved, ours) in difference.items())
        raise CheckpointError(
            f"{folder}: the saved {role!r} has another shape: {changes}. Name the original model folder."
        )
    return record


class DrawnSamples:
    """The samples that a commit has for the iterations after it.

    ready         whether it has some that count (`samples_count`), else they are drawn again. It has none at step 0
    first_sample  global id of the first of them, where there are some
    moved         counts the bytes that are read
    """

    def __init__(self, run_folder: Path, step: int | None, calls: Sequence[str], moved: ByteCount) -> None:
        self._moved, self._files, self.first_sample = moved, dict[str, list[Path]](), 0
        self._sha256 = dict[str, str]()
        if step and calls and samples_count(run_folder, step):
            folder = step_folder(run_folder, step)
            manifest = read_manifest(folder)
            self.first_sample = manifest.cursor
            self._sha256 = {stored.file: stored.sha256 for stored in manifest.files}
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
            require(
                hashlib.sha256(data).hexdigest() == self._sha256[path.name],
                f"samples of {call} from {path} have other bits than those that were written",
            )
            for batch in unpacked(data):
                found.put(batch)
        return found
