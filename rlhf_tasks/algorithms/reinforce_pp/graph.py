"""The dataflow graph of REINFORCE++."""

from rlhf_tasks.algorithms.shared.rollout_calls import PolicySizes, policy_calls, scored_tokens
from rlhf_tasks.spec import ModelFunctionCall


def graph(config: PolicySizes) -> list[ModelFunctionCall]:
    """actor generate; reward inference, and ref inference where beta > 0; actor train_step.

    A token's advantage is its whitened return, so there is no critic.
    """
    return policy_calls(config, scored_tokens(config))
