"""Generation in segments on one rank: what a whole draw gives, every prompt once, and nothing learns of what has not
ended."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.algorithms.fetch import fetch
from rlhf_tasks.algorithms.shared.graphs.drawn_ahead import NUMBER
from rlhf_tasks.algorithms.shared.sampling.generated import with_others
from rlhf_tasks.parallel.batch.samples import SampleBatch, SampleStore
from tests.rlhf_tasks.algorithms.one_rank import OneRank
from tests.rlhf_tasks.algorithms.test_one_rank import document, folder, trained, weights, world

__all__ = ["folder", "world"]  # fixtures

ITERATIONS, BATCH = 6, 8
STOPS = list(range(24))
"""Token ids of which some come early in a response, and in others none at all: so lengths have a long tail."""
SAMPLING = {"max_completion_length": 18, "stop_token_ids": STOPS, "min_new_tokens": 2}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 2, "beta": 0.1, "scale_rewards": "batch"},
    "ppo": {"normalize_values": True, "whiten_rewards": True},
    "reinforce_pp": {},
}


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[OneRank] = []

    def make(kind: str, segment: int | None, **changes: Any) -> OneRank:
        sampling = {**SAMPLING, **changes.pop("sampling", {}), "segment_tokens": segment}
        changes = {"total_iterations": ITERATIONS, "batch_size": BATCH, "num_mini_batches": 2, **changes}
        runs.append(
            OneRank(make_config(document(kind, folder, **{**changes, "sampling": sampling})), tmp_path)
        )
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def drawn(run: OneRank, iterations: int = ITERATIONS) -> list[dict[int, SampleBatch]]:
    """What each iteration delivers: sample -> its data. Nothing is trained."""
    generate = next(call for call in run.calls if call.kind == "generate")
    found = []
    for t in range(iterations):
        store, ids = SampleStore(), range(t * BATCH, (t + 1) * BATCH)
        store.put(fetch(run.rows, run.config, ids))
        run.call(generate, t, store, ids)
        batch = store.get(list(ids), generate.outputs)
        ended = [place for place, rows in enumerate(batch["input_ids"].lengths) if rows]
        numbers = (
            batch[NUMBER].values.tolist() if generate.segment_tokens else [ids[place] for place in ended]
        )
        found.append({number: batch.take([place]) for number, place in zip(numbers, ended, strict=True)})
    return found


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("grpo", {"num_generations": 2}),
        ("ppo", {}),
        ("grpo", {"num_generations": 2, "sampling": {"top_k": 50, "stop_strings": ["a", "tt"]}}),
    ],
)
def test_in_segments_every_sample_is_what_it_is_when_it_is_drawn_at_once(start: Any, kind: str, changes: Any):
    at_once = {n: batch for one in drawn(start(kind, None, **changes)) for n, batch in one.items()}
    in_segments = drawn(start(kind, 4, **changes))
    found = {n: batch for one in in_segments for n, batch in one.items()}
    lengths = [int(batch["response_mask"].values.sum()) for batch in found.values()]
    assert min(lengths) < 4 < 12 < max(lengths)
    assert len(in_segments[0]) < BATCH
    for number, batch in found.items():
        wanted = at_once[number]
        assert torch.equal(batch["input_ids"].values, wanted["input_ids"].values), number
        assert torch.equal(batch["response_mask"].values, wanted["response_mask"].values)
        assert torch.equal(batch["truncated"].values, wanted["truncated"].values)
        for key in set(wanted.data) & {"kept_counts", "kept_tokens"}:
            assert torch.equal(batch[key].values, wanted[key].values)
        assert torch.allclose(batch["old_logprobs"].values, wanted["old_logprobs"].values, atol=1e-5)


@pytest.mark.parametrize(("kind", "changes"), [("reinforce_pp", {}), ("grpo", {"num_generations": 2})])
def test_every_prompt_that_was_begun_is_delivered_once_whatever_its_length(
    start: Any, kind: str, changes: Any
):
    delivered = [
        number for one in drawn(start(kind, 3, total_iterations=12, **changes), 12) for number in one
    ]
    assert sorted(delivered) == list(range(len(delivered)))
    assert delivered != sorted(delivered)
    assert len(delivered) > 2 * BATCH


@pytest.mark.parametrize("kind", KINDS)
def test_places_whose_samples_have_not_ended_have_no_influence(start: Any, kind: str):
    """Half of the places have ended; a batch of these alone gives the same metrics and the same bits."""
    changes = {"num_mini_batches": 1, **KINDS[kind]}
    half = BATCH // 2
    larger, smaller = (start(kind, 17, batch_size=n, **changes) for n in (BATCH, half))
    _, store = larger.iterate(0)
    full = store.get(list(range(half)), made(larger))
    assert all(full["input_ids"].lengths)
    smaller_store = SampleStore()
    smaller_store.put(full)
    store.put(with_others(full, tuple(range(BATCH))))
    again = start(kind, 17, batch_size=BATCH, **changes)
    expected, found = trained(smaller, smaller_store, half), trained(again, store, BATCH)
    assert found[0] == pytest.approx(expected[0], rel=1e-12, nan_ok=True)
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_in_which_nothing_ends_learns_nothing_and_one_with_empty_mini_batches_something(
    start: Any, kind: str
):
    run = start(kind, 1, num_mini_batches=4, total_iterations=16, **KINDS[kind])
    before = weights(run, "actor")
    metrics, _ = run.iterate(0)
    assert metrics.pop("throughput/tokens_per_s") > 0
    assert metrics == {"segments/delivered": 0, "segments/unfinished": BATCH}
    assert all(torch.equal(w, before[name]) for name, w in weights(run, "actor").items())
    told = {}
    for t in range(1, 15):
        told = run.iterate(t)[0]
        if 0 < told["segments/delivered"] < BATCH // 2:
            break
    assert 0 < told["segments/delivered"] < BATCH // 2
    assert math.isfinite(told["loss/policy"])
    assert any(not torch.equal(w, before[name]) for name, w in weights(run, "actor").items())


def made(run: OneRank) -> list[str]:
    """The keys that the calls of a run make."""
    return [key for call in run.calls for key in call.outputs]
