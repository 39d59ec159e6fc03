"""The dataflow graph of DPO: the reference reads the pairs, then the actor learns from them."""

from rlhf_tasks.algorithms.shared.preference_calls import PreferenceSizes, infer_and_train
from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = ("chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask")
REF_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")


def graph(config: PreferenceSizes) -> list[ModelFunctionCall]:
    """ref inference; actor train_step. A sample is a pair."""
    return infer_and_train(config, DATASET_KEYS, REF_LOGPS)
