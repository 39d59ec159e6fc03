"""The dataflow graph of a rollout: generate, then score. Evaluation and sampling use it."""

from typing import Protocol

from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = ("prompt_ids", "columns")


class RolloutSizes(Protocol):
    """What the graph depends on in a rollout configuration."""

    @property
    def batch_size(self) -> int: ...
    @property
    def scoring_role(self) -> str: ...


def graph(config: RolloutSizes) -> list[ModelFunctionCall]:
    """The calls `actor_generate` and `reward_inference` of PPO; `scoring_role` is the actor without a reward
    model."""
    sequences = ("input_ids", "response_mask")
    return [
        ModelFunctionCall(
            name="actor_generate",
            role="actor",
            kind="generate",
            inputs=("prompt_ids",),
            outputs=(*sequences, "old_logprobs", "truncated"),
            n_seqs=config.batch_size,
        ),
        ModelFunctionCall(
            name="reward_inference",
            role=config.scoring_role,
            kind="inference",
            inputs=(*sequences, "truncated", "columns"),
            outputs=("scores",),
            n_seqs=config.batch_size,
        ),
    ]
