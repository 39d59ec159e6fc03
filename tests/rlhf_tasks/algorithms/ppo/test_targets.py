"""The adaptive KL coefficient."""

import pytest

from rlhf_tasks.algorithms.ppo.targets import adapted_kl_coef


def test_the_adaptive_coefficient_moves_towards_the_target_within_bounds():
    assert adapted_kl_coef(0.1, kl=6.0, target=6.0, horizon=1000, n_seqs=100) == 0.1
    assert adapted_kl_coef(0.1, kl=60.0, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.102)
    assert adapted_kl_coef(0.1, kl=-5.0, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.098)
    assert adapted_kl_coef(0.1, kl=6.6, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.101)
