"""A rank's parts in commits: roles are restored bit by bit in any layout, any head finds the samples drawn ahead."""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from prefect_rlhf.rlhf_tasks.checkpoint.changes import Accepted, has_samples_in_flight, write_accepted
from prefect_rlhf.rlhf_tasks.checkpoint.commits import RunSnapshots, commit, step_folder, unfinished_folder
from prefect_rlhf.rlhf_tasks.checkpoint.journals import EMPTY, JOURNALS
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    PartReport,
    StoredFile,
    read_manifest,
)
from prefect_rlhf.rlhf_tasks.checkpoint.snapshots import (
    DrawnSamples,
    SnapshotWriter,
    packed_bytes,
    restore,
    unpacked,
)
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.parallel.comm import host_memory
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.train import state_files
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import StateShard
from prefect_rlhf.rlhf_tasks.parallel.train.state_files import (
    pieces_of,
    state_size_bytes,
    write_checked,
    write_shards,
)
from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec, SavedPart, WriteCommit
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, RolePlacements
from prefect_rlhf.rlhf_tasks.system import failpoints
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount, NotWritable
from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError
from tests.rlhf_tasks.roles_in_layouts import (
    ADAPTERS,
    FOUR,
    Role,
    build,
    fill,
    mismatches,
    model,
    place,
    precise,
    whole_state,
)
from tests.small_disk import DISK_BYTES, small_disk

STATE = {"kl_coef": 0.1 + 0.2, "normaliser": [1e-17, 3.0]}


@dataclass
class Spec:
    run_folder: str
    attempt: int = 1
    run: str = "test"
    config: dict[str, Any] = field(default_factory=lambda: {"seed": 0, "keep_last": 2})
    peak_flops_per_s: float | None = None


def plan() -> ExecutionPlan:
    return ExecutionPlan(
        algorithm="sft",
        n_devices=4,
        devices_per_host=4,
        n_seqs=8,
        roles={"actor": RolePlacements(trained=True, placements=(place([0]),))},
        nodes=(),
    )


def generation(folder: Path, rank: int) -> GenerationSpec:
    """The fields that a snapshot does not look at are left out."""
    return GenerationSpec.model_construct(
        run="test", attempt=1, generation=0, rank=rank, run_folder=str(folder), plan=plan()
    )


def save_and_restore(rank, world, folder, shape, head, dtype, placements, lora) -> list[str]:
    """Save in the first layout, restore in each of them. Gives what was wrong on this rank."""
    sets = [tuple(range(world)), *(s for p in placements for s in device_sets(p))]
    groups = ProcessGroups(sets, 240.0, torch.device("cpu"))
    layouts = [Layout(shape, head, p, lora) for p in placements]
    whole = whole_state(layouts[0], precise(dtype))
    if rank in placements[0].devices:
        save(folder, build(layouts[0], groups, dtype), whole)
    commit_parts(folder, world)
    wrong = []
    for layout in layouts:
        if rank not in layout.placement.devices:
            continue
        role = build(layout, groups, dtype)
        restore("actor", role, Path(folder), 3)
        wrong += mismatches(role, whole, rank)
        if (role.version, role.master.step, role.state) != (7, 21, STATE):
            wrong.append(f"{layout.placement}: {role.version} {role.master.step} {role.state}")
    return wrong


def save(folder, role: Role, whole) -> None:
    rank = role.groups.rank
    fill(role, whole)
    role.master.step, role.version, role.state = 21, 7, dict(STATE)
    told: list[SavedPart] = []
    writer = SnapshotWriter(generation(folder, rank), told.append)
    writer.save("actor", role, 3)
    for shard in role.master.shard_state():
        shard.tensor.zero_()  # training continues while the copy is being written
    role.state["kl_coef"] = 0.0
    writer.close()
    (part,) = told
    assert (part.error, part.step, part.role, part.rank) == ("", 3, "actor", rank)
    (Path(folder) / f"told-{rank}.json").write_text(part.model_dump_json())


