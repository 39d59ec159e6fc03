"""On-policy distillation: the student answers, and learns what a teacher thinks of each token."""

from rlhf_tasks.algorithms.distillation.config import DistillationConfig
from rlhf_tasks.algorithms.distillation.graph import DATASET_KEYS, graph
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.data.rows import PromptExample, prompt_example

ALGORITHM = Algorithm(
    config=DistillationConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.distillation.functions",
)
