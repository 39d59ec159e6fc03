"""Further names of our algorithms, with other defaults: each record below is an algorithm of its name."""

from prefect_rlhf.rlhf_tasks.algorithms.grpo import ALGORITHM as GRPO

cispo = GRPO.preset(
    "cispo",
    "CISPO (arXiv:2506.13585): GRPO whose bounded ratio weighs every token, so that none is left out.",
    loss_type="cispo",
    epsilon_high=4.0,
)

dapo = GRPO.preset(
    "dapo",
    "DAPO (arXiv:2503.14476): GRPO with a higher upper clip, a loss over tokens and a penalty for length.",
    loss_type="dapo",
    epsilon_high=0.28,
    overlong_buffer=0.2,
    filter_groups=2,
)

dr_grpo = GRPO.preset(
    "dr_grpo",
    "Dr.GRPO (arXiv:2503.20783): GRPO without the biases towards long responses and easy prompts.",
    loss_type="dr_grpo",
    scale_rewards="none",
)

gspo = GRPO.preset(
    "gspo",
    "GSPO (arXiv:2507.18071): GRPO with one policy ratio per response.",
    importance_sampling_level="sequence",
    epsilon=3e-4,
    epsilon_high=4e-4,
)
