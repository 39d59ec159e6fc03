"""The configuration of a rollout, and the base of configurations whose runs pass once over the rows."""

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_tasks.config.base import Groups, Scores, refuse_split_groups
from rlhf_tasks.config.sections import MOST_SEQS, Role, RolloutModels

if TYPE_CHECKING:
    from rlhf_tasks.data.token_file import TokenFile


class OnePass(Scores):
    """The configuration of runs that answer all rows once, in file order, with a frozen model."""

    groups: ClassVar[Groups] = {"Batch": ("num_generations",)}

    models: RolloutModels
    num_generations: int = Field(default=1, gt=0, le=MOST_SEQS, description="Samples per prompt.")

    def iterations(self, n_rows: int) -> int:
        """The number of iterations that pass once over all rows."""
        return -(-n_rows * self.num_generations // self.batch_size)

    def row_of(self, rows: "TokenFile", sample: int) -> int:
        """The index of the row of a sample: rows in file order, `num_generations` samples each."""
        return sample // self.num_generations % len(rows)

    def roles(self) -> dict[str, Role]:
        """The frozen actor, and reward where there is a reward model."""
        roles = {"actor": Role.of(self.models.actor, "lm")}
        if self.models.reward is not None:
            roles["reward"] = Role.of(self.models.reward, "scalar")
        return roles

    @model_validator(mode="after")
    def _batch_holds_whole_prompts(self) -> Self:
        refuse_split_groups(self.num_generations, self.batch_size)
        return self


class RolloutConfig(OnePass):
    """Samples from a model, which are scored and written as JSONL: all rows once, in file order."""

    type: Literal["rollout"] = "rollout"
