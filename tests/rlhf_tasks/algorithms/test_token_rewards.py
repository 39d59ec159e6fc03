"""Rewards per token and per step: at their tokens where an algorithm learns from tokens, their sum elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.ppo import functions
from prefect_rlhf.rlhf_tasks.algorithms.ppo.functions import Targets, learning_targets
from prefect_rlhf.rlhf_tasks.algorithms.shared.returns import discounted_returns, shaped_rewards
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import rewards_of_tokens
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from tests.rlhf_tasks.algorithms.one_rank import OneRank
from tests.rlhf_tasks.algorithms.test_one_rank import document, folder, weights, whole, world

__all__ = ["folder", "world"]  # fixtures

REWARDS = """
def whole(completions, completion_ids, **columns):
    return [sum(ids) % 7 / 3 for ids in completion_ids]

def tokens(completions, completion_ids, **columns):
    return [[0.0] * (len(ids) - 1) + [sum(ids) % 7 / 3] for ids in completion_ids]

def steps(completions, completion_ids, **columns):
    return [[[len(ids) - 1, sum(ids) % 7 / 3]] for ids in completion_ids]

def each(completions, completion_ids, **columns):
    return [[1.0] * len(ids) for ids in completion_ids]

def short(completions, completion_ids, **columns):
    return [[1.0] * (len(ids) - (place == 2)) for place, ids in enumerate(completion_ids)]
"""
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {"truncated_responses": "zero", "whiten_rewards": True},
    "grpo": {"num_generations": 2},
    "rloo": {"num_generations": 2},
    "remax": {},
    "reinforce_pp": {"gamma": 0.9},
    "expert_iteration": {"num_generations": 2, "best_of_group": True},
}


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[OneRank] = []
    (tmp_path / "mine.py").write_text(REWARDS)

    def make(kind: str, reward: str, per: str, **changes: Any) -> OneRank:
        entry = {"function": f"{tmp_path / 'mine.py'}:{reward}", "per": per, "weight": 0.7}
        settings = {"rewards": [entry], "on_reward_error": "stop", **changes}
        runs.append(OneRank(make_config(document(kind, folder, **settings)), tmp_path))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


# RLOO and ReMax learn from the sums of their samples as GRPO does.
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k in ("rloo", "remax") else k for k in KINDS]
)
def test_a_reward_that_is_zero_but_at_the_last_token_learns_as_that_of_the_whole_answer(
    start: Any, kind: str
):
    """To the last bit, per token and per step."""
    plain = start(kind, "whole", "sequence", **KINDS[kind])
    expected, _ = plain.iterate(0)
    for reward, per in (("tokens", "token"), ("steps", "step")):
        run = start(kind, reward, per, **KINDS[kind])
        metrics, _ = run.iterate(0)
        assert metrics["reward"] == expected["reward"]
        assert metrics[f"rewards/{reward}/mean"] == pytest.approx(expected["rewards/whole/mean"])
        assert metrics["grad_norm/actor"] == expected["grad_norm/actor"] > 0
        for role in [role for role, engine in run.engines.items() if engine.optimizer is not None]:
            for name, weight in weights(run, role).items():
                assert torch.equal(weight, weights(plain, role)[name]), (per, role, name)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_the_score_of_an_answer_is_the_sum_of_its_tokens_rewards(start: Any, kind: str):
    run = start(kind, "each", "token", **KINDS[kind] | {"missing_eos_penalty": 0.0})
    metrics, store = run.iterate(0)
    batch = whole(store, "scores", "response_mask")
    counts = torch.stack([mask.sum() for mask in batch["response_mask"].split()])
    torch.testing.assert_close(batch["scores"].values, 0.7 * counts.float())
    assert metrics["rewards/each/mean"] == counts.double().mean().item()


def test_ppo_returns_what_is_still_to_come_at_each_token(start: Any):
    """Every token is worth 0.7; without KL penalty and discount a return counts the tokens that are left."""
    run, seen = start("ppo", "each", "token", kl_coef=0.0, lam=1.0, missing_eos_penalty=0.5), []

    def first(engine: Any, batch: Any, context: Any) -> Targets:
        seen.append((batch, learning_targets(engine, batch, context)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "learning_targets", first)
        run.iterate(0)
    batch, targets = seen[0]
    parts = zip(
        batch["response_mask"].split(),
        targets.returns.split(list(batch["input_ids"].lengths)),
        batch["truncated"].values if "truncated" in batch.data else [None] * len(batch),
        strict=True,
    )
    scores = batch["scores"].values.tolist()
    for (mask, returns, _), score in zip(parts, scores, strict=True):
        n = int(mask.sum())
        penalty = 0.7 * n - score  # 0.5 where it was truncated, at the last token
        expected = [0.7 * left - penalty for left in range(n, 0, -1)]
        assert returns[mask].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_reward_counts_from_its_token_back_and_not_after_it():
    """Two responses of three and two tokens after prompts of one; discounted by 1/2, by hand."""
    mask = torch.tensor([False, True, True, True, False, True, True])
    rewards = torch.tensor([0.0, 1.0, 0.0, 4.0, 0.0, 0.0, 2.0])
    kl = torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    shaped = shaped_rewards(kl, rewards, mask, 0.5)
    assert shaped.tolist() == [0.0, 1.0, -1.0, 4.0, 0.0, 0.0, 2.0]
    assert discounted_returns(shaped, mask, [4, 3], gamma=0.5).tolist() == [0.0, 1.5, 1.0, 4.0, 0.0, 1.0, 2.0]


def test_what_is_for_the_whole_answer_counts_at_its_last_token():
    penalties, model = torch.tensor([-0.5, 0.0]).double(), torch.tensor([2.0, 3.0]).double()
    weighted = [(2.0, [[1.0, 0.0, 1.0], None]), (1.0, [4.0, 5.0])]
    first, second = rewards_of_tokens([3, 2], penalties, weighted, model)
    assert first.tolist() == [2.0, 0.0, 2.0 - 0.5 + 4.0 + 2.0]
    assert second.tolist() == [0.0, 5.0 + 3.0]


def test_a_wrong_number_of_numbers_is_named_with_the_sample(start: Any):
    sentence = (
        r"^reward 'short' returned \d numbers for an answer of \d tokens: .* It was judging sample 2 \("
    )
    with pytest.raises(RewardError, match=sentence):
        start("ppo", "short", "token").iterate(0)


def test_with_skip_such_a_sample_leaves_the_batch(start: Any):
    run = start("ppo", "short", "token", on_reward_error="skip")
    metrics, store = run.iterate(0)
    assert metrics["skipped_samples"] == 1
    assert whole(store, "stays")["stays"].values.tolist() == [place != 2 for place in range(8)]
