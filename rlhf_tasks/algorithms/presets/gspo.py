"""GSPO (arXiv:2507.18071): GRPO with one policy ratio per response."""

from rlhf_tasks.algorithms.grpo import ALGORITHM as GRPO

ALGORITHM = GRPO.preset(
    "gspo",
    __doc__,
    importance_sampling_level="sequence",
    epsilon=3e-4,
    epsilon_high=4e-4,
)
