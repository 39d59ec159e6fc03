"""Reward modelling: the Bradley-Terry loss on pairs (arXiv:1909.08593, eq. 1; arXiv:2203.02155, eq. 1)."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from prefect_rlhf.rlhf_tasks.algorithms.reward_model import RewardModelConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.preference import side_by_side
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import Steps, counts_per_block, optimizer_steps
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import last_value
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms

ANSWERS = (
    {"input_ids": "chosen_ids", "margin": "margin"},
    {"input_ids": "rejected_ids", "margin": "margin"},
)


def reward_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """One optimizer step per mini-batch, on the mean loss over all its pairs, of all replicas.

    Metrics, over the iteration: loss/reward_model, accuracy (fraction of pairs whose chosen answer scores higher),
    reward/margin (mean difference of the scores), grad_norm/reward, learning_rate/reward,
    skipped_steps/reward.
    """
    config = context.config
    assert isinstance(config, RewardModelConfig)

    def loss(values: Tensor, micro: MicroBatch) -> LossTerms:
        scores = last_value(values, micro)
        margin = micro.data["margin"][0::2].to(scores.dtype)
        return pair_loss(scores[0::2], scores[1::2], margin, config.center_rewards_coefficient)

    pairs = engine.sum_over_dp(counts_per_block(batch, context).to(engine.device))
    steps = Steps(engine, loss, pairs.tolist(), context.micro_batches, ["accuracy", "margin"])
    for step in optimizer_steps(batch, context, config.optimizer):
        steps.take(step._replace(batch=side_by_side(step.batch, ANSWERS)))
    return CallOutput(
        metrics={
            "loss/reward_model": steps.mean("loss"),
            "accuracy": steps.mean("accuracy"),
            "reward/margin": steps.mean("margin"),
            **steps.end("reward"),
        }
    )


def pair_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, centering: float) -> LossTerms:
    """Sum over pairs of -log sigmoid(chosen - rejected - margin) + centering * (chosen + rejected)^2.

    chosen, rejected  [n] scores
    margin            [n], by how much the chosen answer is better (arXiv:2307.09288, eq. 2)
    The second term (arXiv:2312.09244, eq. 2) keeps a pair's mean score at 0; the first depends only on the
    difference.
    """
    difference = chosen - rejected
    total = -logsigmoid(difference - margin).sum()
    total = total + centering * (chosen + rejected).square().sum()
    return LossTerms(total, {"accuracy": (difference > 0).sum(), "margin": difference.sum()})
