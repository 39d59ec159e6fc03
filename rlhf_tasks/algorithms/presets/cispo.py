"""CISPO (arXiv:2506.13585): GRPO whose bounded ratio weighs every token, so that none is left out."""

from rlhf_tasks.algorithms.grpo import ALGORITHM as GRPO

ALGORITHM = GRPO.preset(
    "cispo",
    __doc__,
    loss_type="cispo",
    epsilon_high=4.0,
)
