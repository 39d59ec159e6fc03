"""The dataflow graph of expert iteration."""

from typing import Protocol

from rlhf_tasks.algorithms.shared.rollout_calls import SEQUENCES, RolloutSizes, generate_and_score, scored
from rlhf_tasks.spec import ModelFunctionCall


class ExpertIterationSizes(RolloutSizes, Protocol):
    """The fields of a configuration that the graph depends on."""

    @property
    def num_mini_batches(self) -> int: ...


def graph(config: ExpertIterationSizes) -> list[ModelFunctionCall]:
    """actor generate; reward inference; actor train_step on the responses that score well."""
    return [
        *generate_and_score(config),
        ModelFunctionCall(
            name="actor_train",
            role="actor",
            kind="train_step",
            inputs=(*SEQUENCES, *scored(config)),
            n_seqs=config.batch_size,
            group_size=config.group_size,
            mini_batches=config.num_mini_batches,
        ),
    ]
