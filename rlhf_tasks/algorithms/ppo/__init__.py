"""Proximal policy optimisation."""

from rlhf_tasks.algorithms.ppo.config import PPOConfig
from rlhf_tasks.algorithms.ppo.graph import DATASET_KEYS, graph
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.data.rows import PromptExample, prompt_example

ALGORITHM = Algorithm(
    config=PPOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.ppo.functions",
)
