"""Expert iteration: the model learns its own good responses."""

from rlhf_tasks.algorithms.expert_iteration.config import ExpertIterationConfig
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import PROMPT_KEYS, SEQUENCES, RolloutSizes, scored
from rlhf_tasks.data.rows import PromptExample, prompt_example


@traced(PROMPT_KEYS)
def graph(models: Models, prompts: Handle, config: RolloutSizes) -> None:
    """actor generate; reward inference; actor train_step on the responses that score well."""
    samples = models.actor.generate(prompts.repeat(config.group_size))
    samples |= models.reward.score(samples)
    models.actor.train(samples.select(*SEQUENCES, *scored(config)))


ALGORITHM = Algorithm(
    config=ExpertIterationConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.expert_iteration.functions",
)
