"""On-policy distillation: the student answers, and learns what a teacher thinks of each token."""

from rlhf_tasks.algorithms.distillation.config import DistillationConfig
from rlhf_tasks.algorithms.registry import Algorithm
from rlhf_tasks.algorithms.shared.graphs.program import Handle, Models, traced
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import SEQUENCES, GenerateSizes
from rlhf_tasks.data.rows import PromptExample, prompt_example

DATASET_KEYS = ("prompt_ids",)


@traced(DATASET_KEYS)
def graph(models: Models, prompts: Handle, config: GenerateSizes) -> None:
    """actor generate; teacher inference; actor train_step."""
    samples = models.actor.generate(prompts.repeat(config.group_size))
    samples |= models.teacher.logprobs(samples)
    models.actor.train(samples.select(*SEQUENCES, "old_logprobs", "teacher_logprobs"))


ALGORITHM = Algorithm(
    config=DistillationConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="rlhf_tasks.algorithms.distillation.functions",
)
