"""Trains a reward model on preference pairs."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.reward_model.config import RewardModelConfig
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.data.rows import PairExample, pair_example

DATASET_KEYS = ("chosen_ids", "rejected_ids", "margin")


@traced(DATASET_KEYS)
def graph(models: Models, pairs: Handle, config: object) -> None:
    """One train_step with the Bradley-Terry loss; a sample is a pair."""
    models.reward.train(pairs)


ALGORITHM = Algorithm(
    config=RewardModelConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=pair_example,
    fetch=PairExample.values,
    functions="rlhf_tasks.algorithms.reward_model.functions",
)
