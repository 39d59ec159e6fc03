"""The formulas of policy gradients against slow, plain references and at their edges."""

import math

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import (
    bounded,
    cispo_loss,
    clipped_loss,
    geometric_ratio,
    kl_divergence,
    response_ratio,
    token_ratio,
)

MARKED = torch.ones(4, dtype=torch.bool)


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
