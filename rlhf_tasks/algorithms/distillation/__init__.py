"""On-policy distillation: the student answers, and learns what a teacher thinks of each token."""

from typing import Literal, Self

from pydantic import model_validator

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import SEQUENCES, GenerateSizes, Handle, Models, traced
from prefect_rlhf.rlhf_tasks.config.models import DistillationModels, Role
from prefect_rlhf.rlhf_tasks.config.sampling import Samples
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example


class DistillationConfig(Samples, TrainingConfig):
    """On-policy distillation (arXiv:2306.13649): the actor imitates a teacher on its own answers, token by token."""

    type: Literal["distillation"] = "distillation"

    models: DistillationModels

    def roles(self) -> dict[str, Role]:
        """The actor, which is the student, and the frozen teacher."""
        return {
            "actor": Role.of(self.models.actor, "lm", self.optimizer),
            "teacher": Role.of(self.models.teacher, "lm"),
        }

    @model_validator(mode="after")
    def _samples_from_the_whole_student(self) -> Self:
        sampling = self.sampling
        is_cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_new_tokens > 0
        if sampling.temperature == 0 or is_cut:
            raise ValueError(
                f"sampling.temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k} "
                f"and min_new_tokens={sampling.min_new_tokens} leave out tokens, but the divergence from the teacher "
                "is estimated from tokens of the student's whole distribution. Choose a temperature above 0, top_p "
                "1, top_k 0 and min_new_tokens 0."
            )
        return self


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
    functions="prefect_rlhf.rlhf_tasks.algorithms.distillation.functions",
)
