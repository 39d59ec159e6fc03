"""REINFORCE++: globally whitened returns, without a critic."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.reinforce_pp.config import ReinforcePPConfig
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, learned, rollout, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import PROMPT_KEYS, PolicySizes, scored_tokens
from rlhf_tasks.data.rows import PromptExample, prompt_example


@traced(PROMPT_KEYS)
def graph(models: Models, prompts: Handle, config: PolicySizes) -> None:
    """actor generate; reward inference, and ref inference where beta > 0; actor train_step.

    A token's advantage is its whitened return, so there is no critic.
    """
    models.actor.train(rollout(models, prompts, config).select(*learned(config, scored_tokens(config))))


ALGORITHM = Algorithm(
    config=ReinforcePPConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.reinforce_pp.functions",
)
