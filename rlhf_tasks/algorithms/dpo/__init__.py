"""Direct preference optimisation: learns from pairs of answers, without a reward model."""

from rlhf_tasks.algorithms.dpo.config import DPOConfig
from rlhf_tasks.algorithms.dpo.graph import DATASET_KEYS, graph
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.data.rows import PairExample, pair_example

ALGORITHM = Algorithm(
    config=DPOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=pair_example,
    fetch=PairExample.values,
    functions="rlhf_tasks.algorithms.dpo.functions",
)
