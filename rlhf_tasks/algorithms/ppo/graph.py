"""The dataflow graph of PPO: six calls on four models."""

from typing import Protocol

from rlhf_tasks.algorithms.shared.rollout_calls import (
    PROMPT_KEYS,
    SEQUENCES,
    RolloutSizes,
    generate_and_score,
    ref_inference,
)
from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = PROMPT_KEYS


class PPOSizes(RolloutSizes, Protocol):
    """What the graph depends on in a PPO configuration."""

    @property
    def num_mini_batches(self) -> int: ...
    @property
    def records_kept(self) -> bool: ...
    @property
    def truncated_responses(self) -> str: ...


def graph(config: PPOSizes) -> list[ModelFunctionCall]:
    """actor generate; reward, ref and critic inference; actor and critic train_step.

    Which tokens top-k and top-p kept goes where log-probabilities are computed; which responses were truncated,
    and the value of where they were, to training.
    """
    n_seqs, mini_batches = config.batch_size, config.num_mini_batches
    kept = ("kept_counts", "kept_tokens") if config.records_kept else ()
    cut = () if config.truncated_responses == "keep" else ("truncated",)
    final = ("final_values",) if config.truncated_responses == "bootstrap" else ()
    learning = (*SEQUENCES, "old_logprobs", "ref_logprobs", "values", "scores", *cut, *final)
    return [
        *generate_and_score(config, kept),
        ref_inference(config, kept),
        ModelFunctionCall(
            name="critic_inference",
            role="critic",
            kind="inference",
            inputs=SEQUENCES,
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
