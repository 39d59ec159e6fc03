"""The dataflow graph of ReMax: two generations and two reward calls."""

from rlhf_tasks.algorithms.shared.rollout_calls import (
    SEQUENCES,
    PolicySizes,
    policy_calls,
    scored,
    scored_tokens,
)
from rlhf_tasks.spec import ModelFunctionCall

GREEDY = {f"greedy_{key}": key for key in (*SEQUENCES, "truncated")}
"""Key of a greedy response -> its name in the calls' functions."""


def graph(config: PolicySizes) -> list[ModelFunctionCall]:
    """actor generate, sampled and greedy; reward inference on both, and ref inference where beta > 0; actor
    train_step."""
    scores = {f"greedy_{key}": key for key in scored(config)}
    *before, train = policy_calls(config, (*scored_tokens(config), *scores))
    generate = ModelFunctionCall(
        name="greedy_generate",
        role="actor",
        kind="generate",
        inputs=("prompt_ids",),
        outputs=tuple(GREEDY),
        n_seqs=config.batch_size,
        group_size=config.group_size,
        remap=GREEDY,
    )
    score = ModelFunctionCall(
        name="greedy_reward_inference",
        role=config.scoring_role,
        kind="inference",
        inputs=(*GREEDY, "columns"),
        outputs=tuple(scores),
        n_seqs=config.batch_size,
        group_size=config.group_size,
        remap={**GREEDY, **scores},
        runs_model=config.scoring_role == "reward",
    )
    return [*before, generate, score, train]
