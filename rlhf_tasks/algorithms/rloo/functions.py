"""RLOO's calls (arXiv:2402.14740)."""

from functools import partial

from prefect_rlhf.rlhf_tasks.algorithms.rloo import RLOOConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput, without_skipped
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import actor_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import less_others, on_tokens, per_group, response_sums
from prefect_rlhf.rlhf_tasks.algorithms.shared.judging import judge_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import (
    Objective,
    actor_inference,
    clipped_loss,
    learn,
    per_response,
    per_sum,
    ref_inference,
    reference_kl,
    response_ratio,
    token_ratio,
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

LEVELS = {"sequence": (response_ratio, per_response), "token": (token_ratio, per_sum)}
"""A response is one action, whose ratio is the product of its tokens' ratios; or each token is an action. Both have
the same gradient where the policy is still the one that sampled."""


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on each response, weighted by its score less the mean of the others of its group.

    The score is reduced by beta times the response's KL divergence (k1, summed over its tokens). Metrics: see
    `learn`.
    """
    config, batch = context.config, without_skipped(batch)
    assert isinstance(config, RLOOConfig)
    mask, lengths = batch["response_mask"].values, batch["input_ids"].lengths
    scores = batch["scores"].values.double()
    if config.beta > 0:
        scores = scores - config.beta * response_sums(reference_kl(batch, "k1").double(), mask, lengths)
    advantages = on_tokens(per_group(less_others, scores, batch.ids, config.num_generations), lengths)
    ratio, weighting = LEVELS[config.importance_sampling_level]
    objective = Objective(ratio, partial(clipped_loss, low=config.epsilon, high=config.high), weighting)
    return learn(engine, batch, context, objective, advantages, "k1")
