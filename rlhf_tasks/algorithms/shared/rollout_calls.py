"""The first calls of every algorithm that samples from its policy. Torch-free."""

from collections.abc import Sequence
from typing import Protocol

from rlhf_tasks.spec import ModelFunctionCall

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
    """The fields of a configuration that generation depends on."""

    @property
    def batch_size(self) -> int: ...
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


def generate(config: GenerateSizes, kept: Sequence[str] = ()) -> ModelFunctionCall:
    """`actor_generate`. kept: keys under which it records which tokens top-k and top-p kept."""
    return ModelFunctionCall(
        name="actor_generate",
        role="actor",
        kind="generate",
        inputs=("prompt_ids",),
        outputs=(*SEQUENCES, "old_logprobs", "truncated", *kept),
        n_seqs=config.batch_size,
        group_size=config.group_size,
    )


def generate_and_score(config: RolloutSizes, kept: Sequence[str] = ()) -> list[ModelFunctionCall]:
    """`actor_generate` and `reward_inference`.

    The reward call adds the reward model's score and the Python rewards. Without a reward model it only runs the
    Python rewards, on the mesh of `scoring_role`. kept: as in `generate`.
    """
    return [
        generate(config, kept),
        ModelFunctionCall(
            name="reward_inference",
            role=config.scoring_role,
            kind="inference",
            inputs=(*SEQUENCES, "truncated", "columns"),
            outputs=(*scored(config), *scored_tokens(config)),
            n_seqs=config.batch_size,
            group_size=config.group_size,
            runs_model=config.scoring_role == "reward",
        ),
    ]


def ref_inference(config: RolloutSizes, kept: Sequence[str] = ()) -> ModelFunctionCall:
    """The call that computes the responses' log-probabilities under the frozen reference policy."""
    return ModelFunctionCall(
        name="ref_inference",
        role="ref",
        kind="inference",
        inputs=(*SEQUENCES, *kept),
        outputs=("ref_logprobs",),
        n_seqs=config.batch_size,
        group_size=config.group_size,
        remap={"ref_logprobs": "logprobs"},
    )


class PolicySizes(RolloutSizes, Protocol):
    """The fields of a configuration without a critic that its graph depends on."""

    @property
    def num_mini_batches(self) -> int: ...
    @property
    def records_kept(self) -> bool: ...
    @property
    def beta(self) -> float: ...
    @property
    def mask_truncated_completions(self) -> bool: ...


def policy_calls(config: PolicySizes, compared: Sequence[str] = ()) -> list[ModelFunctionCall]:
    """actor generate; reward inference; ref inference where the KL divergence counts; actor train_step.

    compared  keys besides `scores` that the train call reads
    """
    kept = KEPT if config.records_kept else ()
    with_ref = config.beta > 0
    ref = ("ref_logprobs",) if with_ref else ()
    cut = ("truncated",) if config.mask_truncated_completions else ()
    return [
        *generate_and_score(config, kept),
        *([ref_inference(config, kept)] if with_ref else []),
        ModelFunctionCall(
            name="actor_train",
            role="actor",
            kind="train_step",
            inputs=(*SEQUENCES, "old_logprobs", *ref, *scored(config), *compared, *cut, *kept),
            n_seqs=config.batch_size,
            group_size=config.group_size,
            mini_batches=config.num_mini_batches,
        ),
    ]
