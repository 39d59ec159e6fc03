"""REINFORCE leave-one-out."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.rloo.config import RLOOConfig
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, learned, rollout, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import PROMPT_KEYS, PolicySizes
from rlhf_tasks.data.rows import PromptExample, prompt_example


@traced(PROMPT_KEYS)
def graph(models: Models, prompts: Handle, config: PolicySizes) -> None:
    """actor generate; reward inference, and ref inference where beta > 0; actor train_step.

    A sequence's baseline is the mean score of the others of its group, so there is no critic.
    """
    models.actor.train(rollout(models, prompts, config).select(*learned(config)))


ALGORITHM = Algorithm(
    config=RLOOConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.rloo.functions",
)
