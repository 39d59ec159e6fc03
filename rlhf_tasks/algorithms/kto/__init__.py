"""Kahneman-Tversky optimisation: learns from single answers that are desirable or not."""

from rlhf_tasks.algorithms.kto.config import KTOConfig
from rlhf_tasks.algorithms.kto.graph import DATASET_KEYS, graph
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.data.rows import LabelledExample, labelled_examples

ALGORITHM = Algorithm(
    config=KTOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=labelled_examples,
    fetch=LabelledExample.values,
    functions="rlhf_tasks.algorithms.kto.functions",
    stored_keys=("input_ids", "prompt_tokens", "desirable"),
)
