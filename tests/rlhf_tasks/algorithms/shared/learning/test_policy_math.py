"""The formulas of policy gradients against slow, plain references and at their edges."""

import math
import random

import pytest
import torch

from rlhf_tasks.algorithms.shared.learning.packed import (
    last_response_tokens,
    on_tokens,
    response_lengths,
    response_sums,
)
from rlhf_tasks.algorithms.shared.learning.policy_math import (
    at_last_tokens,
    bounded,
    cispo_loss,
    clipped_loss,
    discounted_returns,
    gae,
    geometric_ratio,
    kl_divergence,
    overlong_penalties,
    response_ratio,
    shaped_rewards,
    token_ratio,
)

MARKED = torch.ones(4, dtype=torch.bool)


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


def test_kl_estimators():
    lp, ref = torch.tensor([-1.0, -3.0], dtype=torch.float64), torch.tensor([-2.0, -2.0], dtype=torch.float64)
    assert kl_divergence(lp, ref, "k1").tolist() == [1.0, -1.0]
    assert kl_divergence(lp, ref, "k2").tolist() == [0.5, 0.5]
    k3 = kl_divergence(lp, ref, "k3").tolist()
    assert k3 == pytest.approx([math.exp(-1), math.e - 2])
    with pytest.raises(KeyError):
        kl_divergence(lp, ref, "k4")


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_estimators_have_the_kl_as_their_mean(estimator: str):
    p, q = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    estimates = kl_divergence(p.log(), q.log(), estimator)
    assert (p * estimates).sum().item() == pytest.approx((p * (p / q).log()).sum().item())


def test_kl_estimators_stay_finite_at_impossible_tokens():
    for estimator in ("k1", "k2", "k3"):
        assert kl_divergence(torch.tensor([-1e9]), torch.tensor([-1.0]), estimator).isfinite().all()


def test_scores_land_on_last_response_tokens():
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1]).bool()
    lengths = [4, 1, 2]
    assert last_response_tokens(mask, lengths).tolist() == [2, -1, 6]
    placed = at_last_tokens(torch.tensor([10.0, 20.0, 30.0]), mask, lengths)
    rewards = shaped_rewards(torch.ones(7), placed, mask, 0.5)
    assert rewards.tolist() == [0, -0.5, 9.5, 0, 0, 0, 29.5]


def test_policy_loss_clips_only_where_it_would_reward_going_further():
    old = torch.zeros(4)
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    ratio = token_ratio(logprobs - old, MARKED, [4])
    loss, clipped = clipped_loss(logprobs, ratio, advantages, 0.2, 0.2)
    up, down = math.exp(0.5), math.exp(-0.5)
    assert loss.detach().tolist() == pytest.approx([-1.2, up, -down, 0.8])
    assert ratio.detach().tolist() == pytest.approx([up, up, down, down])
    assert clipped.tolist() == [True, False, False, True]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == [False, True, True, False]


def test_policy_gradient_at_the_old_policy_is_minus_the_advantage():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ratio = token_ratio(logprobs - logprobs.detach(), MARKED[:2], [2])
    clipped_loss(logprobs, ratio, torch.tensor([3.0, -4.0]), 0.2, 0.2)[0].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-3.0, 4.0]


def test_policy_loss_stays_finite_for_absurd_ratios():
    for ratio in (token_ratio, geometric_ratio, response_ratio):
        found = ratio(torch.tensor([1e6]), MARKED[:1], [1])
        assert clipped_loss(torch.zeros(1), found, torch.tensor([-1.0]), 0.2, 0.2)[0].isfinite().all()


