"""REINFORCE leave-one-out."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.rloo.config import RLOOConfig
from rlhf_tasks.algorithms.rloo.graph import graph
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import PROMPT_KEYS
from rlhf_tasks.data.rows import PromptExample, prompt_example

ALGORITHM = Algorithm(
    config=RLOOConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.rloo.functions",
)
