"""Supervised fine-tuning: negative log-likelihood of the completion tokens."""

import torch
from torch import Tensor

from rlhf_tasks.algorithms.context import CallContext, CallOutput
from rlhf_tasks.algorithms.schedule import block_of_samples, optimizer_steps
from rlhf_tasks.config import SFTConfig
from rlhf_tasks.parallel.engine import Engine, LossTerms
from rlhf_tasks.parallel.micro_batch import MicroBatch
from rlhf_tasks.parallel.samples import SampleBatch


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """One optimizer step per mini-batch, on the mean over its global number of completion tokens.

    Metrics, over the iteration: loss/sft in nats per token, grad_norm/actor, learning_rate/actor.
    """
    config = context.config
    assert isinstance(config, SFTConfig)

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        logprobs = engine.logprobs(logits, micro)
        return LossTerms(-torch.where(micro.data["response_mask"], logprobs, 0.0).sum(), {})

    tokens = torch.zeros(config.num_mini_batches, dtype=torch.float64)
    masks = batch["response_mask"].split()
    for block, mask in zip(block_of_samples(batch, context, len(tokens)), masks, strict=True):
        tokens[block] += mask.sum().item()
    denominators = engine.sum_over_dp(tokens.to(engine.device)).tolist()

    nll, norms, rate = 0.0, [], 0.0
    for step in optimizer_steps(batch, context, config.optimizer):
        rate, denominator = step.learning_rate, denominators[step.block]
        report = engine.train_step(step.batch, loss, denominator, context.micro_batches, rate)
        nll += report["loss"] * denominator
        norms.append(report["grad_norm"])
    return CallOutput(
        metrics={
            "loss/sft": nll / sum(denominators),
            "grad_norm/actor": sum(norms) / len(norms),
            "learning_rate/actor": rate,
        }
    )
