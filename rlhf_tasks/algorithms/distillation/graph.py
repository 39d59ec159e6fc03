"""The dataflow graph of on-policy distillation: the student answers, the teacher reads, the student learns."""

from typing import Protocol

from rlhf_tasks.algorithms.shared.rollout_calls import SEQUENCES, GenerateSizes, generate
from rlhf_tasks.spec import ModelFunctionCall

DATASET_KEYS = ("prompt_ids",)


class DistillationSizes(GenerateSizes, Protocol):
    """The fields of a configuration that the graph depends on."""

    @property
    def num_mini_batches(self) -> int: ...


def graph(config: DistillationSizes) -> list[ModelFunctionCall]:
    """actor generate; teacher inference; actor train_step."""
    return [
        generate(config),
        ModelFunctionCall(
            name="teacher_inference",
            role="teacher",
            kind="inference",
            inputs=SEQUENCES,
            outputs=("teacher_logprobs",),
            n_seqs=config.batch_size,
            group_size=config.group_size,
            remap={"teacher_logprobs": "logprobs"},
        ),
        ModelFunctionCall(
            name="actor_train",
            role="actor",
            kind="train_step",
            inputs=(*SEQUENCES, "old_logprobs", "teacher_logprobs"),
            n_seqs=config.batch_size,
            group_size=config.group_size,
            mini_batches=config.num_mini_batches,
        ),
    ]