def commit_parts(folder, world: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        parts = {}
        for path in Path(folder).glob("told-*.json"):
            part = SavedPart.model_validate_json(path.read_text())
            parts[part.rank] = part.details
        snapshots = RunSnapshots(Spec(str(folder)))
        snapshots.commit(WriteCommit(3, (), {"save": parts}, 24, {"actor": 7}, plan()), {})
    dist.barrier()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("shape", "head", "dtype", "placements", "lora"),
    [
        (model(), "lm", torch.float32, FOUR, None),
        (model(tied=True), "lm", torch.bfloat16, [FOUR[2], *FOUR], None),
        (model(tied=True, qkv_bias=True, out_bias=True), "scalar", torch.float64, [FOUR[4], *FOUR], None),
        (model(), "lm", torch.float32, [FOUR[5], *FOUR], None),
        (model(tied=True), "lm", torch.bfloat16, [FOUR[-1], *FOUR], None),
        (model(tied=True), "scalar", torch.bfloat16, [FOUR[2], *FOUR], ADAPTERS),
        (model(family="qwen3_moe", experts=3, experts_per_token=2), "lm", torch.bfloat16, FOUR, None),
    ],
    ids=["dp-tp", "tied-bf16-tp-pp", "value-head-tp4", "one-rank", "sharded", "adapters", "experts"],
)
def test_a_role_is_restored_bit_by_bit_into_any_layout(ranks, tmp_path, shape, head, dtype, placements, lora):
    wrong = ranks.run(4, save_and_restore, str(tmp_path), shape, head, dtype, placements, lora)

    assert wrong == [[]] * 4
    written = sorted(path.name for path in step_folder(tmp_path, 3).glob("*.safetensors"))
    assert written == [f"actor.rank-{rank:05d}.gen-0.safetensors" for rank in sorted(placements[0].devices)]


def shards() -> list[StateShard]:
    return [
        StateShard("a", "master", 3, 7, torch.arange(4.0)),
        StateShard("b", "exp_avg", 0, 2, torch.tensor([float("nan"), -0.0])),
    ]


def test_the_files_are_plain_safetensors_and_hashed_as_written(tmp_path):
    written = write_shards(tmp_path / "x.safetensors", 5, shards())

    content = (tmp_path / "x.safetensors").read_bytes()
    assert written == (len(content), hashlib.sha256(content).hexdigest())
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == {"master/a", "exp_avg/b"}
    assert torch.equal(loaded["master/a"], torch.arange(4.0))
    assert loaded["exp_avg/b"].view(torch.int32).tolist() == shards()[1].tensor.view(torch.int32).tolist()


class FakeOptimizer:
    """Gives its state and nothing else."""

    step = 4

    def __init__(self, state: list[StateShard]) -> None:
        self.state = state

    def shard_state(self):
        return iter(self.state)

    def load_shard_state(self, loaded, step) -> None:
        self.loaded = self.state = list(loaded)


def small_role(**changes) -> Role:
    """One rank's role of a model with one layer, without process groups."""
    layout = Layout(model(layers=1, **changes), "lm", place([0]))
    state = [
        StateShard(spec.name, "master", 0, spec.size, torch.zeros(spec.size)) for spec in layout.parameters
    ]
    groups = type("Groups", (), {"rank": 0, "__getitem__": lambda *_: None})()
    return Role(layout, groups, FakeOptimizer(state), {}, version=7)  # type: ignore[arg-type]


def written_part(folder: Path, role: Role) -> PartReport:
    told: list[SavedPart] = []
    writer = SnapshotWriter(generation(folder, 0), told.append)
    writer.save("actor", role, 3)
    writer.close()
    assert told[0].error == ""
    return PartReport.model_validate(told[0].details)


