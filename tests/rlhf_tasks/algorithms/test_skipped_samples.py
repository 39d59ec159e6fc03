"""`on_reward_error: skip`: a sample that a reward fails on leaves the batch, and nothing that follows sees it."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import write_skipped
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.rewards import Fault, mean_scores
from tests.rlhf_tasks.algorithms.one_rank import OneRank
from tests.rlhf_tasks.algorithms.test_one_rank import N_SEQS, document, folder, trained, weights, whole, world

__all__ = ["folder", "world"]  # fixtures

PICKY = """
def picky(prompts, completions, **columns):
    assert not any(p.startswith("abababab") for p in prompts), "too long"
    return [float(len(c)) for c in completions]

def never(prompts, completions, **columns):
    raise KeyError("nothing")

def silent(prompts, completions, **columns):
    return [None if p.startswith("abababab") else 1.0 for p in prompts]

def mute(prompts, completions, **columns):
    return [None] * len(prompts)

def seldom(prompts, completions, **columns):
    return [1.0 if p.startswith("abababab") else None for p in prompts]
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"kl_target": 0.5, "kl_horizon": 50, "whiten_rewards": True, "normalize_values": True},
    "grpo": {"num_generations": 2, "beta": 0.1, "scale_rewards": "batch"},
    "dapo": {"num_generations": 2},
    "rloo": {"num_generations": 2},
    "remax": {},
    "reinforce_pp": {},
    "expert_iteration": {"num_generations": 2, "best_of_group": True},
}


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[OneRank] = []
    (tmp_path / "picky.py").write_text(PICKY)

    def make(kind: str, reward: str = "", **changes: Any) -> OneRank:
        if reward:
            changes["rewards"] = [{"function": f"{tmp_path / 'picky.py'}:{reward}"}]
        runs.append(OneRank(make_config(document(kind, folder, **changes)), tmp_path))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def lines(run_folder: Path) -> list[dict[str, Any]]:
    files = sorted((run_folder / "skipped-samples").glob("*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


EACH = [pytest.param(kind, marks=pytest.mark.slow) if kind in ("dapo", "rloo") else kind for kind in OPTIONS]
"""In the default suite those whose learning differs: DAPO and RLOO compare the samples of a group as GRPO does."""


@pytest.mark.parametrize("kind", EACH)
def test_training_without_skipped_samples_is_training_on_a_smaller_batch(start: Any, kind: str):
    """Half of a batch is skipped; a batch that has only the other half gives the same bits."""
    skips = start(kind, on_reward_error="skip", num_mini_batches=1, **OPTIONS[kind])
    skips.calls, calls = [call for call in skips.calls if call.kind != "train_step"], skips.calls
    _, store = skips.iterate(0)
    skips.calls = calls
    half = N_SEQS // 2
    one, later = (1,) * N_SEQS, tuple(range(N_SEQS))
    stays = Packed(torch.arange(N_SEQS) < half, one)
    spoilt = Packed(torch.where(stays.values, whole(store, "scores")["scores"].values, 1e6), one)
    smaller = start(kind, batch_size=half, num_mini_batches=1, **OPTIONS[kind])
    expected = trained(smaller, store, half)
    store.put(SampleBatch(later, {"stays": stays, "scores": spoilt}))
    found = trained(skips, store, N_SEQS)
    assert found[0] == pytest.approx(expected[0], rel=1e-12, nan_ok=True)
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("kind", EACH)
def test_where_nothing_is_skipped_the_option_changes_no_bit(start: Any, kind: str):
    plain, skips = (start(kind, on_reward_error=choice, **OPTIONS[kind]) for choice in ("stop", "skip"))
    expected, found = plain.iterate(0)[0], skips.iterate(0)[0]
    counts = {"skipped_samples", "greedy/skipped_samples"} & found.keys()
    assert all(found.pop(name) == 0 for name in counts)
    del expected["throughput/tokens_per_s"], found["throughput/tokens_per_s"]
    for metrics in (expected, found):
        metrics.pop("greedy/throughput/tokens_per_s", None)
    assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    for name, weight in weights(plain, "actor").items():
        assert torch.equal(weight, weights(skips, "actor")[name])


@pytest.mark.parametrize("kind", ["ppo", "grpo", "remax"])
def test_a_skipped_sample_is_counted_named_once_and_in_no_mean(start: Any, tmp_path: Path, kind: str):
    """Of the prompts ab>, abab>, ... the reward takes the first three."""
    run = start(kind, "picky", on_reward_error="skip", missing_eos_penalty=0.0, **OPTIONS[kind])
    metrics, store = run.iterate(0)
    prompts = [json.loads(text)["prompt"] for text in whole(store, "columns")["columns"].texts()]
    stays = [len(prompt) < 8 for prompt in prompts]
    assert 0 < sum(stays) < N_SEQS
    batch = whole(store, "stays", "scores", "input_ids", "response_mask")
    assert batch["stays"].values.tolist() == stays
    assert metrics["skipped_samples"] == N_SEQS - sum(stays)
    completions = [
        len(run.tokenizer.decode(ids[mask].tolist()))
        for ids, mask in zip(batch["input_ids"].split(), batch["response_mask"].split(), strict=True)
    ]
    left = [n for n, stay in zip(completions, stays, strict=True) if stay]
    assert metrics["reward"] == metrics["rewards/picky/mean"] == sum(left) / len(left)
    listed = {line["sample"]: line for line in lines(tmp_path)}
    assert sorted(listed) == [place for place, stay in enumerate(stays) if not stay]
    for sample, line in listed.items():
        assert line["iteration"] == 0
        assert line["row"] == str(sample)  # what `where` of OneRank gives
        assert line["reward"] == "picky"
        assert "raised AssertionError: too long at " in line["reason"]
    names = sorted(path.name for path in (tmp_path / "skipped-samples").iterdir())
    assert names == ["00000000-0000.jsonl"] + (["greedy-00000000-0000.jsonl"] if kind == "remax" else [])
    run.iterate(0)  # as after a kill
    assert sorted(path.name for path in (tmp_path / "skipped-samples").iterdir()) == names


def test_a_sample_that_no_reward_judges_is_skipped_too(start: Any, tmp_path: Path):
    run = start("grpo", "silent", on_reward_error="skip", **OPTIONS["grpo"])
    metrics, store = run.iterate(0)
    skipped = metrics["skipped_samples"]
    assert (~whole(store, "stays")["stays"].values).sum() == skipped > 0
    assert lines(tmp_path)[0]["reason"] == "no reward gave a value (silent returned None)."


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_run_of_which_no_reward_judges_any_sample_ends_with_a_sentence(start: Any, chunks: int):
    sentence = r"^the rewards 'mute' returned None for every sample of iteration 0, so there is no score\.$"
    with pytest.raises(RewardError, match=sentence):
        start("grpo", "mute", num_generations=2, chunks=chunks).iterate(0)


def test_a_part_in_which_no_reward_judges_any_sample_ends_no_run(start: Any):
    """It may be a head's whole share of the batch under another layout."""
    alone, in_parts = (
        start("grpo", "seldom", num_generations=2, chunks=chunks).iterate(0)[0] for chunks in (1, 4)
    )
    assert in_parts["rewards/seldom/mean"] == alone["rewards/seldom/mean"] == 1.0


def test_an_iteration_that_has_lost_every_sample_ends_the_run_with_a_sentence(start: Any):
    sentence = (
        r"^a reward failed on every sample of iteration 0, so none is left\. Of sample 0: reward 'never' "
    )
    with pytest.raises(RewardError, match=sentence):
        start("grpo", "never", on_reward_error="skip", num_generations=2).iterate(0)


def test_a_rollout_shows_a_skipped_answer_without_a_score(start: Any, tmp_path: Path):
    run = start("rollout", "picky", on_reward_error="skip", missing_eos_penalty=0.0)
    run.iterate(0)
    samples = [
        json.loads(line) for line in (tmp_path / "samples/00000000-0000.jsonl").read_text().splitlines()
    ]
    assert [sample["score"] is None for sample in samples] == [False] * 3 + [True] * 4 + [False]
    kept = [samples[place]["score"] for place in (0, 1, 2, 7)]
    assert mean_scores(tmp_path, 8)["reward"] == sum(kept) / 4


def test_an_evaluation_counts_a_failed_answer_as_zero(start: Any):
    run = start("rollout", "picky", on_reward_error="skip", missing_eos_penalty=0.5)
    as_evaluation = run.config.model_dump(exclude={"type"}) | {"type": "evaluate"}
    run.config = make_config(as_evaluation)
    metrics, store = run.iterate(0)
    scores = whole(store, "scores")["scores"].values
    assert metrics["skipped_samples"] == 4
    assert metrics["reward"] == pytest.approx(float(scores.sum()) / N_SEQS)
    assert not scores[3:7].any()
    judged = scores[[0, 1, 2, 7]] + 0.5 * whole(store, "truncated")["truncated"].values[[0, 1, 2, 7]]
    assert metrics["rewards/picky/mean"] == pytest.approx(float(judged.mean()))


def test_an_iteration_computed_again_under_another_plan_lists_no_sample_twice(tmp_path: Path, folder: Path):
    config = make_config(document("ppo", folder, on_reward_error="skip"))

    def write(dp: int, of: int, *samples: int, iteration: int = 3) -> None:
        strategy = SimpleNamespace(dp=of)
        engine: Any = SimpleNamespace(
            coordinate=SimpleNamespace(dp=dp), placement=SimpleNamespace(strategy=strategy)
        )
        context: Any = SimpleNamespace(
            config=config, iteration=iteration, run_folder=tmp_path, where=lambda sample: f"d.jsonl:{sample}"
        )
        write_skipped(engine, dict.fromkeys(samples, Fault("f", "so.")), context)

    write(0, 2, 9, 8)
    write(1, 2, 12)
    write(1, 2, 20, iteration=4)
    write(0, 1, 8, 9, 12)
    found = [(line["iteration"], line["sample"], line["row"]) for line in lines(tmp_path)]
    assert found == [(3, n, f"d.jsonl:{n}") for n in (8, 9, 12)] + [(4, 20, "d.jsonl:20")]
    write(0, 1)
    assert [line["sample"] for line in lines(tmp_path)] == [20]
