"""The dataflow graph of supervised fine-tuning: one train_step."""

from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced

DATASET_KEYS = ("input_ids", "response_mask")


@traced(DATASET_KEYS)
def graph(models: Models, rows: Handle, config: object) -> None:
    """One train_step with the cross-entropy loss on the tokens that `response_mask` marks."""
    models.actor.train(rows)
