import errno
import hashlib
import json
import os
import random
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.checkpoint.commits import (
    RunSnapshots,
    latest_commit,
    newest_step,
    prune,
    step_folder,
    unfinished_folder,
)
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    CheckpointError,
    PartReport,
    RoleRecord,
    StoredFile,
    verify,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.protocol.messages import WriteCommit
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, NodeKey, NodeResult, RolePlacements
from prefect_rlhf.rlhf_tasks.system.durable import ByteCount, NotWritable

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
    return PartReport(stored=stored, record=record(step)).model_dump(mode="json")


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
    snapshots.prune()


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
    return {path.name for path in tmp_path.glob("step-*")}


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
    assert metrics == {"iteration": 1, "loss": 1.0, "time/actor_train": 11.0, "time/iteration": 0.0}
    lineage = json.loads((tmp_path / "lineage.jsonl").read_text().splitlines()[1])
    assert lineage["versions"] == {"actor": 2}
    assert lineage["bytes_sent"] == 1


def test_a_folder_without_commits_starts_at_the_beginning(tmp_path):
    assert RunSnapshots(Spec(str(tmp_path / "new"))).latest() is None
    assert latest_commit(tmp_path / "nowhere") == (None, [])


def test_only_the_newest_commits_stay(tmp_path):
    started(tmp_path, steps=4)

    assert names(tmp_path) == {"step-00000003", "step-00000004"}


def test_pruning_reads_nothing(tmp_path):
    """Ranks have checked their files of a commit before it was made; to read it all again would take minutes."""
    started(tmp_path, steps=3)
    opened, listening = [], True

    def listen(event, arguments):
        if listening and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(listen)
    moved = ByteCount()
    prune(tmp_path, keep_last=1, best=(), moved=moved)
    listening = False
    assert names(tmp_path) == {"step-00000003"}
    assert [
        name for name in opened if str(tmp_path) in name and name.endswith((".safetensors", MANIFEST))
    ] == []
    assert moved.total_bytes > 0, "what is removed is progress"


