"""The calls of on-policy distillation (arXiv:2306.13649). Each runs on all ranks of its call's mesh.

Their order: actor_generate; teacher_inference; actor_train.
"""

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.distillation import DistillationConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import actor_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import bounded, kl_divergence
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import ref_inference as teacher_inference
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import Steps, counts_per_block, optimizer_steps
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms

__all__ = ["actor_generate", "actor_train", "teacher_inference"]


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """One optimizer step per mini-batch, on the mean loss over all its response tokens, of all replicas.

    Metrics, over the iteration: loss/distillation (the estimated reverse KL, in nats per token), entropy (nats per
    token), kl (mean reverse KL of an answer, in nats, before the first step), grad_norm/actor, learning_rate/actor,
    skipped_steps/actor.
    """
    config = context.config
    assert isinstance(config, DistillationConfig)
    kl = kl_divergence(batch["old_logprobs"].values, batch["teacher_logprobs"].values, "k1")
    kl = torch.where(batch["response_mask"].values, kl, 0.0).double().sum()
    tokens = counts_per_block(batch, context, "response_mask").to(engine.device)
    *tokens, total_kl = engine.sum_over_dp(torch.cat([tokens, kl[None]])).tolist()

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        old, teacher = micro.data["old_logprobs"], micro.data["teacher_logprobs"]
        logprobs, entropy = engine.logprobs_and_entropy(logits, micro, config.sampling.temperature)
        return LossTerms(reverse_kl(logprobs, old, teacher).sum(), {"entropy": entropy.detach().sum()})

    denominators = [max(count, 1.0) for count in tokens]
    steps = Steps(engine, loss, denominators, context.micro_batches, ["entropy"], counted="response_mask")
    for step in optimizer_steps(batch, context, config.optimizer):
        steps.take(step)
    return CallOutput(
        metrics={
            "loss/distillation": steps.mean("loss"),
            "entropy": steps.mean("entropy"),
            "kl": total_kl / context.n_seqs,
            **steps.end("actor"),
        }
    )


def reverse_kl(logprobs: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """One estimate of KL(student || teacher) from each token that the student sampled, in nats: [T].

    logprobs          [T] of the student now, with a gradient
    old_logprobs      [T] of the student when it sampled
    teacher_logprobs  [T]
    It is w (log p - log q), with p the student, q the teacher, and w = p / p_old for the steps since the token was
    sampled. Only w has a gradient. GKD (arXiv:2306.13649) computes the reverse KL between the two distributions of a
    token, over the whole vocabulary. Value and gradient of this estimate are unbiased estimates of those of that KL.
    As in GKD, and unlike in MiniLLM (arXiv:2306.08543), the loss of a token does not include the KL of later tokens.
    """
    weight = bounded(logprobs - old_logprobs).exp()
    return weight * kl_divergence(logprobs.detach(), teacher_logprobs, "k1")
