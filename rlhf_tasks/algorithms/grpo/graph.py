"""The dataflow graph of GRPO: four calls on up to three models, without a critic."""

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


class GRPOSizes(RolloutSizes, Protocol):
    """The fields of a GRPO configuration that the graph depends on."""

    @property
    def num_mini_batches(self) -> int: ...


def graph(config: GRPOSizes) -> list[ModelFunctionCall]:
    """actor generate; reward and ref inference; actor train_step.

    A sequence's advantage is its score relative to its group (arXiv:2402.03300, section 4.1), so there is no critic.
    The reward call is as in PPO.
    """
    return [
        *generate_and_score(config),
        ref_inference(config),
        ModelFunctionCall(
            name="actor_train",
            role="actor",
            kind="train_step",
            inputs=(*SEQUENCES, "old_logprobs", "ref_logprobs", "scores"),
            n_seqs=config.batch_size,
            mini_batches=config.num_mini_batches,
        ),
    ]
