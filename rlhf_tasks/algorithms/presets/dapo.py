"""DAPO (arXiv:2503.14476): GRPO with a higher upper clip, a loss over tokens and a penalty for length."""

from rlhf_tasks.algorithms.grpo import ALGORITHM as GRPO

ALGORITHM = GRPO.preset(
    "dapo",
    __doc__,
    loss_type="dapo",
    epsilon_high=0.28,
    overlong_buffer=0.2,
    filter_groups=True,
    max_rounds=2,
)
