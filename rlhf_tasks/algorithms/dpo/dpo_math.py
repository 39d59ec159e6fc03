"""The mathematics of DPO: pure functions, no engine, no communication. n is the number of pairs."""

from typing import assert_never

from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from rlhf_tasks.algorithms.dpo.config import LossType


def pair_loss(
    chosen: Tensor, rejected: Tensor, loss_type: LossType, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """The loss of each pair: [n].

    chosen, rejected  [n] log-ratios: log-probability of the answer under the policy less that under the reference;
                      for ipo divided by the answer's tokens
    With d = chosen - rejected:
        sigmoid  -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), e = label_smoothing: arXiv:2305.18290, eq. 7,
                 and its conservative form, in which a label is wrong with probability e (Mitchell, 2023)
        ipo      (d - 1 / (2 beta))^2: arXiv:2310.12036, eq. 17. Its authors average over tokens, so that the target
                 does not depend on lengths
        hinge    max(0, 1 - beta d): SLiC (arXiv:2305.10425), on log-ratios as in RSO (arXiv:2309.06657)
    """
    d = chosen - rejected
    match loss_type:
        case "sigmoid":
            right, wrong = logsigmoid(beta * d), logsigmoid(-beta * d)
            return -(1 - label_smoothing) * right - label_smoothing * wrong
        case "ipo":
            return (d - 1 / (2 * beta)).square()
        case "hinge":
            return relu(1 - beta * d)
        case _:
            assert_never(loss_type)
