"""Proximal policy optimisation."""

from typing import Protocol

from rlhf_tasks.algorithms.ppo.config import PPOConfig
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import (
    KEPT,
    PROMPT_KEYS,
    SEQUENCES,
    RolloutSizes,
    scored,
    scored_tokens,
)
from rlhf_tasks.data.rows import PromptExample, prompt_example

DATASET_KEYS = PROMPT_KEYS


class PPOSizes(RolloutSizes, Protocol):
    """The fields of a PPO configuration that the graph depends on."""

    @property
    def records_kept(self) -> bool: ...
    @property
    def truncated_responses(self) -> str: ...


@traced(DATASET_KEYS)
def graph(models: Models, prompts: Handle, config: PPOSizes) -> None:
    """actor generate; reward, ref and critic inference; actor and critic train_step.

    The tokens that top-k and top-p kept are inputs of the calls that compute log-probabilities. The flag of truncated
    responses and their final values are inputs of the train calls.
    """
    kept = KEPT if config.records_kept else ()
    cut = () if config.truncated_responses == "keep" else ("truncated",)
    final = ("final_values",) if config.truncated_responses == "bootstrap" else ()
    judged = (*scored(config), *scored_tokens(config))
    samples = models.actor.generate(prompts.repeat(config.group_size))
    samples |= models.reward.score(samples)
    samples |= models.ref.logprobs(samples)
    samples |= models.critic.inference(samples.select(*SEQUENCES), ("values", *final))
    learning = (*SEQUENCES, "old_logprobs", "ref_logprobs", "values", *judged, *cut, *final)
    models.actor.train(samples.select(*learning, *kept))
    models.critic.train(samples.select(*learning))


ALGORITHM = Algorithm(
    config=PPOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.ppo.functions",
)
