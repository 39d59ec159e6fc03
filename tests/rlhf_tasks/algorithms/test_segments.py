"""Generation in segments on one rank: what a whole draw gives, full batches, and every prompt once."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.planner.plan.workload import Lengths, Workload
from prefect_rlhf.planner.pricing.call_formulas import generate
from prefect_rlhf.planner.pricing.rooflines import sizes
from prefect_rlhf.planner.pricing.terms import Crossings, OnMesh
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import DRAWN_BY, NUMBER
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.parallel.generate.slots import Group
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from tests.rlhf_tasks.algorithms.one_rank import OneRank
from tests.rlhf_tasks.algorithms.test_one_rank import document, folder, weights, world

__all__ = ["folder", "world"]  # fixtures

ITERATIONS, BATCH = 6, 8
STOPS = list(range(24))
"""Token ids of which some come early in a response, and in others none at all: so lengths have a long tail."""
SAMPLING = {"max_completion_length": 18, "stop": STOPS, "min_new_tokens": 2}
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


def drawn(
    run: OneRank, iterations: int = ITERATIONS, micro_batches: int = 1, start: tuple[int, int] = (0, 0)
) -> list[dict[int, SampleBatch]]:
    """What each iteration delivers, in its order: sample -> its data. Nothing is trained, but versions count up.

    start  the first iteration, and its first sample
    """
    generate = next(call for call in run.calls if call.kind == "generate")
    run.micro_batches["actor_generate"] = micro_batches
    found = []
    for t in range(start[0], iterations):
        first = start[1] + (t - start[0]) * BATCH
        store, ids = SampleStore(), range(first, first + BATCH)
        store.put(fetch(run.rows, run.config, ids))
        run.call(generate, t, store, ids)
        run.engines["actor"].version += 1
        batch = store.get(list(ids), generate.outputs)
        numbers = batch[NUMBER].values.tolist() if generate.segment_tokens else ids
        found.append({number: batch.take([place]) for place, number in enumerate(numbers)})
    return found


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("grpo", {"num_generations": 2}),
        ("ppo", {}),
        ("grpo", {"num_generations": 2, "sampling": {"top_k": 50, "stop": [*STOPS, "a", "tt"]}}),
    ],
)
def test_in_segments_every_sample_is_what_it_is_when_it_is_drawn_at_once(start: Any, kind: str, changes: Any):
    at_once = {n: batch for one in drawn(start(kind, None, **changes)) for n, batch in one.items()}
    in_segments = drawn(start(kind, 4, **changes))
    assert [n for one in in_segments for n in one] != sorted(at_once)
    found = {n: batch for one in in_segments for n, batch in one.items()}
    lengths = [int(batch["response_mask"].values.sum()) for batch in found.values()]
    assert min(lengths) < 4 < 12 < max(lengths)
    assert sorted(found) == sorted(at_once)
    for number, batch in found.items():
        wanted = at_once[number]
        assert torch.equal(batch["input_ids"].values, wanted["input_ids"].values), number
        assert torch.equal(batch["response_mask"].values, wanted["response_mask"].values)
        assert torch.equal(batch["truncated"].values, wanted["truncated"].values)
        for key in set(wanted.data) & {"kept_counts", "kept_tokens"}:
            assert torch.equal(batch[key].values, wanted[key].values)
        assert torch.allclose(batch["old_logprobs"].values, wanted["old_logprobs"].values, atol=1e-5)


@pytest.mark.parametrize(("kind", "changes"), [("reinforce_pp", {}), ("grpo", {"num_generations": 2})])
def test_every_batch_is_full_and_every_prompt_is_delivered_once_whatever_its_length(
    start: Any, kind: str, changes: Any
):
    run = start(kind, 3, total_iterations=12, **changes)
    batches = drawn(run, 12)
    assert all(len(batch) == BATCH for batch in batches)
    assert all(list(batch) == sorted(batch) for batch in batches)
    delivered = [number for batch in batches for number in batch]
    assert sorted(delivered) == list(range(12 * BATCH))
    assert delivered != sorted(delivered)


@pytest.mark.timeout(60)  # without them it would wait for ever
def test_a_run_that_goes_on_with_smaller_batches_begins_what_its_iterations_need(start: Any):
    """Three iterations before had batches of twice the size."""
    first = 3 * 2 * BATCH
    batches = drawn(start("reinforce_pp", 4), start=(3, first))
    assert sorted(n for batch in batches for n in batch) == list(range(first, first + 3 * BATCH))


@pytest.mark.parametrize("segment", [9, 17])
def test_no_token_is_older_than_the_configuration_says(start: Any, segment: int):
    run = start("reinforce_pp", segment, total_iterations=12)
    ages = [
        t - int(batch[DRAWN_BY].values[batch["response_mask"].values].min())
        for t, one in enumerate(drawn(run, 12))
        for batch in one.values()
    ]
    assert 0 < max(ages) <= run.config.oldest == 2


@pytest.mark.parametrize("strings", [(), ("a", "tt")])
def test_fewer_slots_than_places_give_the_same_samples(start: Any, strings: Any):
    changes = {"num_generations": 2, "sampling": {"top_k": 50, "stop": [*STOPS, *strings]}}
    wanted = drawn(start("grpo", 4, **changes))
    for mine, theirs in zip(drawn(start("grpo", 4, **changes), micro_batches=3), wanted, strict=True):
        assert list(mine) == list(theirs)
        for number, batch in mine.items():
            assert all(
                torch.equal(batch[key].values, theirs[number][key].values)
                for key in set(batch.data) - {"old_logprobs"}
            )
            old, wanted_old = batch["old_logprobs"].values, theirs[number]["old_logprobs"].values
            assert torch.allclose(old, wanted_old, atol=1e-5)


class Counts:
    """What a timing is asked for: tokens of prompts, steps, or rows of all steps, as if they were seconds."""

    def __init__(self, counted: str, layers: int) -> None:
        self._counted, self._layers = counted, layers

    def layer_s(self, kind: str, tokens: float, context: float) -> float:
        of = {"read": ("prefill", tokens), "steps": ("decode", 1.0), "rows": ("decode", tokens)}
        counts, number = of[self._counted]
        return number / self._layers if kind == counts else 0.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0.0


@pytest.mark.parametrize("micro_batches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_planner_prices_the_steps_and_the_reading_that_there_are(
    start: Any, monkeypatch: Any, micro_batches: int
):
    iterations, skipped = 40, 6
    run = start("reinforce_pp", 4, total_iterations=iterations + 9)
    found = dict.fromkeys(("read", "steps", "rows"), 0)
    fill, compute = Group._fill, Group.compute

    def filled(group: Group, pieces: Any, places: Any) -> None:
        found["read"] += sum(piece.stop - piece.first for piece in pieces)
        fill(group, pieces, places)

    def computed(group: Group, *wait_s: float) -> None:
        compute(group, *wait_s)
        found["steps"] += 1
        found["rows"] += group._cache.rows

    monkeypatch.setattr(Group, "_fill", filled)
    monkeypatch.setattr(Group, "compute", computed)
    batches = drawn(run, skipped, micro_batches)
    drawn(run, skipped, micro_batches)  # until the places are filled as in the steady state
    found.update(dict.fromkeys(found, 0))
    batches = drawn(run, iterations, micro_batches, (skipped, skipped * BATCH))
    samples = [batch for one in batches for batch in one.values()]
    lengths = Counter(int(batch["response_mask"].values.sum()) for batch in samples)
    tokens = sum(int(batch["input_ids"].lengths[0]) for batch in samples) - sum(
        n * c for n, c in lengths.items()
    )
    responses = Lengths(points=tuple((n, c / len(samples)) for n, c in sorted(lengths.items())))
    (call,) = (call for call in run.calls if call.kind == "generate")
    shape = run.engines["actor"].layout.shape
    workload = Workload(
        prompt_tokens=round(tokens / len(samples)), new_tokens=responses, itemsize=4, recompute="none"
    )
    for counted, number in found.items():
        timing: Any = Counts(counted, shape.layers)
        of = sizes(shape, "lm", 1)
        mesh = OnMesh(timing, workload, of, of, ParallelStrategy(), Crossings(False, False, False))
        priced = generate(mesh, call, micro_batches).seconds
        assert priced == pytest.approx(number / (iterations - skipped), rel=0.2), counted


@pytest.mark.parametrize("kind", KINDS)
def test_the_metrics_count_what_is_begun_and_not_delivered(start: Any, kind: str):
    run = start(kind, 4, total_iterations=4, **KINDS[kind])
    before = weights(run, "actor")
    told = [run.iterate(t)[0] for t in range(4)]
    assert [one["segments/unfinished"] for one in told] == [BATCH, BATCH, BATCH, 0]
    assert any(0 < one["segments/waiting"] < BATCH for one in told)
    assert all(math.isfinite(one["loss/policy"]) for one in told)
    assert any(not torch.equal(w, before[name]) for name, w in weights(run, "actor").items())
