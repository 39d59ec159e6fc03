"""The dataflow graph of KTO: the reference reads the answers, then the actor learns from them."""

from rlhf_tasks.algorithms.shared.preference_calls import PreferenceSizes, infer_and_train
from rlhf_tasks.spec import ModelFunctionCall

SEQUENCES = ("input_ids", "response_mask", "mismatched_ids", "mismatched_mask")
DATASET_KEYS = (*SEQUENCES, "desirable")
REF_LOGPS = ("ref_logps", "ref_mismatched_logps")


def graph(config: PreferenceSizes) -> list[ModelFunctionCall]:
    """ref inference; actor train_step. A sample is an answer, and a mismatched one for the KL estimate."""
    return infer_and_train(config, SEQUENCES, REF_LOGPS, ["desirable"])
