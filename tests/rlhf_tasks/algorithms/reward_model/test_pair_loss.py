"""The reward model's loss: by hand, against a second implementation, and by finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.reward_model import RewardModelConfig
from prefect_rlhf.rlhf_tasks.algorithms.reward_model.functions import pair_loss

SCORES = st.floats(-20, 20)
PAIRS = st.lists(st.tuples(SCORES, SCORES, st.floats(-3, 3)), min_size=1, max_size=6)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_margin_is_what_the_difference_must_exceed():
    terms = pair_loss(f64(1.5), f64(0.5), f64(1.0), 0.0)
    assert terms.total.item() == pytest.approx(math.log(2))
    assert {name: value.item() for name, value in terms.metrics.items()} == {"accuracy": 1, "margin": 1.0}


def test_centering_holds_the_pairs_mean_at_0_and_leaves_its_margin_alone():
    apart, one_sided = (pair_loss(f64(a), f64(b), f64(0.0), 0.5).total for a, b in ((2.0, -2.0), (4.0, 0.0)))
    assert apart.item() == pytest.approx(math.log1p(math.exp(-4)))
    assert (one_sided - apart).item() == pytest.approx(0.5 * 4.0**2)


def test_nothing_is_centred_unless_it_is_asked_for():
    assert RewardModelConfig.model_fields["center_rewards_coefficient"].default == 0


@given(pairs=PAIRS, centering=st.floats(0, 1))
def test_the_loss_is_that_of_a_second_implementation(
    pairs: list[tuple[float, float, float]], centering: float
):
    found = pair_loss(*(f64(*values) for values in zip(*pairs, strict=True)), centering)
    expected = sum(
        math.log1p(math.exp(-abs(d))) + max(0.0, -d) + centering * (a + b) ** 2
        for a, b, d in ((a, b, a - b - margin) for a, b, margin in pairs)
    )
    assert found.total.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gradients_are_those_of_finite_differences():
    chosen, rejected = f64(0.3, -2.0).requires_grad_(), f64(0.1, 1.0).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: pair_loss(a, b, f64(0.5, 0.0), 0.1).total, (chosen, rejected)
    )
