"""The configuration of a rollout."""

from typing import TYPE_CHECKING, Literal

from rlhf_tasks.config.base import SamplesGroups, Scores
from rlhf_tasks.config.sections import Role, RolloutModels

if TYPE_CHECKING:
    from rlhf_tasks.data.token_file import TokenFile


class RolloutConfig(Scores, SamplesGroups):
    """Samples from a model, which are scored and written as JSONL: all rows once, in file order."""

    type: Literal["rollout"] = "rollout"

    models: RolloutModels

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
