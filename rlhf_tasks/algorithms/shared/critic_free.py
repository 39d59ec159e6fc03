"""The train call of algorithms without a learned critic: what it does with the advantages of its responses."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from rlhf_tasks.algorithms.shared.groups import all_equal
from rlhf_tasks.algorithms.shared.packed import on_tokens
from rlhf_tasks.algorithms.shared.policy_config import CriticFreeConfig
from rlhf_tasks.algorithms.shared.policy_math import kl_divergence
from rlhf_tasks.algorithms.shared.policy_steps import Objective, Weights, policy_steps, token_counts
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.train.engine import Engine

Weighting = Callable[[Engine, SampleBatch, CallContext, Tensor], Weights]
"""`per_token` and its like in policy_steps.py."""


def learn(
    engine: Engine,
    batch: SampleBatch,
    context: CallContext,
    advantages: Tensor,
    objective: Objective,
    weighting: Weighting,
    kl_estimator: str = "k3",
) -> CallOutput:
    """Optimizer steps on the responses, without those truncated where the configuration masks them.

    advantages    [T]
    kl_estimator  of the metric kl
    Metrics, besides those of `policy_steps`: kl (with a reference: mean KL per sequence of the policy that sampled,
    in nats), frac_reward_zero_std (with groups: share of groups whose scores are all equal).
    """
    config = context.config
    assert isinstance(config, CriticFreeConfig), f"{config.type} runs have a critic"
    mask, lengths = batch["response_mask"].values, batch["input_ids"].lengths
    learned = mask
    if config.mask_truncated_completions:
        learned = mask & ~on_tokens(batch["truncated"].values, lengths)
    kl = reference_kl(batch, kl_estimator).double().sum() if config.beta > 0 else torch.zeros(())
    size = config.group_size
    equal = all_equal(batch["scores"].values, size).sum() if size > 1 else torch.zeros(())
    sums = torch.stack([kl.double().to(engine.device), equal.double().to(engine.device)])
    total_kl, total_equal = engine.sum_over_dp(sums).tolist()
    metrics: dict[str, float] = {}
    if config.beta > 0:
        metrics["kl"] = total_kl / context.n_seqs
    if size > 1:
        metrics["frac_reward_zero_std"] = total_equal * size / context.n_seqs
    weights = weighting(engine, batch, context, learned)
    tokens = token_counts(engine, batch, context, mask)
    steps = policy_steps(
        engine, batch, context, objective, advantages, weights, tokens, epochs=config.num_iterations
    )
    return CallOutput(metrics=metrics | steps)


def reference_kl(batch: SampleBatch, estimator: str) -> Tensor:
    """KL of the policy that sampled from the reference, per token: [T], 0 outside responses."""
    kl = kl_divergence(batch["old_logprobs"].values, batch["ref_logprobs"].values, estimator)
    return torch.where(batch["response_mask"].values, kl, 0.0)
