import errno
import hashlib
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.checkpoint import (
    RunSnapshots,
    latest_commit,
    prune,
    step_folder,
    unfinished_folder,
)
from rlhf_tasks.manifest import CHECKSUM, MANIFEST, CheckpointError, Part, RoleRecord, StoredFile, verify
from rlhf_tasks.parallel.shape import ModelShape
from rlhf_tasks.parallel.topology import ParallelStrategy, Placement
from rlhf_tasks.protocol.instructions import WriteCommit
from rlhf_tasks.spec import ExecutionPlan, NodeKey, NodeResult, RolePlacements

PLACEMENT = Placement((0, 1), ParallelStrategy(dp=2))
PLAN = ExecutionPlan(
    algorithm="sft",
    n_devices=2,
    devices_per_host=2,
    n_seqs=8,
    roles={"actor": RolePlacements(trained=True, placements=(PLACEMENT,))},
    nodes=(),
)
STATE = {"kl_coef": 0.1 + 0.2, "mean": 1e-17, "steps": 3}


@dataclass
class Spec:
    run_folder: str
    attempt: int = 1
    run: str = "test"
    config: dict[str, Any] = field(default_factory=lambda: {"seed": 5, "keep_last": 2})
    peak_flops_per_s: float | None = None


def record(version: int) -> RoleRecord:
    return RoleRecord(
        version=version,
        optimizer_step=4 * version,
        state=STATE,
        shape=ModelShape("llama", 8, 2, 2, 2, 4, 8, 16, 32),
        head="lm",
        placement=PLACEMENT,
    )


def write_part(folder: Path, rank: int, step: int, generation: int = 0) -> dict[str, Any]:
    """What a rank does, and what it says about it."""
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"actor.rank-{rank:05d}.gen-{generation}.safetensors"
    content = f"rank {rank} step {step}".encode() * 100
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    stored = StoredFile(role="actor", file=path.name, size_bytes=len(content), sha256=digest)
    return Part(stored=stored, record=record(step)).model_dump(mode="json")


def order(spec: Spec, step: int, generation: int = 0) -> WriteCommit:
    """The order to commit a step whose parts have been written."""
    folder = unfinished_folder(Path(spec.run_folder), step, spec.attempt)
    parts = {rank: write_part(folder, rank, step, generation) for rank in (0, 1)}
    iterations = (step - 1,) if step else ()
    return WriteCommit(step, iterations, {"actor_train.save": parts}, 8 * step, {"actor": step}, PLAN)


def results(iteration: int) -> dict[str, dict[int, NodeResult]]:
    key = NodeKey("test", 1, 0, iteration, "actor_train")
    return {
        "actor_train": {
            rank: NodeResult(
                key=key,
                rank=rank,
                started_s=10.0 + rank,
                ended_s=20.0 + rank,
                metrics={"loss": float(iteration)},
                versions={"actor": iteration + 1},
                bytes_sent=rank,
                digest="d",
            )
            for rank in (0, 1)
        }
    }


def commit(snapshots: RunSnapshots, spec: Spec, step: int, generation: int = 0) -> None:
    snapshots.commit(order(spec, step, generation), {step - 1: results(step - 1)} if step else {})


def started(tmp_path: Path, steps: int = 0, attempt: int = 1) -> tuple[RunSnapshots, Spec]:
    """A run with the commits 0 .. steps."""
    spec = Spec(str(tmp_path), attempt)
    snapshots = RunSnapshots(spec)
    assert snapshots.latest() is None
    for step in range(steps + 1):
        commit(snapshots, spec, step)
    return snapshots, spec


def journal(tmp_path: Path, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["iteration"] for line in (tmp_path / name).read_text().splitlines()]


def names(tmp_path: Path) -> set[str]:
    return {path.name for path in tmp_path.iterdir() if path.is_dir()}


def test_a_commit_is_found_again_with_everything_in_it(tmp_path):
    started(tmp_path, steps=2)

    assert RunSnapshots(Spec(str(tmp_path), 2)).latest() == (2, 16)
    found, refused = latest_commit(tmp_path)
    assert refused == []
    assert found is not None
    assert found.manifest.roles == {"actor": record(2)}
    assert found.manifest.roles["actor"].state == STATE
    assert (found.manifest.versions, found.manifest.seed) == ({"actor": 2}, 5)
    assert journal(tmp_path) == [0, 1]
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert metrics == {"iteration": 1, "loss": 1.0, "time/actor_train": 11.0}
    lineage = json.loads((tmp_path / "lineage.jsonl").read_text().splitlines()[1])
    assert lineage["versions"] == {"actor": 2}
    assert lineage["bytes_sent"] == 1


