"""Reward modelling: the Bradley-Terry loss on pairs (arXiv:1909.08593, eq. 1; arXiv:2203.02155, eq. 1)."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_tasks.algorithms.reward_model.config import RewardModelConfig
from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.algorithms.shared.schedule import counts_per_block, optimizer_steps
from rlhf_tasks.algorithms.shared.scoring import last_value
from rlhf_tasks.algorithms.shared.steps import Steps
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.train.engine import Engine, LossTerms


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
        return pair_loss(scores[0::2], scores[1::2], config.center_rewards_coefficient)

    pairs = engine.sum_over_dp(counts_per_block(batch, context).to(engine.device))
    steps = Steps(engine, loss, pairs.tolist(), context.micro_batches, ["accuracy", "margin"])
    for step in optimizer_steps(batch, context, config.optimizer):
        steps.take(step._replace(batch=side_by_side(step.batch)))
    return CallOutput(
        metrics={
            "loss/reward_model": steps.mean("loss"),
            "accuracy": steps.mean("accuracy"),
            "reward/margin": steps.mean("margin"),
            **steps.end("reward"),
        }
    )


def pair_loss(chosen: Tensor, rejected: Tensor, centering: float) -> LossTerms:
    """Sum over pairs of -log sigmoid(chosen - rejected) + centering * (chosen^2 + rejected^2) / 2.

    chosen, rejected  [n] scores
    The second term keeps scores near 0: the first depends only on their difference.
    """
    margin = chosen - rejected
    total = -logsigmoid(margin).sum() + centering * (chosen.square() + rejected.square()).sum() / 2
    return LossTerms(total, {"accuracy": (margin > 0).sum(), "margin": margin.sum()})


def side_by_side(batch: SampleBatch) -> SampleBatch:
    """A batch in which the two answers of each pair are consecutive sequences under the pair's id, chosen first."""
    pairs = zip(batch["chosen_ids"].split(), batch["rejected_ids"].split(), strict=True)
    sequences = [sequence for pair in pairs for sequence in pair]
    ids = tuple(sample for sample in batch.ids for _ in range(2))
    return SampleBatch(ids, {"input_ids": Packed.of(sequences) if sequences else batch["chosen_ids"]})
