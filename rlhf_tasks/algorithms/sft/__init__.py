"""Supervised fine-tuning."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.sft.config import SFTConfig
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.data.rows import CompletionExample, completion_example

DATASET_KEYS = ("input_ids", "response_mask")


@traced(DATASET_KEYS)
def graph(models: Models, rows: Handle, config: object) -> None:
    """One train_step with the cross-entropy loss on the tokens that `response_mask` marks."""
    models.actor.train(rows)


ALGORITHM = Algorithm(
    config=SFTConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=completion_example,
    fetch=CompletionExample.values,
    functions="rlhf_tasks.algorithms.sft.functions",
    row_options=("completion_only_loss", "assistant_only_loss"),
)
