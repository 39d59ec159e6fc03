"""Kahneman-Tversky optimisation: learns from single answers that are desirable or not."""

from rlhf_tasks.algorithms.kto.config import KTOConfig
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.data.rows import LabelledExample, labelled_examples

SEQUENCES = ("input_ids", "response_mask", "mismatched_ids", "mismatched_mask")
DATASET_KEYS = (*SEQUENCES, "desirable")
REF_LOGPS = ("ref_logps", "ref_mismatched_logps")


@traced(DATASET_KEYS)
def graph(models: Models, rows: Handle, config: object) -> None:
    """ref inference; actor train_step. A sample is an answer, and a mismatched one for the KL estimate."""
    answers = rows.select(*SEQUENCES)
    answers |= models.ref.inference(answers, REF_LOGPS)
    models.actor.train(answers | rows.select("desirable"))


ALGORITHM = Algorithm(
    config=KTOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=labelled_examples,
    fetch=LabelledExample.values,
    functions="rlhf_tasks.algorithms.kto.functions",
    stored_keys=("input_ids", "prompt_tokens", "desirable"),
)