def commit_part(folder: Path, part: PartReport) -> None:
    order = WriteCommit(3, (), {"save": {0: part.model_dump(mode="json")}}, 24, {"actor": 7}, plan())
    RunSnapshots(Spec(str(folder))).commit(order, {})


@pytest.mark.gpu
def test_commits_of_a_gpus_state_use_the_same_pinned_copies_again(tmp_path, monkeypatch):
    role, told, pinned, real = small_role(), Queue(), [], host_memory._PinnedPages
    role.master.state = [s._replace(tensor=s.tensor.cuda()) for s in role.master.state]  # type: ignore[attr-defined]
    monkeypatch.setattr(
        host_memory, "_PinnedPages", lambda size_bytes: pinned.append(size_bytes) or real(size_bytes)
    )
    writer = SnapshotWriter(generation(tmp_path, 0), told.put)
    for step in (1, 2, 3):
        for shard in role.master.shard_state():
            shard.tensor.fill_(step)
        writer.save("actor", role, step)
        for shard in role.master.shard_state():
            shard.tensor.zero_()
        assert told.get(timeout=60.0).error == ""
    writer.close()

    for step in (1, 2, 3):
        (part,) = unfinished_folder(tmp_path, step, 1).glob("*.safetensors")
        assert all((tensor == step).all() for tensor in load_file(part).values())
    assert pinned == [shard.tensor.nbytes for shard in role.master.shard_state()], "once, in exact size"


def test_another_model_is_refused_with_the_difference(tmp_path):
    commit_part(tmp_path, written_part(tmp_path, small_role()))

    with pytest.raises(CheckpointError, match=r"the saved 'actor' has another shape: kv_heads 3 \(now 9\)"):
        restore("actor", small_role(kv_heads=9), tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"has the roles \['actor'\], not 'critic'"):
        restore("critic", small_role(), tmp_path, 3)


def test_values_that_are_not_there_and_other_dtypes_are_named(tmp_path):
    saved = small_role()
    saved.master.state.pop()  # type: ignore[attr-defined]
    commit_part(tmp_path, written_part(tmp_path, saved))

    with pytest.raises(ValueError, match=r"lacks 136 of 136 elements of master of lm_head\.weight"):
        restore("actor", small_role(), tmp_path, 3)
    other = small_role()
    other.master.state = [s._replace(tensor=s.tensor.double()) for s in other.master.state]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"torch\.float32, but the run uses torch\.float64"):
        restore("actor", other, tmp_path, 3)


def test_a_failed_write_is_reported(tmp_path):
    unfinished_folder(tmp_path, 3, 1).write_text("in the way")
    told: list[SavedPart] = []
    writer = SnapshotWriter(generation(tmp_path, 0), told.append)
    writer.save("actor", small_role(), 3)
    writer.close()

    assert "step-00000003.tmp-1" in told[0].error
    assert told[0].details == {}


def test_a_part_that_does_not_fit_on_its_disk_is_reported_as_lasting(tmp_path):
    role, told = small_role(), []
    large = torch.zeros(DISK_BYTES)
    role.master.state.append(StateShard("large", "master", 0, len(large), large))  # type: ignore[attr-defined]
    disk = tmp_path / "disk"
    with small_disk(disk):
        writer = SnapshotWriter(generation(disk, 0), told.append)
        writer.save("actor", role, 3)
        writer.close()
    part = unfinished_folder(disk, 3, 1) / "actor.rank-00000.gen-0.safetensors"
    needed = sum(shard.tensor.nbytes for shard in role.master.state)  # type: ignore[attr-defined]
    assert f"no space left: {part} needs {needed} bytes, " in told[0].error
    assert "are free. Free some space and resume." in told[0].error
    assert told[0].lasting


