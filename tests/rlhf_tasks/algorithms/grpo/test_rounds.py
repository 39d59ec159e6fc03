"""Dynamic sampling: which groups are kept, which rounds generate, and what is learned. All cases are by hand."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.algorithms.grpo import missing
from prefect_rlhf.rlhf_tasks.algorithms.grpo.functions import choose, reward_inference
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared import scores
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import (
    CallContext,
    CallOutput,
    generated,
    on_none,
    with_others,
)
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.spec import WHOLE, Part
from prefect_rlhf.rlhf_tasks.user_code.rewards import read_samples
from tests.rlhf_tasks.algorithms.one_rank import OneRank, world_of_one
from tests.tiny_runs import write_model

SIZE = 2  # samples of a group; a batch has two groups
ENGINE: Any = SimpleNamespace(sum_over_dp=lambda values: values, device=torch.device("cpu"))

DOCUMENT = {
    "type": "dapo",
    "dtype": "float32",
    "models": {"actor": "a"},
    "data": {"train": "d"},
    "sampling": {"max_completion_length": 8},
    "rewards": [{"function": "m:f"}],
    "batch_size": 2 * SIZE,
    "num_generations": SIZE,
    "total_iterations": 3,
}


def scored(scores: list[float], first: int = 0) -> SampleBatch:
    """Samples with one token each; NaN: the sample was not generated."""
    there = [score == score for score in scores]
    values = torch.tensor([score for score in scores if score == score], dtype=torch.float64)
    packed = Packed(values, tuple(map(int, there)))
    ids = Packed(torch.zeros(len(values), dtype=torch.int64), packed.lengths)
    return SampleBatch(tuple(range(first, first + len(scores))), {"scores": packed, "input_ids": ids})


def context_of(n_seqs: int, part: Part = WHOLE, first: int = 0) -> Any:
    config, nothing = make_config(DOCUMENT), SimpleNamespace()
    return CallContext(config, 0, first, n_seqs, 1, nothing, nothing, Path(), str, tuple, part=part)  # type: ignore[arg-type]


NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "kept", "rounds"),
    [
        # Both groups of the first round differ: the second was not generated.
        ([0, 1, 1, 0, NAN, NAN, NAN, NAN], [10, 11, 12, 13], 1),
        # One of each round differs.
        ([1, 1, 0, 1, 0, 0, 1, 0], [12, 13, 16, 17], 2),
        # Three differ: the first two are learned.
        ([0, 0, 0, 1, 1, 0, 0, 1], [12, 13, 14, 15], 2),
        # Too few differ, or none: fewer are learned.
        ([0, 0, 0, 1, 1, 1, 0, 0], [12, 13], 2),
        ([0, 0, 1, 1, 1, 1, 0, 0], [], 2),
    ],
)
def test_the_first_groups_that_differ_are_learned(scores, kept, rounds):
    context = context_of(len(scores), first=10)
    made = generated(scored(scores, first=10))
    found = choose(ENGINE, made, made.ids, context, context.config)
    assert found == (kept, len(kept) // SIZE, rounds)


def test_a_group_is_compared_by_the_samples_that_are_left_of_it():
    """A sample that a reward failed on has left the batch: if it was one of two, the other compares with nothing."""
    made = scored([0, 1, 1, 0, 1, 0], first=10)
    left = made.take([0, 2, 3, 4, 5])
    found = choose(ENGINE, left, made.ids, context_of(8, first=10), make_config(DOCUMENT))
    assert found == ([12, 13, 14, 15], 2, 2)


def test_a_round_whose_samples_have_all_left_was_generated():
    made = scored([0, 1, 1, 0, 1, 0, 0, 1], first=10)
    found = choose(ENGINE, made.take([0, 1, 2, 3]), made.ids, context_of(8, first=10), make_config(DOCUMENT))
    assert found == ([10, 11, 12, 13], 2, 2)


@pytest.mark.parametrize("skips", [False, True])
def test_a_round_tells_how_many_of_its_groups_differ(skips, monkeypatch):
    """Where a reward failed on one of two samples, the other compares with nothing."""
    config = make_config({**DOCUMENT, "filter_groups": 2, "on_reward_error": "skip" if skips else "stop"})
    made = scored([0, 1, 1, 0])
    stays = Packed(torch.tensor([True, not skips, True, True]), (1, 1, 1, 1))
    made = SampleBatch(made.ids, {**made.data, "stays": stays})
    monkeypatch.setattr(
        scores, "reward_inference", lambda engine, batch, context: CallOutput(batch, {"n": 4})
    )
    output = reward_inference(ENGINE, made, replace(context_of(4, Part(0, 2)), config=config))
    assert output.of_part == {"groups/differing": 1 if skips else 2}


def test_a_batch_lacks_what_no_round_has_brought():
    assert missing(2, {"groups/differing": 0}) == 2
    assert missing(missing(2, {"groups/differing": 1}), {"groups/differing": 2}) == -1


def test_a_call_that_does_not_run_gives_its_samples_no_rows():
    seen: list[int] = []

    def function(engine: Any, batch: SampleBatch, context: CallContext) -> CallOutput:
        seen.extend(batch.ids)
        rows = Packed(torch.zeros(0, dtype=torch.float64), ())
        return CallOutput(SampleBatch(batch.ids, {"scores": rows}), {"n": len(batch)})

    output = on_none(function)(ENGINE, scored([1, 1, 1, 1], first=4), context_of(4))
    assert not seen
    assert output.batch is not None
    assert output.batch.ids == (4, 5, 6, 7), "the others know that these samples exist"
    assert output.batch["scores"].lengths == (0, 0, 0, 0)
    whole = scored([1, 0])
    assert with_others(whole, whole.ids) is whole


def test_an_iteration_in_rounds_is_one_part_of_generation_and_scoring_for_each():
    config = make_config({**DOCUMENT, "filter_groups": 3, "beta": 0.1})
    calls = {call.name: call for call in algorithm("dapo").calls(config)}
    assert {call.chunks for name, call in calls.items() if name != "actor_train"} == {3}
    assert {call.when for name, call in calls.items() if name != "actor_train"} == {"more_groups"}
    [more] = calls["reward_inference"].decides
    assert (more.first, more.each_part) == (2, True)
    assert (calls["actor_train"].n_seqs, calls["actor_train"].rounds) == (4, 3)
    assert DataflowGraph(list(calls.values()), algorithm("dapo").dataset_keys).n_seqs == 12


def test_rounds_beside_parts_are_refused():
    with pytest.raises(
        ConfigError, match="filter_groups=2 cuts generation into rounds, and chunks=2 into parts"
    ):
        make_config({**DOCUMENT, "filter_groups": 2, "chunks": 2})


@pytest.mark.parametrize(("written", "rounds"), [(False, 1), (True, 1), (0, 1), (1, 1), (3, 3)])
def test_to_drop_groups_is_one_round_and_a_number_says_how_many(written, rounds):
    config = make_config({**DOCUMENT, "filter_groups": written})
    assert (bool(config.filter_groups), config.max_rounds) == (bool(written), rounds)


# Whole iterations on one rank

REWARD = """
from zlib import crc32
def judge(prompts, completions, answer, **columns):
    return [1.0 if a == "alike" else crc32(c.encode()) / 2**32 for c, a in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounds")
    write_model(folder / "model")
    rows = [{"prompt": "ab" * i + ">", "answer": "unlike" if i % 3 else "alike"} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    return folder


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[OneRank] = []

    def make(**changes: Any) -> OneRank:
        document = {
            **DOCUMENT,
            "models": {"actor": str(folder / "model")},
            "data": {"train": str(folder / "rows.jsonl")},
            "rewards": [{"function": f"{folder}/rewards.py:judge"}],
            "optimizer": {"learning_rate": 1e-3},
            "seed": 3,
            **changes,
        }
        runs.append(OneRank(make_config(document), tmp_path))
        return runs[-1]

    with world_of_one():
        yield make
    for run in runs:
        run.close()


def test_a_second_round_fills_the_batch_with_groups_that_differ(start, tmp_path):
    """Of eight rows, every third one gives a group whose scores are all 1."""
    run, rounds_used = start(), set()
    for iteration in range(3):
        metrics, store = run.iterate(iteration)
        ids = list(range(8 * iteration, 8 * iteration + 8))
        rows = [json.loads(text) for text in store.get(ids[::SIZE], ["columns"])["columns"].texts()]
        differ = [row["answer"] == "unlike" for row in rows]
        rounds = 1 if all(differ[:2]) else 2
        assert metrics["groups/rounds"] == rounds
        assert metrics["groups/kept"] == min(2, sum(differ[: 2 * rounds]))
        lengths = store.get(ids, ["input_ids"])["input_ids"].lengths
        assert [length > 0 for length in lengths] == [sample < 4 * rounds for sample in range(8)]
        assert metrics["frac_reward_zero_std"] == 1 - sum(differ[: 2 * rounds]) / (2 * rounds)
        scores = store.get(ids, ["scores"])["scores"].values.double()
        assert metrics["reward"] == pytest.approx(scores.mean().item(), rel=1e-6)
        assert metrics["reward_std"] == pytest.approx(scores.std().item(), rel=1e-6)
        tokens = store.get(ids, ["response_mask"])["response_mask"].values.sum().item()
        assert metrics["completions/mean_length"] == pytest.approx(tokens / (4 * rounds))
        rounds_used.add(rounds)
    assert rounds_used == {1, 2}
    assert list(read_samples(tmp_path, 8))


def test_where_one_round_suffices_it_is_as_if_there_were_no_other(start, folder):
    rows = [{"prompt": "ab" * i + ">", "answer": "unlike"} for i in range(1, 9)]
    (folder / "unlike.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for rounds in (1, 2):
        run = start(filter_groups=rounds, data={"train": str(folder / "unlike.jsonl")})
        metrics, _ = run.iterate(0)
        weights = [w.detach().clone() for w in run.engines["actor"].stage.named_slices().values()]
        found.append(
            ({k: v for k, v in metrics.items() if "per_s" not in k and k != "groups/differing"}, weights)
        )
    (once, weights), (twice, others) = found
    assert once == twice
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_generation_and_scores_that_are_skipped_whole_have_no_metrics(start):
    run = start(filter_groups=1)
    ids, store = range(4), SampleStore()
    store.put(fetch(run.rows, run.config, ids))
    metrics = {}
    for call in run.calls:
        if call.kind != "train_step":
            metrics |= run.call(call, 0, store, ids, runs=False)
    assert metrics == {}
    assert store.get(list(ids), ["input_ids"])["input_ids"].lengths == (0, 0, 0, 0)
