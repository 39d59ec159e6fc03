"""The formulas of PPO's critic and KL coefficient against plain references and at their edges."""

import pytest
import torch

from rlhf_tasks.algorithms.ppo.ppo_math import adapted_kl_coef, shifted, value_loss


def test_the_adaptive_coefficient_moves_towards_the_target_within_bounds():
    assert adapted_kl_coef(0.1, kl=6.0, target=6.0, horizon=1000, n_seqs=100) == 0.1
    assert adapted_kl_coef(0.1, kl=60.0, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.102)
    assert adapted_kl_coef(0.1, kl=-5.0, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.098)
    assert adapted_kl_coef(0.1, kl=6.6, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.101)


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
