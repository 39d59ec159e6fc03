"""Expert iteration: the model learns its own good responses."""

from rlhf_tasks.algorithms.expert_iteration.config import ExpertIterationConfig
from rlhf_tasks.algorithms.expert_iteration.graph import graph
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import PROMPT_KEYS
from rlhf_tasks.data.rows import PromptExample, prompt_example

ALGORITHM = Algorithm(
    config=ExpertIterationConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.expert_iteration.functions",
)
