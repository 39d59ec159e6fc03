"""PPO's adaptive KL coefficient, and its critic."""

import json
import math
import random

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.ppo.functions import (
    DECAY,
    VARIANCE_FLOOR,
    ValueNorm,
    adapted_kl_coef,
    shifted,
    value_loss,
)


def test_the_adaptive_coefficient_moves_towards_the_target_within_bounds():
    assert adapted_kl_coef(0.1, kl=6.0, target=6.0, horizon=1000, n_seqs=100) == 0.1
    assert adapted_kl_coef(0.1, kl=60.0, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.102)
    assert adapted_kl_coef(0.1, kl=-5.0, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.098)
    assert adapted_kl_coef(0.1, kl=6.6, target=6.0, horizon=1000, n_seqs=100) == pytest.approx(0.101)


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


def test_a_fresh_one_changes_nothing():
    values = torch.tensor([1.0, -2.0])
    assert ValueNorm.of({}).normalize(values).tolist() == values.tolist()
    assert ValueNorm.of({}).denormalize(values).tolist() == values.tolist()


def test_the_first_iteration_is_taken_as_it_is():
    norm = ValueNorm().updated(mean=5.0, square=29.0)
    assert norm.mean == pytest.approx(5.0)
    assert norm.std == pytest.approx(2.0)


def test_averages_are_exponential_and_debiased():
    draw = random.Random(0)
    seen = [(draw.random(), 2 + draw.random()) for _ in range(9)]
    norm = ValueNorm()
    for mean, square in seen:
        norm = norm.updated(mean, square)
    weights = [DECAY ** (len(seen) - 1 - i) for i in range(len(seen))]
    mean = sum(w * m for w, (m, _) in zip(weights, seen, strict=True)) / sum(weights)
    square = sum(w * s for w, (_, s) in zip(weights, seen, strict=True)) / sum(weights)
    assert norm.mean == pytest.approx(mean)
    assert norm.std == pytest.approx((square - mean**2) ** 0.5)


def test_normalising_there_and_back():
    norm = ValueNorm().updated(3.0, 25.0)
    values = torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm.denormalize(norm.normalize(values)), values)


def test_returns_that_are_all_alike_do_not_divide_by_zero():
    assert ValueNorm().updated(2.0, 4.0).std == VARIANCE_FLOOR**0.5


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_what_is_not_finite_is_left_out(bad: tuple[float, float]):
    norm = ValueNorm().updated(3.0, 25.0)
    assert norm.updated(*bad) == norm
    assert ValueNorm().updated(*bad) == ValueNorm()


def test_its_state_survives_json_bit_by_bit():
    state: dict = {}
    norm = ValueNorm().updated(0.1, 0.7).updated(1 / 3, 0.9)
    norm.put(state)
    assert ValueNorm.of(json.loads(json.dumps(state))) == norm
