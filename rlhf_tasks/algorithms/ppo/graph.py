"""The dataflow graph of PPO: six calls on four models."""

from typing import Protocol

from rlhf_tasks.algorithms.shared.rollout_calls import (
    KEPT,
    PROMPT_KEYS,
    SEQUENCES,
    RolloutSizes,
    generate_and_score,
    ref_inference,
    scored,
    scored_tokens,
)
from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = PROMPT_KEYS


class PPOSizes(RolloutSizes, Protocol):
    """The fields of a PPO configuration that the graph depends on."""

    @property
    def num_mini_batches(self) -> int: ...
    @property
    def records_kept(self) -> bool: ...
    @property
    def truncated_responses(self) -> str: ...


def graph(config: PPOSizes) -> list[ModelFunctionCall]:
    """actor generate; reward, ref and critic inference; actor and critic train_step.

    The tokens that top-k and top-p kept are inputs of the calls that compute log-probabilities. The flag of truncated
    responses and their final values are inputs of the train calls.
    """
    n_seqs, group_size, mini_batches = config.batch_size, config.group_size, config.num_mini_batches
    kept = KEPT if config.records_kept else ()
    cut = () if config.truncated_responses == "keep" else ("truncated",)
    final = ("final_values",) if config.truncated_responses == "bootstrap" else ()
    judged = (*scored(config), *scored_tokens(config))
    learning = (*SEQUENCES, "old_logprobs", "ref_logprobs", "values", *judged, *cut, *final)
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
            group_size=group_size,
        ),
        ModelFunctionCall(
            name="actor_train",
            role="actor",
            kind="train_step",
            inputs=(*learning, *kept),
            n_seqs=n_seqs,
            group_size=group_size,
            mini_batches=mini_batches,
        ),
        ModelFunctionCall(
            name="critic_train",
            role="critic",
            kind="train_step",
            inputs=learning,
            n_seqs=n_seqs,
            group_size=group_size,
            mini_batches=mini_batches,
        ),
    ]
