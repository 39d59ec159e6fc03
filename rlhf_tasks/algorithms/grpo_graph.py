"""The dataflow graph of GRPO: four calls on up to three models, without a critic."""

from typing import Protocol

from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = ("prompt_ids", "columns")


class GRPOSizes(Protocol):
    """What the graph depends on in a GRPO configuration."""

    @property
    def batch_size(self) -> int: ...
    @property
    def num_mini_batches(self) -> int: ...
    @property
    def scoring_role(self) -> str: ...


def graph(config: GRPOSizes) -> list[ModelFunctionCall]:
    """actor generate; reward and ref inference; actor train_step.

    A sequence's advantage is its score against the others of its group (arXiv:2402.03300, eq. 3), so no values
    are needed. The reward call is as in PPO.
    """
    n_seqs = config.batch_size
    sequences = ("input_ids", "response_mask")
    return [
        ModelFunctionCall(
            name="actor_generate",
            role="actor",
            kind="generate",
            inputs=("prompt_ids",),
            outputs=(*sequences, "old_logprobs", "truncated"),
            n_seqs=n_seqs,
        ),
        ModelFunctionCall(
            name="reward_inference",
            role=config.scoring_role,
            kind="inference",
            inputs=(*sequences, "truncated", "columns"),
            outputs=("scores",),
            n_seqs=n_seqs,
        ),
        ModelFunctionCall(
            name="ref_inference",
            role="ref",
            kind="inference",
            inputs=sequences,
            outputs=("ref_logprobs",),
            n_seqs=n_seqs,
            remap={"ref_logprobs": "logprobs"},
        ),
        ModelFunctionCall(
            name="actor_train",
            role="actor",
            kind="train_step",
            inputs=(*sequences, "old_logprobs", "ref_logprobs", "scores"),
            n_seqs=n_seqs,
            mini_batches=config.num_mini_batches,
        ),
    ]
