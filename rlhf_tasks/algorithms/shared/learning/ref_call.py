"""The calls that compute the log-probabilities of the responses under another policy than the one that drew them."""

from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.config.base import Samples
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.train.engine import Engine


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
