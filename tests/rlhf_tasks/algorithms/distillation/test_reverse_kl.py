"""The estimate of the reverse KL is unbiased, in value and gradient: its mean over the vocabulary is the KL's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.distillation.functions import reverse_kl

LOGITS = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(student=LOGITS, old=LOGITS, teacher=LOGITS)
def test_over_all_tokens_it_is_the_divergence_and_its_gradient(
    student: list[float], old: list[float], teacher: list[float]
):
    """Whether the student has changed since it sampled, or not."""
    log_q, log_old = f64(teacher).log_softmax(0), f64(old).log_softmax(0)
    one, other = f64(student).requires_grad_(), f64(student).requires_grad_()
    log_p = one.log_softmax(0)
    estimate = (log_old.exp() * reverse_kl(log_p, log_old, log_q)).sum()
    exact = (other.softmax(0) * (other.log_softmax(0) - log_q)).sum()
    estimate.backward()
    exact.backward()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_one_token_by_hand():
    now = f64([-1.0]).requires_grad_()
    found = reverse_kl(now, f64([-1.5]), f64([-3.0]))
    found.backward()
    assert found.item() == pytest.approx(2.0 * torch.tensor(0.5).double().exp().item())
    assert now.grad is not None
    assert now.grad.item() == pytest.approx(found.item()), "the weight's gradient, times the log-ratio"


def test_a_token_that_the_teacher_rules_out_has_a_bounded_say():
    assert reverse_kl(f64([-1.0]), f64([-1.0]), f64([-1e30])).item() == 20.0
