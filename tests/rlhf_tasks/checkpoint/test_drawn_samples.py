"""Samples that were drawn ahead, in a commit: packed, found by any head, let go when they do not count any more."""

from pathlib import Path

import pytest
import torch

from rlhf_tasks.checkpoint.accepted_changes import Accepted, has_samples_in_flight, write_accepted
from rlhf_tasks.checkpoint.commits import commit, step_folder, unfinished_folder
from rlhf_tasks.checkpoint.drawn_samples import DrawnSamples, packed_bytes, unpacked
from rlhf_tasks.checkpoint.journals import EMPTY, JOURNALS
from rlhf_tasks.checkpoint.manifest import Manifest, StoredFile, read_manifest
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, SampleStore
from rlhf_tasks.parallel.state.files import pieces_of, write_checked
from rlhf_tasks.system.durable import ByteCount

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