def test_a_folder_without_commits_starts_at_the_beginning(tmp_path):
    assert RunSnapshots(Spec(str(tmp_path / "new"))).latest() is None
    assert latest_commit(tmp_path / "nowhere") == (None, [])


def test_only_the_newest_commits_stay(tmp_path):
    started(tmp_path, steps=4)

    assert names(tmp_path) == {"step-00000003", "step-00000004"}


def test_old_commits_stay_when_the_newest_does_not_verify(tmp_path):
    started(tmp_path, steps=1)
    (step_folder(tmp_path, 1) / "actor.rank-00000.gen-0.safetensors").write_bytes(b"")
    step_folder(tmp_path, 1).rename(step_folder(tmp_path, 2))

    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match=r"actor\.rank-00000"):
        prune(tmp_path, keep_last=2)

    assert "step-00000000" in names(tmp_path)


@pytest.mark.parametrize("file", [MANIFEST, CHECKSUM, "actor.rank-00001.gen-0.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "bits", "link"])
def test_a_damaged_commit_is_refused_by_name_and_the_previous_one_used(tmp_path, file, damage):
    started(tmp_path, steps=1)
    path = step_folder(tmp_path, 1) / file
    content = path.read_bytes()
    places = random.Random(0)
    if damage == "missing":
        versions = [None]
    elif damage == "bits":
        flips = [(places.randrange(len(content)), 1 << places.randrange(8)) for _ in range(100)]
        versions = [content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :] for at, bit in flips]
    else:
        versions = [{"empty": b"", "truncated": content[:-1], "longer": content + b"\n"}.get(damage, content)]
    for version in versions:
        path.unlink()
        if damage == "link":
            (tmp_path / "elsewhere").write_bytes(content)
            path.symlink_to(tmp_path / "elsewhere")
        elif version is not None:
            path.write_bytes(version)

        found, refused = latest_commit(tmp_path)

        if damage == "link" and file in (MANIFEST, CHECKSUM):
            assert found is not None  # their content is checked wherever it lies
            return
        assert found is not None
        assert found.step == 0
        assert len(refused) == 1
        assert str(path) in str(refused[0]) or str(path.with_name(MANIFEST)) in str(refused[0])


def test_when_no_commit_can_be_used_the_run_stops(tmp_path):
    started(tmp_path, steps=1)
    for step in (0, 1):
        (step_folder(tmp_path, step) / MANIFEST).unlink()

    with pytest.raises(CheckpointError, match=r"no commit in .* can be used.*step-00000001.*step-00000000"):
        RunSnapshots(Spec(str(tmp_path), 2)).latest()


def test_a_manifest_of_a_future_schema_is_refused(tmp_path):
    started(tmp_path)
    folder = step_folder(tmp_path, 0)
    data = (folder / MANIFEST).read_bytes().replace(b'"schema_version": 1', b'"schema_version": 2')
    (folder / MANIFEST).write_bytes(data)
    (folder / CHECKSUM).write_text(f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n")

    with pytest.raises(CheckpointError, match="schema 2; this version of prefect-rlhf reads 1"):
        verify(folder)


def test_a_file_name_cannot_leave_the_folder():
    with pytest.raises(ValueError, match="file"):
        StoredFile(role="actor", file="../actor.safetensors", size_bytes=1, sha256="0" * 64)


def test_a_resumed_run_cuts_the_journals_back_and_replaces_what_was_refused(tmp_path):
    started(tmp_path, steps=2)
    (step_folder(tmp_path, 2) / "actor.rank-00000.gen-0.safetensors").write_bytes(b"damaged")
    write_part(unfinished_folder(tmp_path, 3, 1), 0, 3)

    spec = Spec(str(tmp_path), attempt=2)
    snapshots = RunSnapshots(spec)

    assert snapshots.latest() == (1, 8)
    assert journal(tmp_path) == journal(tmp_path, "lineage.jsonl") == [0]
    assert names(tmp_path) == {"step-00000001", "step-00000002"}
    commit(snapshots, spec, 2)
    assert RunSnapshots(Spec(str(tmp_path), 3)).latest() == (2, 16)
    assert journal(tmp_path) == [0, 1]


def test_a_folder_that_an_older_rank_still_writes_to_does_not_keep_a_run_from_starting(tmp_path, monkeypatch):
    started(tmp_path, steps=1)
    write_part(unfinished_folder(tmp_path, 2, 1), 0, 2)

    def busy(path):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr("rlhf_tasks.checkpoint.shutil.rmtree", busy)
    assert RunSnapshots(Spec(str(tmp_path), 2)).latest() == (1, 8)


def test_files_of_an_aborted_generation_do_not_get_into_a_commit(tmp_path):
    snapshots, spec = started(tmp_path)
    write_part(unfinished_folder(tmp_path, 1, 1), 0, 1, generation=0)

    commit(snapshots, spec, 1, generation=1)

    stored = {path.name for path in step_folder(tmp_path, 1).iterdir()}
    parts = {f"actor.rank-{rank:05d}.gen-1.safetensors" for rank in (0, 1)}
    assert stored == {*parts, MANIFEST, CHECKSUM}


def test_parts_that_do_not_fit_together_are_refused(tmp_path):
    snapshots, spec = started(tmp_path)
    wrong_version = order(spec, 1)
    with pytest.raises(CheckpointError, match=r"versions \{'actor': 1\}, not \{'actor': 7\}"):
        snapshots.commit(WriteCommit(1, (0,), wrong_version.parts, 8, {"actor": 7}, PLAN), {0: results(0)})
    mixed = order(spec, 1)
    mixed.parts["actor_train.save"][1]["record"]["optimizer_step"] = 99
    with pytest.raises(CheckpointError, match="ranks disagree on the state of role 'actor'"):
        snapshots.commit(mixed, {0: results(0)})
    incomplete = order(spec, 1)
    next(unfinished_folder(tmp_path, 1, 1).glob("*rank-00001*")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="rank-00001"):
        snapshots.commit(incomplete, {0: results(0)})

    assert RunSnapshots(Spec(str(tmp_path), 2)).latest() == (0, 0)


def test_a_commit_that_failed_half_way_can_be_repeated(tmp_path):
    """The journals are not appended to twice."""
    snapshots, spec = started(tmp_path)
    step_1 = order(spec, 1)
    file = next(unfinished_folder(tmp_path, 1, 1).glob("*rank-00001*"))
    content = file.read_bytes()
    file.write_bytes(b"")
    with pytest.raises(CheckpointError):
        snapshots.commit(step_1, {0: results(0)})
    file.write_bytes(content)

    snapshots.commit(step_1, {0: results(0)})

    assert journal(tmp_path) == [0]


def die_at(number: int, tmp_path: Path) -> bool:
    """Commit step 1 in a child that is killed at its n-th sync, rename or removal. True when it died."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status == 0 or os.waitstatus_to_exitcode(status) in (0, 9), status
        return os.waitstatus_to_exitcode(status) == 9
    left = number

    def deadly(function):
        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                os._exit(9)
            left -= 1
            return function(*args, **kwargs)

        return call

    try:
        spec = Spec(str(tmp_path), attempt=2)
        snapshots = RunSnapshots(spec)
        snapshots.latest()
        step_1 = order(spec, 1)
        for name in ("fsync", "rename", "rmdir", "unlink", "ftruncate"):
            setattr(os, name, deadly(getattr(os, name)))
        snapshots.commit(step_1, {0: results(0)})
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child uses no threads
def test_killed_at_any_instant_of_a_commit_the_run_has_the_old_or_the_new_one(tmp_path):
    steps, number, died = [], 0, True
    while died:
        run_folder = tmp_path / str(number)
        run_folder.mkdir()
        started(run_folder)
        died = die_at(number, run_folder)

        spec = Spec(str(run_folder), attempt=3)
        snapshots = RunSnapshots(spec)
        step, cursor = snapshots.latest() or (-1, -1)
        assert cursor == 8 * step
        assert journal(run_folder) == journal(run_folder, "lineage.jsonl") == list(range(step))
        steps.append(step)
        if step == 0:
            commit(snapshots, spec, 1)
        assert RunSnapshots(Spec(str(run_folder), 4)).latest() == (1, 8)
        assert journal(run_folder) == [0]
        number += 1

    assert steps == sorted(steps)
    assert steps.count(0) >= 6  # two journals, manifest, checksum, their folder, the rename
    assert steps.count(1) >= 2  # the sync of the parent, and the undisturbed one


def test_a_full_disk_is_explained(tmp_path, monkeypatch):
    snapshots, spec = started(tmp_path)
    step_1 = order(spec, 1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"No space left on device: .*metrics\.jsonl needs \d+ bytes, \d+ are free"
    ):
        snapshots.commit(step_1, {0: results(0)})
    monkeypatch.undo()

    assert RunSnapshots(Spec(str(tmp_path), 2)).latest() == (0, 0)
    assert journal(tmp_path) == []
