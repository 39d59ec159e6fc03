"""PPO's formulas against slow, plain references and at their edges."""

import math
import random

import pytest
import torch

from rlhf_tasks.algorithms.ppo.ppo_math import (
    adapted_kl_coef,
    gae,
    kl_divergence,
    last_response_tokens,
    log_ratio,
    policy_loss,
    shaped_rewards,
    shifted,
    value_loss,
)


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
    rewards = shaped_rewards(torch.ones(7), torch.tensor([10.0, 20.0, 30.0]), mask, lengths, 0.5)
    assert rewards.tolist() == [0, -0.5, 9.5, 0, 0, 0, 29.5]


def test_the_adaptive_coefficient_moves_towards_the_target_within_bounds():
    assert adapted_kl_coef(0.1, kl=6.0, target=6.0, horizon=1000, n_seqs=100) == 0.1
    assert adapted_kl_coef(0.1, kl=60.0, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.102)
    assert adapted_kl_coef(0.1, kl=-5.0, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.098)
    assert adapted_kl_coef(0.1, kl=6.6, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.101)


def test_policy_loss_clips_only_where_it_would_reward_going_further():
    old = torch.zeros(4)
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, ratio, clipped = policy_loss(logprobs, old, advantages, 0.2)
    up, down = math.exp(0.5), math.exp(-0.5)
    assert loss.tolist() == pytest.approx([-1.2, up, -down, 0.8])
    assert ratio.tolist() == pytest.approx([up, up, down, down])
    assert clipped.tolist() == [True, False, False, True]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == [False, True, True, False]


def test_policy_gradient_at_the_old_policy_is_minus_the_advantage():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    policy_loss(logprobs, logprobs.detach().clone(), torch.tensor([3.0, -4.0]), 0.2)[0].sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-3.0, 4.0]


def test_policy_loss_stays_finite_for_absurd_ratios():
    loss, _, _ = policy_loss(torch.tensor([0.0]), torch.tensor([-1e6]), torch.tensor([-1.0]), 0.2)
    assert loss.isfinite().all()


def test_dual_clipping_bounds_the_loss_of_bad_tokens_alone():
    old = torch.zeros(4)
    logprobs = torch.tensor([2.0, 2.0, 1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    loss, ratio, clipped = policy_loss(logprobs, old, advantages, 0.2, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2, math.e, 0.8])
    assert ratio.tolist() == pytest.approx([math.exp(2), math.exp(2), math.e, math.exp(-2)])
    assert clipped.tolist() == [True, True, False, True]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == [False, False, True, False]


def test_log_ratios_are_bounded():
    ratios = log_ratio(torch.tensor([0.0, 0.0, -100.0]), torch.tensor([-30.0, -1.0, 0.0]))
    assert ratios.tolist() == [20.0, 1.0, -20.0]


@pytest.mark.parametrize("delta", [0.1, 0.5, 2.0])
def test_huber_equals_torchs(delta: float):
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 50, dtype=torch.float64, generator=generator)
    near = old + (values - old).clamp(-0.2, 0.2)
    worse = torch.where((near - returns).abs() > (values - returns).abs(), near, values)
    expected = torch.nn.functional.huber_loss(worse, returns, reduction="none", delta=delta)
    torch.testing.assert_close(value_loss(values, old, returns, 0.2, delta)[0], expected)


def test_huber_errors_have_a_bounded_gradient():
    values = torch.tensor([0.5, 9.0], requires_grad=True)
    value_loss(values, values.detach().clone(), torch.zeros(2), 0.2, 1.0)[0].sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 1.0]


def test_value_loss_takes_the_larger_error():
    values, old, returns = (
        torch.tensor([1.0, 0.1, 0.0]),
        torch.tensor([0.0, 0.0, 1.0]),
        torch.tensor([2.0, 2.0, 0.5]),
    )
    loss, clipped = value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([1.8**2 / 2, 1.9**2 / 2, 0.5**2 / 2])
    assert clipped.tolist() == [True, False, False]


def test_values_move_one_token_later_and_never_into_the_next_sample():
    positions = torch.tensor([0, 1, 2, 0, 1])
    assert shifted(torch.tensor([1.0, 2, 3, 4, 5]), positions).tolist() == [0, 1, 2, 0, 4]
