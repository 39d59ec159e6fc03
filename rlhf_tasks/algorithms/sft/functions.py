"""Supervised fine-tuning: negative log-likelihood of the tokens that are learned."""

from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.sft import SFTConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import Steps, counts_per_block, optimizer_steps
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """One optimizer step per mini-batch, on the mean loss over all its learned tokens, of all replicas.

    Metrics, over the iteration: loss/sft in nats per token, grad_norm/actor, learning_rate/actor,
    skipped_steps/actor.
    """
    config = context.config
    assert isinstance(config, SFTConfig)

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        return LossTerms(-engine.logprobs(logits, micro).sum(), {})

    tokens = engine.sum_over_dp(counts_per_block(batch, context, "response_mask").to(engine.device))
    steps = Steps(engine, loss, tokens.tolist(), context.micro_batches, counted="response_mask")
    for step in optimizer_steps(batch, context, config.optimizer):
        steps.take(step)
    return CallOutput(metrics={"loss/sft": steps.mean("loss"), **steps.end("actor")})
