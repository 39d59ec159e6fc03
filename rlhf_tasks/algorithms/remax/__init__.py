"""ReMax: REINFORCE with the score of the greedy response as baseline."""

from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.remax.config import ReMaxConfig
from rlhf_tasks.algorithms.remax.graph import graph
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import PROMPT_KEYS
from rlhf_tasks.data.rows import PromptExample, prompt_example

ALGORITHM = Algorithm(
    config=ReMaxConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.remax.functions",
)