@pytest.mark.parametrize(("known", "free"), [(True, r"\d+"), (False, "an unknown number")])
def test_a_disk_without_room_for_a_folder_is_reported_as_lasting(tmp_path, monkeypatch, known, free):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told: list[SavedPart] = []
    monkeypatch.setattr(Path, "mkdir", full)
    if not known:
        monkeypatch.setattr(shutil, "disk_usage", read_only)
    writer = SnapshotWriter(generation(tmp_path, 0), told.append)
    writer.save("actor", small_role(), 3)
    writer.close()
    assert told[0].lasting
    assert re.search(rf"needs \d+ bytes, {free} are free", told[0].error)
    order = WriteCommit(4, (), {}, 32, {}, plan())
    with pytest.raises(NotWritable, match=r"no space left: .*manifest"):
        RunSnapshots(Spec(str(tmp_path), 2)).commit(order, {})


def test_a_read_only_disk_is_reported_as_lasting(tmp_path, monkeypatch):
    told, disk = [], tmp_path / "disk"
    with small_disk(disk) as mounted:
        unfinished_folder(disk, 3, 1).mkdir()
        if mounted:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        else:
            monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.train.state_files.os.fsync", read_only)
        writer = SnapshotWriter(generation(disk, 0), told.append)
        writer.save("actor", small_role(), 3)
        writer.close()
    part = unfinished_folder(disk, 3, 1) / "actor.rank-00000.gen-0.safetensors"
    assert told[0].error == f"{part} cannot be written: Read-only file system. Fix that and resume."
    assert told[0].lasting


def read_only(*_) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_manifest_that_does_not_fit_leaves_the_last_commit(tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk) as mounted:
        part = written_part(disk, small_role())
        commit_part(disk, part)
        snapshots = RunSnapshots(Spec(str(disk), 2))
        assert snapshots.latest() == (3, 24)
        shutil.copytree(step_folder(disk, 3), unfinished_folder(disk, 4, 2))
        order = WriteCommit(4, (), {"save": {0: part.model_dump(mode="json")}}, 32, {"actor": 7}, plan())
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        failpoints.arm("" if mounted else "manifest_written:full")
        with pytest.raises(
            NotWritable, match=r"no space left: .*manifest\.json needs \d+ bytes, \d+ are free"
        ):
            snapshots.commit(order, {})
        failpoints.arm("")
        filler.unlink()
        assert RunSnapshots(Spec(str(disk), 3)).latest() == (3, 24)


@pytest.fixture
def in_pieces(monkeypatch):
    """Files of a few kilobytes are written, synced and read back in many pieces."""
    monkeypatch.setattr(state_files, "CHUNK_BYTES", 100)
    monkeypatch.setattr(state_files, "_SYNC_BYTES", 350)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_what_is_written_in_pieces_is_what_is_hashed_and_every_byte_is_read_back(tmp_path, in_pieces):
    role, told, moved = small_role(), list[SavedPart](), ByteCount()
    for shard in role.master.state:  # type: ignore[attr-defined]
        shard.tensor.normal_()
    writer = SnapshotWriter(generation(tmp_path, 0), told.append, moved)
    writer.save("actor", role, 3)
    writer.close()
    stored = PartReport.model_validate(told[0].details).stored
    data = (unfinished_folder(tmp_path, 3, 1) / stored.file).read_bytes()
    assert (stored.size_bytes, stored.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert len(data) > 10 * 350
    assert moved.total_bytes == len(data)
    commit_part(tmp_path, PartReport.model_validate(told[0].details))
    moved = ByteCount()
    restore("actor", role, tmp_path, 3, moved)
    assert moved.total_bytes == sum(shard.tensor.nbytes for shard in role.master.state)  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [1, 5])
