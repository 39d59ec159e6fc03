"""The keys of the calls of a rollout, and what of a configuration they depend on. Torch-free."""

from typing import Protocol

PROMPT_KEYS = ("prompt_ids", "columns")
"""The keys that `fetch` provides to them."""

SEQUENCES = ("input_ids", "response_mask")

KEPT = ("kept_counts", "kept_tokens")
"""The keys under which generation records which tokens top-k and top-p kept."""


STAYS = "stays"
"""The key that says of each sample whether it stays in the batch: False where a reward failed on it."""

TOKEN_REWARDS = "token_rewards"
"""The key of the rewards at each token, a whole response's at the last, where some reward judges tokens or steps."""


class GenerateSizes(Protocol):
    """The field of a configuration that generation depends on."""

    @property
    def group_size(self) -> int: ...


class RolloutSizes(GenerateSizes, Protocol):
    """The fields of a configuration that these calls depend on."""

    @property
    def scoring_role(self) -> str: ...
    @property
    def on_reward_error(self) -> str: ...
    @property
    def scores_tokens(self) -> bool: ...


def scored(config: RolloutSizes) -> tuple[str, ...]:
    """The keys that a reward call gives and a train call reads: `scores`, and STAYS where samples may leave."""
    return ("scores", STAYS) if config.on_reward_error == "skip" else ("scores",)


def scored_tokens(config: RolloutSizes) -> tuple[str, ...]:
    """The key that a train call reads besides where it learns from the rewards of single tokens."""
    return (TOKEN_REWARDS,) if config.scores_tokens else ()


class PolicySizes(RolloutSizes, Protocol):
    """The fields of a configuration without a critic that its graph depends on."""

    @property
    def records_kept(self) -> bool: ...
    @property
    def beta(self) -> float: ...
    @property
    def mask_truncated_completions(self) -> bool: ...
