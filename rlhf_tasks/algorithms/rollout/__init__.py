"""Rollout: samples from a model and scores the samples."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.rollout.config import RolloutConfig
from rlhf_tasks.algorithms.rollout.graph import DATASET_KEYS, graph
from rlhf_tasks.data.rows import PromptExample, prompt_example

ALGORITHM = Algorithm(
    config=RolloutConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.rollout.functions",
)
