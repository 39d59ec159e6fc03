"""The configuration of a rollout."""

from typing import Literal

from rlhf_tasks.config.base import OnePass


class RolloutConfig(OnePass):
    """Samples from a model, which are scored and written as JSONL: all rows once, in file order."""

    type: Literal["rollout"] = "rollout"
