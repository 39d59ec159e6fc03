"""Trains a reward model on preference pairs."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.reward_model.config import RewardModelConfig
from rlhf_tasks.algorithms.reward_model.graph import DATASET_KEYS, graph
from rlhf_tasks.data.rows import PairExample, pair_example

ALGORITHM = Algorithm(
    config=RewardModelConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=pair_example,
    fetch=PairExample.values,
    functions="rlhf_tasks.algorithms.reward_model.functions",
)
