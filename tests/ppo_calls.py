"""The model function calls of PPO's graph with a reward model, by name."""

PPO_CALLS = (
    "actor_generate",
    "reward_inference",
    "ref_inference",
    "critic_inference",
    "actor_train",
    "critic_train",
)
