"""DPO's losses: by hand, against a second implementation in plain Python, and by finite differences."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.dpo.functions import pair_loss

RATIOS = st.lists(st.tuples(st.floats(-40, 40), st.floats(-40, 40)), min_size=1, max_size=6)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss_type", "options", "expected"),
    [
        ("sigmoid", {}, math.log(1 + math.exp(-0.5 * 3))),
        ("sigmoid", {"label_smoothing": 0.1}, math.log(1 + math.exp(-1.5)) + 0.1 * 1.5),
        ("ipo", {}, (3 - 1 / (2 * 0.5)) ** 2),
        ("hinge", {}, 0.0),
    ],
)
def test_the_loss_of_one_pair_by_hand(loss_type: Any, options: dict[str, float], expected: float):
    assert pair_loss(f64(2.0), f64(-1.0), loss_type, 0.5, **options).item() == pytest.approx(expected)


def test_a_pair_that_policy_and_reference_see_alike_costs_as_much_as_it_does_not_know():
    zero = f64(0.0)
    assert pair_loss(zero, zero, "sigmoid", 0.1).item() == pytest.approx(math.log(2))
    assert pair_loss(zero, zero, "sigmoid", 0.1, 0.3).item() == pytest.approx(math.log(2))
    assert pair_loss(zero, zero, "ipo", 0.1).item() == pytest.approx(25.0)
    assert pair_loss(zero, zero, "hinge", 0.1).item() == 1.0


@given(ratios=RATIOS, beta=st.floats(0.01, 2), smoothing=st.floats(0, 0.49))
def test_the_losses_are_those_of_a_second_implementation(
    ratios: list[tuple[float, float]], beta: float, smoothing: float
):
    chosen, rejected = (f64(*values) for values in zip(*ratios, strict=True))

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))

    def expected(loss_type: str, d: float) -> float:
        return {
            "sigmoid": -(1 - smoothing) * log_sigmoid(beta * d) - smoothing * log_sigmoid(-beta * d),
            "ipo": (d - 0.5 / beta) ** 2,
            "hinge": max(0.0, 1 - beta * d),
        }[loss_type]

    for loss_type in ("sigmoid", "ipo", "hinge"):
        found = pair_loss(chosen, rejected, loss_type, beta, smoothing).tolist()
        assert found == pytest.approx([expected(loss_type, a - b) for a, b in ratios], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge"])
def test_gradients_are_those_of_finite_differences(loss_type: Any):
    chosen, rejected = f64(0.3, -2.0, 5.0).requires_grad_(), f64(0.1, 1.0, -4.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: pair_loss(a, b, loss_type, 0.7, 0.2), (chosen, rejected))
