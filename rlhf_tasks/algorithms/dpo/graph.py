"""The dataflow graph of DPO: the reference reads the pairs, then the actor learns from them."""

from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced

DATASET_KEYS = ("chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
REF_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")


@traced(DATASET_KEYS)
def graph(models: Models, pairs: Handle, config: object) -> None:
    """ref inference; actor train_step. A sample is a pair."""
    models.actor.train(pairs | models.ref.inference(pairs, REF_LOGPS))
