"""Direct preference optimisation: learns from pairs of answers, without a reward model."""

from rlhf_tasks.algorithms.dpo.config import DPOConfig
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.data.rows import PairExample, pair_example

DATASET_KEYS = ("chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
REF_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")


@traced(DATASET_KEYS)
def graph(models: Models, pairs: Handle, config: object) -> None:
    """ref inference; actor train_step. A sample is a pair."""
    models.actor.train(pairs | models.ref.inference(pairs, REF_LOGPS))


ALGORITHM = Algorithm(
    config=DPOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=pair_example,
    fetch=PairExample.values,
    functions="rlhf_tasks.algorithms.dpo.functions",
)
