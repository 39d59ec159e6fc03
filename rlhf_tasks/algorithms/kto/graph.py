"""The dataflow graph of KTO: the reference reads the answers, then the actor learns from them."""

from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced

SEQUENCES = ("input_ids", "response_mask", "mismatched_ids", "mismatched_mask")
DATASET_KEYS = (*SEQUENCES, "desirable")
REF_LOGPS = ("ref_logps", "ref_mismatched_logps")


@traced(DATASET_KEYS)
def graph(models: Models, rows: Handle, config: object) -> None:
    """ref inference; actor train_step. A sample is an answer, and a mismatched one for the KL estimate."""
    answers = rows.select(*SEQUENCES)
    answers |= models.ref.inference(answers, REF_LOGPS)
    models.actor.train(answers | rows.select("desirable"))