def test_a_part_that_the_disk_does_not_have_as_written_is_never_reported_as_durable(
    tmp_path, in_pieces, monkeypatch, number
):
    """Else a commit of it would be made, and older ones removed for it."""
    path = unfinished_folder(tmp_path, 3, 1) / "actor.rank-00000.gen-0.safetensors"
    sync, moved, syncs = os.fdatasync, ByteCount(), count(1)

    def damaging(descriptor: int) -> None:
        sync(descriptor)
        if next(syncs) == number:
            flip(path, moved.total_bytes + 5)

    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.train.state_files.os.fdatasync", damaging)
    told: list[SavedPart] = []
    writer = SnapshotWriter(generation(tmp_path, 0), told.append, moved)
    writer.save("actor", small_role(), 3)
    writer.close()
    assert next(syncs) > number, "a file of many pieces"
    assert told[0].error == f"NotAsWritten: {path}: the disk does not have the bytes that were written to it."
    assert not told[0].lasting
    assert told[0].details == {}


def test_a_part_that_nobody_needs_any_more_is_not_written_to_its_end(tmp_path, in_pieces, monkeypatch):
    """A rank resets within seconds; a part may take minutes."""
    sync, syncing, go_on = os.fdatasync, threading.Event(), threading.Event()

    def waiting(descriptor: int) -> None:
        syncing.set()
        go_on.wait(60.0)
        sync(descriptor)

    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.train.state_files.os.fdatasync", waiting)
    told: list[SavedPart] = []
    writer = SnapshotWriter(generation(tmp_path, 0), told.append)
    writer.save("actor", small_role(), 3)
    assert syncing.wait(60.0)
    writer.close(wait=False)
    go_on.set()
    writer.close()
    (path,) = unfinished_folder(tmp_path, 3, 1).iterdir()
    assert path.stat().st_size < state_size_bytes(small_role().master.state)  # type: ignore[attr-defined]
    assert told == []


def test_an_aborted_generation_leaves_what_it_has_not_begun(tmp_path):
    told: list[SavedPart] = []
    writing, go_on = threading.Event(), threading.Event()

    def first_is_done(part: SavedPart) -> None:
        told.append(part)
        writing.set()
        go_on.wait(60.0)

    writer = SnapshotWriter(generation(tmp_path, 0), first_is_done)
    for step in (3, 4):
        writer.save("actor", small_role(), step)
    assert writing.wait(60.0)
    writer.close(wait=False)
    go_on.set()
    writer.close()

    assert [part.step for part in told] == [3]


STEP = 3
CALL = "actor_generate"
METRICS = {4: {"completions/mean_length": 2.5, "throughput/tokens_per_s": float("nan")}, 5: {}}


def batch(ids: tuple[int, ...], key: str, *parts: torch.Tensor) -> SampleBatch:
    return SampleBatch(ids, {key: Packed.of(parts)})


HEADS = (
    [
        batch((6, 7), "input_ids", torch.arange(3), torch.arange(5)),
        batch((6, 7), "response_mask", torch.tensor([False, True, True]), torch.ones(5, dtype=torch.bool)),
        batch((7,), "columns", torch.tensor([1, 2, 3], dtype=torch.uint8)),
        batch((6, 7), "old_logprobs", torch.ones(3), torch.ones(5)),
        batch((9, 10), "left_number", torch.tensor([21]), torch.tensor([-1])),
    ],
    [
        batch((8,), "input_ids", torch.arange(2)),
        batch((6, 8), "columns", torch.zeros(0, dtype=torch.uint8), torch.tensor([9], dtype=torch.uint8)),
        batch((7, 8), "old_logprobs", torch.ones(5), torch.ones(0)),
        batch((11, 12), "left_number", torch.tensor([22]), torch.tensor([24])),
    ],
)
"""What two heads hold of three samples."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a commit that has the files of both heads."""
    folder = unfinished_folder(tmp_path, STEP, 1)
    folder.mkdir()
    files = []
    for rank, batches in enumerate(HEADS):
        path = folder / f"{CALL}.rank-{rank:05d}.gen-0.safetensors"
        written = write_checked(path, pieces_of(packed_bytes(batches, METRICS)))
        files.append(StoredFile(role=CALL, file=path.name, **written._asdict()))
    journals = dict.fromkeys(JOURNALS, EMPTY)
    commit(
        tmp_path,
        Manifest(
            run="r",
            attempt=1,
            step=STEP,
            seed=0,
            cursor=6,
            versions={},
            roles={},
            files=tuple(files),
            journals=journals,
            config={},
            plan_sha256="",
        ),
    )
    return tmp_path


