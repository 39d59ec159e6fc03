"""Group-relative policy optimisation: it can be drawn and planned, but not run."""

from rlhf_tasks.algorithms.grpo.config import GRPOConfig
from rlhf_tasks.algorithms.grpo.graph import DATASET_KEYS, graph
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.data.rows import PromptExample, prompt_example

ALGORITHM = Algorithm(
    config=GRPOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions=None,
)
