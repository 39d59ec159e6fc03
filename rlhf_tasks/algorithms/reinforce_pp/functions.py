"""The calls of REINFORCE++ (arXiv:2501.03262)."""

from functools import partial

from prefect_rlhf.rlhf_tasks.algorithms.reinforce_pp import ReinforcePPConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput, without_skipped
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import actor_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import less_mean, per_group
from prefect_rlhf.rlhf_tasks.algorithms.shared.judging import judge_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import (
    Objective,
    actor_inference,
    clipped_loss,
    learn,
    per_token,
    ref_inference,
    reference_kl,
    token_ratio,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.returns import (
    at_last_tokens,
    discounted_returns,
    moments,
    shaped_rewards,
    token_rewards,
    trajectories,
    whitened,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import reward_inference
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

__all__ = [
    "actor_generate",
    "actor_inference",
    "actor_train",
    "judge_generate",
    "ref_inference",
    "reward_inference",
]


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on each token, weighted by its whitened discounted return.

    The KL divergence is in the rewards (k1). With `baseline: group` the group's mean is subtracted from the scores
    first, and the KL divergence is in the loss (k2; section 3.3 of the paper). Metrics: see `learn`.
    """
    config, batch = context.config, without_skipped(batch)
    assert isinstance(config, ReinforcePPConfig)
    mask, (lengths, samples) = batch["response_mask"].values, trajectories(batch)
    kl, in_loss = mask.double() * 0, 0.0
    if config.baseline == "group":
        scores = per_group(less_mean, batch["scores"].values.double(), batch.ids, config.num_generations)
        placed, in_loss = at_last_tokens(scores[samples], mask, lengths), config.beta
    else:
        placed = token_rewards(batch).double()
        kl = reference_kl(batch, "k1").double() if config.beta > 0 else kl
    rewards = shaped_rewards(kl, placed, mask, config.beta)
    returns = discounted_returns(rewards, mask, lengths, config.gamma)
    count = engine.sum_over_dp(mask.sum()[None]).item()
    (of_returns,) = moments(engine, mask, count, returns)
    advantages = whitened(returns, mask, of_returns)
    surrogate = partial(clipped_loss, low=config.epsilon, high=config.high)
    objective = Objective(token_ratio, surrogate, per_token, in_loss, "k2")
    estimator = "k2" if config.baseline == "group" else "k1"
    return learn(engine, batch, context, objective, advantages, estimator, baseline=config.baseline)
