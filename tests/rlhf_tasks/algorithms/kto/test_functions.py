"""KTO's loss and reference point: by hand, against a second implementation, and by finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.algorithms.kto.functions import answer_loss, reference_point

ANSWERS = st.lists(st.tuples(st.floats(-40, 40), st.booleans()), min_size=1, max_size=6)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def test_the_loss_of_two_answers_by_hand():
    ratios, desirable = torch.tensor([2.0, 2.0]).double(), torch.tensor([True, False])
    found = answer_loss(ratios, desirable, torch.tensor(0.5).double(), 0.1, 1.5, 0.5).tolist()
    assert found == pytest.approx([1.5 * (1 - sigmoid(0.15)), 0.5 * (1 - sigmoid(-0.15))])


@given(
    answers=ANSWERS,
    kl=st.floats(0, 30),
    beta=st.floats(0.01, 2),
    weights=st.tuples(st.floats(0, 3), st.floats(0, 3)),
)
def test_the_losses_are_those_of_a_second_implementation(
    answers: list[tuple[float, bool]], kl: float, beta: float, weights: tuple[float, float]
):
    ratios = torch.tensor([ratio for ratio, _ in answers], dtype=torch.float64)
    desirable = torch.tensor([good for _, good in answers])
    found = answer_loss(ratios, desirable, torch.tensor(kl, dtype=torch.float64), beta, *weights)
    expected = [
        weights[0] * (1 - sigmoid(beta * (r - kl))) if good else weights[1] * (1 - sigmoid(beta * (kl - r)))
        for r, good in answers
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gradients_are_those_of_finite_differences():
    ratios = torch.tensor([0.3, -2.0, 5.0], dtype=torch.float64, requires_grad=True)
    desirable, kl = torch.tensor([True, False, False]), torch.tensor(0.4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda r: answer_loss(r, desirable, kl, 0.7, 1.3, 0.8), (ratios,))


def test_the_reference_point_is_the_mean_and_never_negative():
    assert reference_point(6.0, 4) == 1.5
    assert reference_point(-6.0, 4) == 0.0
    assert math.isnan(reference_point(math.nan, 4))
