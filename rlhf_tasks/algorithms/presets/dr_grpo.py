"""Dr.GRPO (arXiv:2503.20783): GRPO without the biases towards long responses and easy prompts."""

from rlhf_tasks.algorithms.grpo import ALGORITHM as GRPO

ALGORITHM = GRPO.preset(
    "dr_grpo",
    __doc__,
    loss_type="dr_grpo",
    scale_rewards="none",
)
