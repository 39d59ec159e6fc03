"""The calls of expert iteration (arXiv:1705.08439; for language models arXiv:2304.06767)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.expert_iteration import ExpertIterationConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput, without_skipped
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import actor_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import best_of_group, on_tokens, per_group
from prefect_rlhf.rlhf_tasks.algorithms.shared.judging import judge_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import Steps, counts_per_block, optimizer_steps
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import reward_inference
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms

__all__ = ["actor_generate", "actor_train", "judge_generate", "reward_inference"]


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """One optimizer step per mini-batch, on the mean negative log-likelihood of the learned responses' tokens.

    A mini-batch without a learned response has no step. Metrics, over the iteration: loss/expert_iteration in nats
    per token, learned/fraction of the responses, grad_norm/actor, learning_rate/actor, skipped_steps/actor.
    """
    config, batch = context.config, without_skipped(batch)
    assert isinstance(config, ExpertIterationConfig)
    lengths = batch["input_ids"].lengths
    chosen = good_responses(batch["scores"].values, batch.ids, config)
    learned = batch["response_mask"].values & on_tokens(chosen, lengths)
    samples = SampleBatch(batch.ids, {**batch.read(), "learned": Packed(learned, lengths)})

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        return LossTerms(-engine.logprobs(logits, micro).sum(), {})

    counts = counts_per_block(samples, context, "learned").to(engine.device)
    own = torch.stack([chosen.double().sum(), chosen.new_tensor(len(batch), dtype=torch.float64)])
    *tokens, n_chosen, n_samples = engine.sum_over_dp(torch.cat([counts, own])).tolist()
    steps = Steps(engine, loss, tokens, context.micro_batches, counted="learned")
    for step in optimizer_steps(samples, context, config.optimizer):
        if tokens[step.block]:  # else only the optimizer's momentum would change the weights
            steps.take(step)
    return CallOutput(
        metrics={
            "loss/expert_iteration": steps.mean("loss"),
            "learned/fraction": n_chosen / n_samples,
            **steps.end("actor"),
        }
    )


def good_responses(scores: Tensor, ids: Sequence[int], config: ExpertIterationConfig) -> Tensor:
    """Whether a response is learned: [n] bool. scores  [n] of the samples `ids`"""
    good = torch.ones_like(scores, dtype=torch.bool)
    if config.min_score is not None:
        good &= scores >= config.min_score
    if config.best_of_group:
        good &= per_group(best_of_group, scores, ids, config.num_generations)
    return good
