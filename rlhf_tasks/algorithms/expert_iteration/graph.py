"""The dataflow graph of expert iteration."""

from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import PROMPT_KEYS, SEQUENCES, RolloutSizes, scored


@traced(PROMPT_KEYS)
def graph(models: Models, prompts: Handle, config: RolloutSizes) -> None:
    """actor generate; reward inference; actor train_step on the responses that score well."""
    samples = models.actor.generate(prompts.repeat(config.group_size))
    samples |= models.reward.score(samples)
    models.actor.train(samples.select(*SEQUENCES, *scored(config)))
