"""Writes a train call down where an anomaly is met, so that `prefect-rlhf replay` can compute it again.

A run has one dump of each role that trains: of its first anomaly. A step that is an anomaly has not changed anything,
so the weights are those before it when it is known. What cannot be written ends no run.
"""

import copy
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallFunction, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.guards import Record, guarded
from prefect_rlhf.rlhf_tasks.checkpoint.dumps import Dump, dump_folder, dumps_of
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import RoleRecord, StoredFile, write_manifest
from prefect_rlhf.rlhf_tasks.checkpoint.snapshots import packed_bytes
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import all_reduce
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import host_copies
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.parallel.train.state_files import (
    Written,
    pieces_of,
    state_size_bytes,
    write_checked,
    write_shards,
)
from prefect_rlhf.rlhf_tasks.spec import ModelFunctionCall
from prefect_rlhf.rlhf_tasks.system.durable import refuse_full, sync

MOST_BYTES = 8 << 30
"""Of a rank's part of a dump: a disk that writes 100 MB/s has it within the least deadline of a call, 120 s."""

PACKAGE = "prefect-rlhf"

logger = logging.getLogger(__name__)


def train(
    function: CallFunction,
    engine: Engine,
    call: ModelFunctionCall,
    batch: SampleBatch,
    context: CallContext,
    run: str,
) -> CallOutput:
    """Run a train call's function; an anomaly in it is written down, and acted on as the configuration says.

    batch  of this replica
    Collective over the mesh. Raises AnomalyError where an anomaly ends the run, on all ranks.
    """
    record = TrainRecord(engine, call, batch, context, run)
    context = replace(context, record=record)
    with guarded(engine, call.role, context):
        output = function(engine, batch, context)
    record.end(output.metrics)
    return output


class TrainRecord(Record):
    """One rank's record of one train call. The arguments are as in `train`."""

    def __init__(
        self, engine: Engine, call: ModelFunctionCall, batch: SampleBatch, context: CallContext, run: str
    ) -> None:
        self._engine, self._call, self._batch, self._context, self._run = engine, call, batch, context, run
        self._before = copy.deepcopy(engine.state)
        self._steps: list[dict[str, float]] = []
        self._dump: Dump | None = None
        self._is_tried = False
        self._folder = dump_folder(context.run_folder, call.role, context.iteration)
        self._unfinished = self._folder.with_name(f"{self._folder.name}.tmp")
        self._is_lead = engine.groups.rank == engine.placement.devices[0]

    def stepped(self, report: Mapping[str, float]) -> None:
        self._steps.append(dict(report))

    def dump(self, anomaly: str) -> Path | None:
        """Write this rank's part, if this is the role's first anomaly. Where it stops the run, also the manifest."""
        if not self._is_tried:
            self._is_tried = True
            self._begin(anomaly)
        config = self._context.config
        assert isinstance(config, TrainingConfig)
        if config.on_anomaly == "stop":
            self.end({})
        return self._folder if self._dump is not None or self._folder.exists() else None

    def end(self, metrics: Mapping[str, float]) -> None:
        """The call has ended, with these metrics: write the manifest of a dump that has begun."""
        if self._dump is None:
            return
        failed = ""
        if self._is_lead:
            whole = {"steps": tuple(self._steps), "metrics": dict(metrics)}
            try:
                whole["files"] = _take_files(self._unfinished)
                write_manifest(self._unfinished, self._dump.model_copy(update=whole))
                os.rename(self._unfinished, self._folder)
                sync(self._folder.parent)
            except (OSError, ValueError) as error:
                failed = repr(error)
        if self._has_failed(failed):
            self._dump = None

    def _begin(self, anomaly: str) -> None:
        """Write this rank's part of the dump, unless there is one of the role."""
        if self._is_lead:
            for left in self._folder.parent.glob(f"{self._call.role}-iteration-*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
        if self._on_any(self._is_lead and bool(dumps_of(self._context.run_folder, self._call.role))):
            return
        failed = ""
        try:
            self._write_parts()
        except Exception as error:  # also of memory: the other ranks wait for this one
            logger.exception("this rank's part of the anomaly is not written")
            failed = repr(error)
        if self._has_failed(failed):
            return
        engine, context = self._engine, self._context
        assert engine.optimizer is not None
        is_step = bool(self._steps) and bool(self._steps[-1]["skipped"])
        self._dump = Dump(
            version=version(PACKAGE),
            torch=torch.__version__,
            run=self._run,
            anomaly=anomaly,
            call=self._call.name,
            role=self._call.role,
            iteration=context.iteration,
            first_sample=context.first_sample,
            n_seqs=context.n_seqs,
            micro_batches=context.micro_batches,
            tokens=engine.drawn.tokens,
            before=self._before,
            record=RoleRecord(
                version=engine.version,
                optimizer_step=engine.optimizer.step,
                state=copy.deepcopy(engine.state),
                shape=engine.layout.shape,
                head=engine.layout.head,
                placement=engine.layout.placement,
                lora=engine.layout.lora,
            ),
            n_before=len(self._steps) - is_step,
            steps=(),
            metrics={},
            config=context.config.model_dump(mode="json"),
            files=(),
        )

    def _has_failed(self, failed: str) -> bool:
        """Whether any rank has failed, which leaves nothing. failed: why this one has; "" where it has not."""
        if not self._on_any(bool(failed)):
            return False
        if self._is_lead:
            shutil.rmtree(self._unfinished, ignore_errors=True)
        logger.warning("the anomaly is not written down: %s", failed or "another rank has failed")
        return True

    def _write_parts(self) -> None:
        """Raises OSError, NotAsWritten, and errors of memory."""
        engine, rank = self._engine, self._engine.groups.rank
        assert engine.optimizer is not None
        state = list(engine.optimizer.shard_state())
        path, n_bytes = self._unfinished / f"state.rank-{rank:05d}.safetensors", state_size_bytes(state)
        if n_bytes > MOST_BYTES:
            raise OSError(f"{path}: a rank's part has {n_bytes} bytes, more than {MOST_BYTES}")
        self._unfinished.mkdir(parents=True, exist_ok=True)
        refuse_full(path, n_bytes)
        copies = host_copies([shard.tensor for shard in state])
        shards = [shard._replace(tensor=one) for shard, one in zip(state, copies, strict=True)]
        self._tell_of(path, self._call.role, write_shards(path, rank, shards))
        if engine.is_head:
            path = self._unfinished / f"samples.rank-{rank:05d}.safetensors"
            data = packed_bytes([self._batch], {})
            self._tell_of(path, self._call.name, write_checked(path, pieces_of(data)))

    def _tell_of(self, path: Path, of: str, written: Written) -> None:
        """Tell the rank that writes the manifest of a file."""
        stored = StoredFile(role=of, file=path.name, **written._asdict())
        path.with_suffix(".json").write_text(stored.model_dump_json())

    def _on_any(self, holds: bool) -> bool:
        """Whether something holds on any rank of the mesh. Collective over it."""
        engine = self._engine
        flag = torch.tensor(float(holds), device=engine.device)
        return bool(all_reduce(flag, engine.groups[engine.placement.devices]))


def _take_files(folder: Path) -> tuple[StoredFile, ...]:
    """What all ranks have told of their files."""
    notes = sorted(folder.glob("*.json"))
    files = tuple(StoredFile.model_validate_json(note.read_text()) for note in notes)
    for note in notes:
        note.unlink()
    return files