def test_a_file_holds_keys_of_different_types_lengths_and_samples():
    for batches in HEADS:
        found = {next(iter(b.data)): b for b in unpacked(packed_bytes(batches, METRICS))}
        for wanted in batches:
            ((key, packed),) = wanted.data.items()
            assert (found[key].ids, found[key][key].lengths) == (wanted.ids, packed.lengths)
            assert found[key][key].values.dtype == packed.values.dtype
            assert torch.equal(found[key][key].values, packed.values)
    assert unpacked(packed_bytes([], {})) == []


def test_what_is_held_of_some_samples_is_a_batch_for_each_key():
    store = SampleStore()
    for one in HEADS[0]:
        store.put(one)
    held = {next(iter(b.data)): b.ids for b in store.held([5, 7])}
    assert held == {"input_ids": (7,), "response_mask": (7,), "columns": (7,), "old_logprobs": (7,)}


def test_all_that_the_heads_had_is_found_and_counted(run):
    moved = ByteCount()
    drawn = DrawnSamples(run, STEP, [CALL], moved)
    assert (drawn.ready, drawn.first_sample) == (True, 6)
    stored = drawn.of(CALL)
    assert stored.get([8, 6], ["input_ids"])["input_ids"].lengths == (2, 3)
    assert stored.get([6, 7, 8], ["columns"])["columns"].values.tolist() == [1, 2, 3, 9]
    assert repr(drawn.metrics(CALL)) == repr(METRICS)
    assert moved.total_bytes == sum(path.stat().st_size for path in step_folder(run, STEP).glob("actor*"))


def test_samples_that_are_read_with_a_flipped_bit_are_a_fault(run):
    drawn = DrawnSamples(run, STEP, [CALL], ByteCount())
    path = next(step_folder(run, STEP).glob("actor*"))
    flip(path, path.stat().st_size - 1)
    with pytest.raises(InvariantError, match=f"samples of {CALL} from .*{path.name} have other bits"):
        drawn.of(CALL)


def test_a_commit_has_samples_in_flight_or_none(run):
    folder = step_folder(run, STEP)
    manifest = read_manifest(folder)
    assert has_samples_in_flight(folder, manifest)
    for path in folder.glob("actor*"):
        path.write_bytes(
            packed_bytes([SampleBatch((32,), {"left_number": Packed(torch.tensor([-1]), (1,))})], {})
        )
    assert not has_samples_in_flight(folder, manifest), "every place is free"
    model = manifest.model_copy(update={"roles": {CALL: None}})
    assert not has_samples_in_flight(folder, model), "files of a model have none"


def test_there_are_none_at_the_beginning_without_files_and_for_a_plan_that_needs_none(run):
    for step, calls in ((None, [CALL]), (0, [CALL]), (STEP, ["greedy_generate"]), (STEP, [])):
        assert not DrawnSamples(run, step, calls, ByteCount()).ready


@pytest.mark.parametrize(("at", "ready"), [(STEP, False), (STEP - 1, True), (STEP + 1, False)])
def test_a_change_that_the_user_accepts_drops_those_of_its_commit(run, at, ready):
    accept(run, at)
    assert DrawnSamples(run, STEP, [CALL], ByteCount()).ready == ready


def accept(run: Path, step: int) -> None:
    journals = dict.fromkeys(JOURNALS, EMPTY)
    write_accepted(run, Accepted(step=step, changes=("seed 1 (now 2)",), config={}, journals=journals))
