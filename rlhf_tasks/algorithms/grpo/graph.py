"""The dataflow graph of GRPO."""

from rlhf_tasks.algorithms.shared.rollout_calls import PolicySizes, policy_calls
from rlhf_tasks.spec import ModelFunctionCall


def graph(config: PolicySizes) -> list[ModelFunctionCall]:
    """actor generate; reward inference, and ref inference where beta > 0; actor train_step.

    A sequence's advantage is its score relative to its group (arXiv:2402.03300, section 4.1), so there is no critic.
    """
    return policy_calls(config)
