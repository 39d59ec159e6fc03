"""The mathematics of KTO: pure functions, no engine, no communication. n is the number of answers."""

import torch
from torch import Tensor


def answer_loss(
    ratios: Tensor,
    desirable: Tensor,
    kl: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """The loss of each answer: [n] (arXiv:2402.01306, section 4).

    ratios     [n] log-ratios r: log-probability of the answer under the policy less that under the reference
    desirable  [n] bool
    kl         the reference point z0, without a gradient: scalar or [n]
    Desirable answers: desirable_weight (1 - sigmoid(beta (r - z0))); others: undesirable_weight (1 - sigmoid(beta
    (z0 - r))).
    """
    gain = torch.where(desirable, ratios - kl, kl - ratios)
    weights = torch.where(
        desirable, ratios.new_tensor(desirable_weight), ratios.new_tensor(undesirable_weight)
    )
    return weights * torch.sigmoid(-beta * gain)


def reference_point(ratios_sum: float, n: float) -> float:
    """z0: the estimate of KL(policy || reference), never negative (arXiv:2402.01306, section 4).

    ratios_sum  sum of the log-ratios of n mismatched answers: each belongs to another prompt
    A sum that is not a number stays so.
    """
    kl = ratios_sum / n
    return 0.0 if kl < 0 else kl
