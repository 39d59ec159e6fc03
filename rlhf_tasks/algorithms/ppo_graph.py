"""The dataflow graph of PPO: six calls on four models."""

from typing import Protocol

from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = ("prompt_ids", "columns")


class PPOSizes(Protocol):
    """What the graph depends on in a PPO configuration."""

    @property
    def batch_size(self) -> int: ...
    @property
    def num_mini_batches(self) -> int: ...
    @property
    def scoring_role(self) -> str: ...
    @property
    def records_kept(self) -> bool: ...
    @property
    def truncated_responses(self) -> str: ...


def graph(config: PPOSizes) -> list[ModelFunctionCall]:
    """actor generate; reward, ref and critic inference; actor and critic train_step.

    The reward call combines the reward model's score with the Python rewards; without a reward model it only
    runs the latter, on the mesh that `scoring_role` names. Which tokens top-k and top-p kept goes where
    log-probabilities are computed; which responses were truncated, and the value of where they were, to training.
    """
    n_seqs, mini_batches = config.batch_size, config.num_mini_batches
    sequences = ("input_ids", "response_mask")
    kept = ("kept_counts", "kept_tokens") if config.records_kept else ()
    cut = () if config.truncated_responses == "keep" else ("truncated",)
    final = ("final_values",) if config.truncated_responses == "bootstrap" else ()
    learning = (*sequences, "old_logprobs", "ref_logprobs", "values", "scores", *cut, *final)
    return [
        ModelFunctionCall(
            name="actor_generate",
            role="actor",
            kind="generate",
            inputs=("prompt_ids",),
            outputs=(*sequences, "old_logprobs", "truncated", *kept),
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
            inputs=(*sequences, *kept),
            outputs=("ref_logprobs",),
            n_seqs=n_seqs,
            remap={"ref_logprobs": "logprobs"},
        ),
        ModelFunctionCall(
            name="critic_inference",
            role="critic",
            kind="inference",
            inputs=sequences,
            outputs=("values", *final),
            n_seqs=n_seqs,
        ),
        ModelFunctionCall(
            name="actor_train",
            role="actor",
            kind="train_step",
            inputs=(*learning, *kept),
            n_seqs=n_seqs,
            mini_batches=mini_batches,
        ),
        ModelFunctionCall(
            name="critic_train",
            role="critic",
            kind="train_step",
            inputs=learning,
            n_seqs=n_seqs,
            mini_batches=mini_batches,
        ),
    ]
