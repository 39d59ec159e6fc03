"""The dataflow graph of reward modelling: one train_step on preference pairs."""

from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced

DATASET_KEYS = ("chosen_ids", "rejected_ids", "margin")


@traced(DATASET_KEYS)
def graph(models: Models, pairs: Handle, config: object) -> None:
    """One train_step with the Bradley-Terry loss; a sample is a pair."""
    models.reward.train(pairs)
