"""The calls that compute log-probabilities under another policy than the one that trains, and sums over answers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.algorithms.shared.learning.side_by_side import SequenceKeys, apart, side_by_side
from rlhf_tasks.config.base import Samples
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.train.engine import Engine

ANSWER = "response_mask"
"""Of sequences that are set side by side: the mask of the answer's tokens, which alone count."""


def answer_logps(engine: Engine, logits: Tensor, micro: MicroBatch) -> Tensor:
    """The log-probability of each sequence's answer given the prompt before it: [n].

    logits  [R, vocabulary / tp], of the rows that predict the answers' tokens: the pass was told to count ANSWER
    Collective over the tp ranks of the stage.
    """
    return torch.stack([part.sum() for part in micro.per_sample(engine.logprobs(logits, micro))])


def reference_logps(
    engine: Engine, batch: SampleBatch, sequences: Mapping[str, SequenceKeys], micro_batches: int
) -> CallOutput:
    """`answer_logps` of each of a sample's sequences under a frozen model, one number per sample and sequence.

    sequences  key of the result -> the sequence that it is about
    """
    rows = engine.inference(
        side_by_side(batch, list(sequences.values())),
        lambda logits, micro: answer_logps(engine, logits, micro),
        micro_batches,
        counted=ANSWER,
    )
    if rows is None or not engine.is_head:
        return CallOutput()
    return CallOutput(SampleBatch(batch.ids, apart(rows, sequences)))


def ref_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `logprobs` of the responses under a model as it is, at the temperature of sampling.

    Tokens that top-k and top-p left out are left out here too. So the KL penalty compares distributions over the same
    tokens, and it is 0 where policy and reference are equal.
    """
    config = context.config
    assert isinstance(config, Samples), f"{config.type} runs have no such call"

    def output(logits: Tensor, micro: MicroBatch) -> Tensor:
        return engine.logprobs(logits, micro, config.sampling.temperature)

    rows = engine.inference(batch, output, context.micro_batches, counted="response_mask")
    if rows is None or not engine.is_head:
        return CallOutput()
    return CallOutput(SampleBatch(batch.ids, {"logprobs": rows}))


actor_inference = ref_inference
"""The same under the actor before its train_step."""
