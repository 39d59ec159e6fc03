"""Advantages and returns against slow, plain references and at their edges."""

import random

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import last_response_tokens
from prefect_rlhf.rlhf_tasks.algorithms.shared.returns import (
    at_last_tokens,
    discounted_returns,
    gae,
    shaped_rewards,
    token_rewards,
    trajectories,
)
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import LENGTHS


def ragged(seed: int, n: int = 7) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lengths, a mask with holes, rewards and values of some samples; one has no response at all."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 9) for _ in range(n)]
    mask = torch.tensor([draw.random() < 0.6 for _ in range(sum(lengths))])
    mask[: lengths[0]] = False
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), dtype=torch.float64, generator=generator)
    return lengths, mask, torch.where(mask, rewards, 0.0), values


def slow_gae(rewards, values, mask, lengths, gamma, lam, final_values=None):
    advantages, start = [0.0] * len(rewards), 0
    for sample, length in enumerate(lengths):
        next_value, next_advantage = 0.0 if final_values is None else final_values[sample], 0.0
        for t in reversed(range(start, start + length)):
            if mask[t]:
                delta = rewards[t] + gamma * next_value - values[t]
                next_advantage = advantages[t] = float(delta + gamma * lam * next_advantage)
                next_value = values[t]
        start += length
    return torch.tensor(advantages, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(10))
def test_gae_equals_the_recursion_on_each_sample(seed: int):
    lengths, mask, rewards, values = ragged(seed)
    advantages, returns = gae(rewards, values, mask, lengths, 0.97, 0.9)
    expected = slow_gae(rewards, values, mask, lengths, 0.97, 0.9)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_gae_goes_on_from_the_value_after_a_truncated_response(seed: int):
    lengths, mask, rewards, values = ragged(seed)
    finals = torch.randn(len(lengths), dtype=torch.float64)
    advantages, _ = gae(rewards, values, mask, lengths, 0.97, 0.9, finals)
    expected = slow_gae(rewards, values, mask, lengths, 0.97, 0.9, finals)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)


def test_a_bootstrapped_value_is_discounted_as_any_other():
    rewards, values, mask = torch.tensor([0.0, 1.0]), torch.zeros(2), torch.ones(2, dtype=torch.bool)
    returns = gae(rewards, values, mask, [2], 0.5, 1.0, torch.tensor([4.0]))[1]
    torch.testing.assert_close(returns, torch.tensor([1.5, 3.0]))


def test_gae_with_lambda_one_gives_discounted_returns_and_with_zero_the_td_error():
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.125])
    mask = torch.ones(3, dtype=torch.bool)
    returns = gae(rewards, values, mask, [3], 0.5, 1.0)[1]
    torch.testing.assert_close(returns, torch.tensor([0.25, 0.5, 1.0]))
    advantages = gae(rewards, values, mask, [3], 0.5, 0.0)[0]
    torch.testing.assert_close(advantages, torch.tensor([-0.375, -0.1875, 0.875]))


def test_gae_of_nothing_is_nothing():
    empty = torch.zeros(0)
    assert gae(empty, empty, empty.bool(), [], 1.0, 1.0)[0].shape == (0,)
    silent = torch.zeros(3, dtype=torch.bool)
    assert gae(torch.ones(3), torch.ones(3), silent, [3], 1.0, 1.0)[0].tolist() == [0.0] * 3


def test_gae_refuses_sizes_that_differ():
    with pytest.raises(ValueError, match=r"rewards \[2\], values \[3\]"):
        gae(torch.ones(2), torch.ones(3), torch.ones(3).bool(), [3], 1.0, 1.0)


def test_scores_land_on_last_response_tokens():
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1]).bool()
    lengths = [4, 1, 2]
    assert last_response_tokens(mask, lengths).tolist() == [2, -1, 6]
    placed = at_last_tokens(torch.tensor([10.0, 20.0, 30.0]), mask, lengths)
    rewards = shaped_rewards(torch.ones(7), placed, mask, 0.5)
    assert rewards.tolist() == [0, -0.5, 9.5, 0, 0, 0, 29.5]


def test_returns_are_the_discounted_rewards_that_follow():
    mask = torch.tensor([0, 1, 1, 1, 0, 1]).bool()
    rewards = torch.tensor([0.0, 1.0, 0.0, 4.0, 0.0, 8.0])
    assert discounted_returns(rewards, mask, [4, 2], 0.5).tolist() == [0.0, 2.0, 2.0, 4.0, 0.0, 8.0]


def test_each_branch_of_an_agents_sample_ends_with_the_samples_score():
    """As if each were a sample of its own: no branch counts on what another one draws."""
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1]).bool()
    ids, branches, one = torch.arange(10), torch.tensor([3, 4, 3]), (1, 1)
    scores = torch.tensor([2.0, -1.0])
    data = {
        "input_ids": Packed(ids, (7, 3)),
        "response_mask": Packed(mask, (7, 3)),
        "scores": Packed(scores, one),
    }
    batch = SampleBatch((4, 5), {**data, LENGTHS: Packed(branches, (2, 1))})
    along = trajectories(batch)
    assert along.lengths == (3, 4, 3)
    assert along.at_ends(torch.tensor([5.0, 7.0])).tolist() == [0.0, 5.0, 7.0], "what follows the last branch"
    rewards = token_rewards(batch)
    assert rewards.tolist() == [0, 0, 2, 0, 0, 0, 2, 0, 0, -1]
    returns = discounted_returns(rewards, mask, along.lengths, gamma=0.5)
    assert returns.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, -0.5, -1]
    whole = SampleBatch((4, 5), data)
    assert trajectories(whole).lengths == (7, 3)
    assert token_rewards(whole).tolist() == [0, 0, 0, 0, 0, 0, 2, 0, 0, -1]