def test_a_commit_is_made_before_older_ones_are_removed(tmp_path):
    snapshots, spec = started(tmp_path, steps=1)
    snapshots.commit(order(spec, 2), {1: results(1)})
    assert names(tmp_path) == {f"step-0000000{step}" for step in range(3)}
    snapshots.prune()
    assert names(tmp_path) == {f"step-0000000{step}" for step in (1, 2)}


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
    data = (folder / MANIFEST).read_bytes().replace(b'"schema_version": 2', b'"schema_version": 3')
    (folder / MANIFEST).write_bytes(data)
    (folder / CHECKSUM).write_text(f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n")

    with pytest.raises(CheckpointError, match="schema 3; this version of prefect-rlhf reads 2"):
        verify(folder)


def rewrite(folder: Path, **changes: Any) -> None:
    """A manifest that says something else, and its checksum."""
    document = json.loads((folder / MANIFEST).read_text())
    data = json.dumps({**document, **changes}).encode()
    (folder / MANIFEST).write_bytes(data)
    (folder / CHECKSUM).write_text(f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n")


MARK = {"size_bytes": 0, "sha256": "0" * 64}
HOSTILE = {
    "another file": {"journals": {"metrics.jsonl": MARK, "lineage.jsonl": MARK, "../victim.txt": MARK}},
    "one journal": {"journals": {"metrics.jsonl": MARK}},
    "a negative size": {"journals": {"metrics.jsonl": {**MARK, "size_bytes": -1}, "lineage.jsonl": MARK}},
    "a part elsewhere": {
        "files": [{"role": "actor", "file": "../victim.txt", "size_bytes": 6, "sha256": "0" * 64}]
    },
    "a part in a folder": {"files": [{"role": "actor", "file": "a/b", "size_bytes": 6, "sha256": "0" * 64}]},
    "a step before the first": {"step": -1},
    "a list": {"journals": []},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_manifest_names_nothing_but_its_own_files(tmp_path, changes):
    (tmp_path / "run").mkdir()
    (tmp_path / "victim.txt").write_text("victim")
    started(tmp_path / "run", steps=1)
    rewrite(step_folder(tmp_path / "run", 1), **changes)

    assert RunSnapshots(Spec(str(tmp_path / "run"), 2)).latest() == (0, 0)
    assert (tmp_path / "victim.txt").read_text() == "victim"


def test_a_link_leads_no_run_out_of_its_folder(tmp_path):
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    started(run, steps=1)
    victim.write_bytes((run / "metrics.jsonl").read_bytes() + b"more\n")
    before = victim.read_bytes()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is a symbolic link"):
        RunSnapshots(Spec(str(run), 2)).latest()
    assert victim.read_bytes() == before

    step_folder(run, 1).rename(tmp_path / "elsewhere")
    step_folder(run, 1).symlink_to(tmp_path / "elsewhere")
    assert latest_commit(run)[0].step == 0  # type: ignore[union-attr]


LEFT = {
    "its journals": lambda run: [shutil.rmtree(path) for path in run.glob("step-*")],
    "a refused commit": lambda run: [
        (run / "metrics.jsonl").unlink(),
        (run / "lineage.jsonl").unlink(),
        shutil.rmtree(run / "attempts"),
        shutil.rmtree(step_folder(run, 0)),
        step_folder(run, 1).rename(run / "step-00000001.refused-2"),
    ],
    "an attempt that has trained": lambda run: [
        (run / "metrics.jsonl").unlink(),
        (run / "lineage.jsonl").write_text(""),
        *(shutil.rmtree(path) for path in run.glob("step-*")),
    ],
}


@pytest.mark.parametrize("lose", LEFT.values(), ids=LEFT.keys())
def test_a_run_that_has_lost_its_commits_does_not_begin_anew(tmp_path, lose):
    started(tmp_path, steps=1)
    lose(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    with pytest.raises(
        CheckpointError, match=r"has .*, but no commit to resume from: .*Put them back, or move"
    ):
        RunSnapshots(Spec(str(tmp_path), 2)).latest()

    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_that_was_killed_before_it_trained_begins_anew(tmp_path):
    started(tmp_path)
    shutil.rmtree(step_folder(tmp_path, 0))
    assert RunSnapshots(Spec(str(tmp_path), 2)).latest() is None


DAMAGED = {
    "a line that is no JSON": (
        lambda data: data.replace(b'{"iteration": 1', b'{"iteration"; 1'),
        r":2 is not as",
    ),
    "a digit": (
        lambda data: data.replace(b'"loss": 1.0', b'"loss": 9.0'),
        ": one of its 3 committed lines is not",
    ),
    "a line that is gone": (
        lambda data: data[data.index(b"\n") + 1 :],
        r" has \d+ of the \d+ bytes that are comm",
    ),
    "the whole file": (lambda data: None, " is missing"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_in_what_is_committed_of_a_journal_is_named(tmp_path, damage):
    change, words = DAMAGED[damage]
    started(tmp_path, steps=3)
    path = tmp_path / "metrics.jsonl"
    damaged = change(path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)

    with pytest.raises(CheckpointError, match=rf"metrics\.jsonl{words}"):
        RunSnapshots(Spec(str(tmp_path), 2)).latest()

    assert damaged is None or path.read_bytes() == damaged


def test_a_pickle_in_the_folder_of_a_commit_is_never_opened(tmp_path):
    started(tmp_path, steps=1)
    for folder in (tmp_path, step_folder(tmp_path, 0), step_folder(tmp_path, 1)):
        for name in (".metadata", "optimizer.pt", "actor.pkl"):
            (folder / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    opened, listening = [], True

    def listen(event, arguments):
        if listening and event in ("open", "pickle.find_class"):
            opened.append(str(arguments[0]))

    sys.addaudithook(listen)
    assert RunSnapshots(Spec(str(tmp_path), 2)).latest() == (1, 8)
    listening = False
    assert any(MANIFEST in name for name in opened), "the hook hears"
    assert [name for name in opened if name.endswith((".metadata", ".pt", ".pkl", "system"))] == []


def test_a_damaged_last_line_that_no_commit_counts_on_is_cut(tmp_path):
    started(tmp_path, steps=2)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole + b'{"iterati')

    assert RunSnapshots(Spec(str(tmp_path), 2)).latest() == (2, 16)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_a_journal_is_read_once_in_an_attempt(tmp_path, monkeypatch):
    """A long one would cost more with each commit; and the hash continues through a commit that failed."""
    snapshots, spec = started(tmp_path, steps=1)
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.checkpoint.journals._hashed", None)
    step_2 = order(spec, 2)
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.checkpoint.commits.write_manifest", Path.write_text)
    with pytest.raises(TypeError):
        snapshots.commit(step_2, {1: results(1)})
    monkeypatch.undo()
    snapshots.commit(step_2, {1: results(1)})
    commit(snapshots, spec, 3)

    marks = verify(step_folder(tmp_path, 3)).journals
    for name, mark in marks.items():
        data = (tmp_path / name).read_bytes()
        assert (mark.size_bytes, mark.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_resumed_run_cuts_the_journals_back_and_replaces_what_was_refused(tmp_path):
    started(tmp_path, steps=2)
    (step_folder(tmp_path, 2) / "actor.rank-00000.gen-0.safetensors").write_bytes(b"damaged")
    write_part(unfinished_folder(tmp_path, 3, 1), 0, 3)

    spec = Spec(str(tmp_path), attempt=2)
    snapshots = RunSnapshots(spec)

    assert snapshots.latest() == (1, 8)
    assert journal(tmp_path) == journal(tmp_path, "lineage.jsonl") == [0]
    assert names(tmp_path) == {"step-00000001", "step-00000002.refused-2"}
    commit(snapshots, spec, 2)
    assert RunSnapshots(Spec(str(tmp_path), 3)).latest() == (2, 16)
    assert journal(tmp_path) == [0, 1]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_refused_commit_is_none_of_those_that_are_kept(tmp_path, keep_last):
    """Killed before it removed older commits, resumed past a damaged one, which is never committed again."""
    first = Spec(str(tmp_path), config={"seed": 5, "keep_last": 9})
    snapshots = RunSnapshots(first)
    assert snapshots.latest() is None
    for step in (0, 1, 2, 9):
        commit(snapshots, first, step)
    (step_folder(tmp_path, 9) / "actor.rank-00000.gen-0.safetensors").write_bytes(b"damaged")

    spec = Spec(str(tmp_path), attempt=2, config={"seed": 5, "keep_last": keep_last})
    snapshots = RunSnapshots(spec)
    assert snapshots.latest() == (2, 16)
    commit(snapshots, spec, 3)

    kept = {"step-00000003", "step-00000002"} if keep_last == 2 else {"step-00000003"}
    assert names(tmp_path) == {*kept, "step-00000009.refused-2"}
    assert RunSnapshots(Spec(str(tmp_path), 3)).latest() == (3, 24)
    assert newest_step(tmp_path) == 3, "journals are compared with this one"


def test_a_folder_that_an_older_rank_still_writes_to_does_not_keep_a_run_from_starting(tmp_path, monkeypatch):
    started(tmp_path, steps=1)
    write_part(unfinished_folder(tmp_path, 2, 1), 0, 2)

    def busy(path):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.checkpoint.commits.shutil.rmtree", busy)
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
    with pytest.raises(NotWritable, match=r"no space left: .*metrics\.jsonl needs \d+ bytes, \d+ are free"):
        snapshots.commit(step_1, {0: results(0)})
    monkeypatch.undo()

    assert RunSnapshots(Spec(str(tmp_path), 2)).latest() == (0, 0)
    assert journal(tmp_path) == []
