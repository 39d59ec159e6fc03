"""Supervised fine-tuning."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.sft.config import SFTConfig
from rlhf_tasks.algorithms.sft.graph import DATASET_KEYS, graph
from rlhf_tasks.data.rows import CompletionExample, completion_example

ALGORITHM = Algorithm(
    config=SFTConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=completion_example,
    fetch=CompletionExample.values,
    functions="rlhf_tasks.algorithms.sft.functions",
    row_options=("completion_only_loss", "assistant_only_loss"),
)