def test_dual_clipping_bounds_the_loss_of_bad_tokens_alone():
    old = torch.zeros(4)
    logprobs = torch.tensor([2.0, 2.0, 1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    ratio = token_ratio(logprobs - old, MARKED, [4])
    loss, clipped = clipped_loss(logprobs, ratio, advantages, 0.2, 0.2, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2, math.e, 0.8])
    assert ratio.detach().tolist() == pytest.approx([math.exp(2), math.exp(2), math.e, math.exp(-2)])
    assert clipped.tolist() == [True, True, False, True]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == [False, False, True, False]


def test_log_ratios_are_bounded():
    ratios = bounded(torch.tensor([30.0, 1.0, -100.0]))
    assert ratios.tolist() == [20.0, 1.0, -20.0]


def test_sums_and_values_of_responses():
    mask, lengths = torch.tensor([0, 1, 1, 0, 0, 0, 1]).bool(), [4, 1, 2]
    values = torch.arange(7.0)
    assert response_sums(values, mask, lengths).tolist() == [3.0, 0.0, 6.0]
    assert response_lengths(mask, lengths).tolist() == [2, 0, 1]
    assert on_tokens(torch.tensor([5.0, 6.0, 7.0]), lengths).tolist() == [5, 5, 5, 5, 6, 7, 7]
    nothing = torch.zeros(0)
    assert response_sums(nothing, nothing.bool(), []).shape == on_tokens(nothing, []).shape == (0,)


def test_a_responses_ratio_is_the_product_of_its_tokens_ratios_or_their_geometric_mean():
    mask, lengths = torch.tensor([0, 1, 1, 0, 1]).bool(), [3, 2]
    change = torch.tensor([0.0, 2.0, 4.0, 0.0, 8.0], requires_grad=True)
    assert token_ratio(change, mask, lengths).log().tolist() == pytest.approx([0, 2, 4, 0, 8])
    assert response_ratio(change, mask, lengths).log().tolist() == pytest.approx([6, 6, 6, 8, 8])
    means = geometric_ratio(change, mask, lengths)
    assert means.log().tolist() == pytest.approx([3, 3, 3, 8, 8])
    means[0].backward()
    assert change.grad is not None
    assert change.grad.tolist() == pytest.approx([0, math.exp(3) / 2, math.exp(3) / 2, 0, 0])


def test_a_higher_upper_bound_lets_good_tokens_grow_further():
    logprobs = torch.tensor([0.25, 0.25, -0.25, 0.5]).log1p()
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    loss, clipped = clipped_loss(logprobs, token_ratio(logprobs, MARKED, [4]), advantages, 0.2, 0.28)
    assert loss.tolist() == pytest.approx([-1.25, 1.25, 0.8, -1.28])
    assert clipped.tolist() == [False, False, True, True]


def test_cispo_gives_every_token_the_gradient_of_its_bounded_ratio():
    logprobs = torch.tensor([1.0, 0.1, -0.1, 1.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 2.0, -1.0])
    loss, clipped = cispo_loss(logprobs, token_ratio(logprobs, MARKED, [4]), advantages, 0.2)
    weights = [1.2, math.exp(0.1), math.exp(-0.1), 1.2]
    expected = [-w * a * lp for w, a, lp in zip(weights, advantages.tolist(), logprobs.tolist(), strict=True)]
    assert loss.tolist() == pytest.approx(expected)
    assert clipped.tolist() == [True, False, False, True]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(
        [-w * a for w, a in zip(weights, advantages.tolist(), strict=True)]
    )


def test_the_penalty_of_long_responses_grows_over_the_buffer():
    """DAPO's example: 20,480 tokens at most, of which the last 4,096 are the buffer."""
    tokens = torch.tensor([100, 16384, 16384 + 1024, 20480])
    assert overlong_penalties(tokens, 20480, 0.2).tolist() == [0.0, 0.0, -0.25, -1.0]
    assert overlong_penalties(torch.tensor([0, 5, 10]), 10, 1.0).tolist() == [0.0, -0.5, -1.0]


def test_returns_are_the_discounted_rewards_that_follow():
    mask = torch.tensor([0, 1, 1, 1, 0, 1]).bool()
    rewards = torch.tensor([0.0, 1.0, 0.0, 4.0, 0.0, 8.0])
    assert discounted_returns(rewards, mask, [4, 2], 0.5).tolist() == [0.0, 2.0, 2.0, 4.0, 0.0, 8.0]
