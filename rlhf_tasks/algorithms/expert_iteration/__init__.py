"""Expert iteration: the model learns its own good responses."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    PROMPT_KEYS,
    SEQUENCES,
    Handle,
    Models,
    RolloutSizes,
    scored,
    traced,
)
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.models import Role, RolloutModels
from prefect_rlhf.rlhf_tasks.config.sampling import SamplesGroups, Scores
from prefect_rlhf.rlhf_tasks.config.settings import MOST_SEQS, Pair
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example


class ExpertIterationConfig(Scores, TrainingConfig, SamplesGroups):
    """Expert iteration, or rejection sampling: the model learns those of its own responses that score well."""

    type: Literal["expert_iteration"] = "expert_iteration"
    groups: ClassVar[Groups] = {"Score": ("min_score", "best_of_group")}
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "best_of_group",
            "num_generations",
            "{first} compares the samples of a prompt, but {second}. Choose at least 2.",
            lambda config: config.best_of_group and config.num_generations == 1,
        ),
    )

    models: RolloutModels
    num_generations: int = Field(
        default=4, gt=0, le=MOST_SEQS, description="Samples per prompt, which form a group."
    )
    min_score: float | None = Field(
        default=None, description="Least score of a response that is learned; default: any."
    )
    best_of_group: bool = Field(
        default=False, description="Learn only the response with the highest score of each group."
    )

    def roles(self) -> dict[str, Role]:
        """The actor, and the models that judge."""
        return {"actor": Role.of(self.models.actor, "lm", self.optimizer)} | self.models.judges

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if self.min_score is None and not self.best_of_group:
            raise ValueError(
                "every response would be learned, whatever its score. Give min_score, best_of_group: true, or both."
            )
        return self


@traced(PROMPT_KEYS)
def graph(models: Models, prompts: Handle, config: RolloutSizes) -> None:
    """actor generate; reward inference; actor train_step on the responses that score well."""
    samples = models.actor.generate(prompts.repeat(config.group_size))
    samples |= models.reward.score(samples)
    models.actor.train(samples.select(*SEQUENCES, *scored(config)))


ALGORITHM = Algorithm(
    config=ExpertIterationConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.expert_iteration.functions",
)
