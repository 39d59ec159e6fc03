"""Evaluation of a frozen model: a rollout whose result is the mean of its scores."""

from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator

from prefect_rlhf.rlhf_tasks.algorithms.rollout import ALGORITHM as ROLLOUT
from prefect_rlhf.rlhf_tasks.config.responses import SamplingConfig
from prefect_rlhf.rlhf_tasks.config.sampling import OnePass


class AnsweringConfig(SamplingConfig):
    """How answers are sampled; greedily by default."""

    temperature: float = Field(default=0.0, ge=0, description="Divides the logits; 0 is greedy.")


class EvaluateConfig(OnePass):
    """Mean scores of a frozen model's answers to all rows, each row once."""

    type: Literal["evaluate"] = "evaluate"
    sampling: AnsweringConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # configurations are immutable

    @property
    def skipped_leave(self) -> bool:
        """False: they count as 0, so the means of two models are over the same rows, even if a reward fails."""
        return False

    @model_validator(mode="after")
    def _something_scores(self) -> Self:
        if not self.score_names and self.models.reward is None:
            raise ValueError(
                "nothing scores the answers. Name a function under rewards, an environment, or a reward model in "
                "models.reward."
            )
        return self


ALGORITHM = replace(ROLLOUT, config=EvaluateConfig)
