"""The calls that every algorithm which samples from its policy begins with. Torch-free."""

from collections.abc import Sequence
from typing import Protocol

from rlhf_tasks.spec import ModelFunctionCall

PROMPT_KEYS = ("prompt_ids", "columns")
"""What `fetch` provides to them."""

SEQUENCES = ("input_ids", "response_mask")


class RolloutSizes(Protocol):
    """What these calls depend on in a configuration."""

    @property
    def batch_size(self) -> int: ...
    @property
    def scoring_role(self) -> str: ...


def generate_and_score(config: RolloutSizes, kept: Sequence[str] = ()) -> list[ModelFunctionCall]:
    """`actor_generate` and `reward_inference`.

    The reward call combines the reward model's score with the Python rewards; without a reward model it only
    runs the latter, on the mesh that `scoring_role` names.
    kept  keys under which generation records what top-k and top-p kept
    """
    return [
        ModelFunctionCall(
            name="actor_generate",
            role="actor",
            kind="generate",
            inputs=("prompt_ids",),
            outputs=(*SEQUENCES, "old_logprobs", "truncated", *kept),
            n_seqs=config.batch_size,
        ),
        ModelFunctionCall(
            name="reward_inference",
            role=config.scoring_role,
            kind="inference",
            inputs=(*SEQUENCES, "truncated", "columns"),
            outputs=("scores",),
            n_seqs=config.batch_size,
            runs_model=config.scoring_role == "reward",
        ),
    ]


def ref_inference(config: RolloutSizes, kept: Sequence[str] = ()) -> ModelFunctionCall:
    """Log-probabilities of the responses under the frozen reference policy."""
    return ModelFunctionCall(
        name="ref_inference",
        role="ref",
        kind="inference",
        inputs=(*SEQUENCES, *kept),
        outputs=("ref_logprobs",),
        n_seqs=config.batch_size,
        remap={"ref_logprobs": "logprobs"},
    )
