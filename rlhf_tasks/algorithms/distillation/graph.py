"""The dataflow graph of on-policy distillation: the student answers, the teacher reads, the student learns."""

from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import SEQUENCES, GenerateSizes

DATASET_KEYS = ("prompt_ids",)


@traced(DATASET_KEYS)
def graph(models: Models, prompts: Handle, config: GenerateSizes) -> None:
    """actor generate; teacher inference; actor train_step."""
    samples = models.actor.generate(prompts.repeat(config.group_size))
    samples |= models.teacher.logprobs(samples)
    models.actor.train(samples.select(*SEQUENCES, "old_logprobs", "teacher_logprobs"))
