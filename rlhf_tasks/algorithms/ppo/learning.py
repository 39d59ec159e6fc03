"""The targets of PPO's two train calls: rewards shaped by the KL penalty, advantages and returns.

Actor and critic train on separate meshes. Each computes the targets itself from the same keys, so they need not be
sent. Both get the same numbers, because every statistic is global and in float64.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks.algorithms.ppo.config import PPOConfig
from rlhf_tasks.algorithms.ppo.ppo_math import adapted_kl_coef, gae, kl_divergence, shaped_rewards
from rlhf_tasks.algorithms.shared.context import CallContext
from rlhf_tasks.algorithms.shared.schedule import counts_per_block
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.train.engine import Engine

KL_STATE = "kl_coef"
WHITENING_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class Targets:
    """Per-token targets of this replica's samples, and global statistics.

    advantages         [T], whitened where the configuration says so
    returns            [T], in reward units
    mini_batch_tokens  response tokens of each mini-batch, over all replicas: the denominators of the losses
    returns_mean, returns_square  mean of the returns and of their squares, over all response tokens
    metrics            kl (mean KL per sequence, in nats), kl_coef, shaped_reward (mean over sequences of the sum of
                       rewards), advantages/std (before whitening), returns/mean, explained_variance of the old values
    state              what the call puts into `engine.state`: the next KL coefficient, where it adapts
    """

    advantages: Tensor
    returns: Tensor
    mini_batch_tokens: list[float]
    returns_mean: float
    returns_square: float
    metrics: Mapping[str, float]
    state: Mapping[str, Any]


def learning_targets(engine: Engine, batch: SampleBatch, context: CallContext) -> Targets:
    """Shape rewards, estimate advantages and returns, whiten advantages, compute the next adaptive KL coefficient.

    A truncated response keeps its score, gets 0 instead, or keeps its score and is bootstrapped with the critic's
    value of its last state (`truncated_responses`: keep, zero, bootstrap).

    All ranks of a trained role's mesh call it together. The KL coefficient is in `engine.state`, so each role has its
    own copy. Nothing is changed there: the call stores the next one, once per iteration. A KL that is not finite
    leaves the coefficient as it is.
    """
    config = context.config
    assert isinstance(config, PPOConfig)
    kl_coef = engine.state.get(KL_STATE, config.kl_coef)
    mask, values = batch["response_mask"].values, batch["values"].values
    lengths = batch["input_ids"].lengths
    kl = kl_divergence(batch["old_logprobs"].values, batch["ref_logprobs"].values, config.kl_estimator)
    kl = torch.where(mask, kl, 0.0)
    scores = batch["scores"].values
    if config.score_clip is not None:
        scores = scores.clamp(-config.score_clip, config.score_clip)
    final_values = None
    if config.truncated_responses == "zero":
        scores = torch.where(batch["truncated"].values, 0.0, scores)
    elif config.truncated_responses == "bootstrap":
        final_values = torch.where(batch["truncated"].values, batch["final_values"].values, 0.0)
    rewards = shaped_rewards(kl, scores, mask, lengths, kl_coef)
    advantages, returns = gae(rewards, values, mask, lengths, config.gamma, config.lam, final_values)

    tokens = counts_per_block(batch, context, "response_mask").to(mask.device)
    errors = torch.where(mask, returns - values, 0.0)
    firsts = torch.stack([_sum(x) for x in (advantages, returns, errors, kl, rewards)])
    *blocks, advantage, total_return, error, total_kl, reward = engine.sum_over_dp(
        torch.cat([tokens, firsts])
    ).tolist()
    count = max(sum(blocks), 1.0)
    means = [total / count for total in (advantage, total_return, error)]
    deviations = [
        _sum(torch.where(mask, x.double() - m, 0.0).square())
        for x, m in zip((advantages, returns, errors), means, strict=True)
    ]
    variances = [total / count for total in engine.sum_over_dp(torch.stack(deviations)).tolist()]

    kl_per_sequence = total_kl / context.n_seqs
    state: dict[str, float] = {}
    if config.kl_target is not None and math.isfinite(kl_per_sequence):
        state[KL_STATE] = adapted_kl_coef(
            kl_coef, kl_per_sequence, config.kl_target, config.kl_horizon, context.n_seqs
        )
    std = (variances[0] * count / max(count - 1, 1)) ** 0.5  # unbiased, as in TRL
    if config.whiten_advantages:
        whitened = (advantages.double() - means[0]) / (std + WHITENING_EPSILON)
        advantages = torch.where(mask, whitened, 0.0).to(values.dtype)
    metrics = {
        "kl": kl_per_sequence,
        "kl_coef": kl_coef,
        "shaped_reward": reward / context.n_seqs,
        "advantages/std": std,
        "returns/mean": means[1],
        "explained_variance": 1 - variances[2] / variances[1] if variances[1] > 0 else 0.0,
    }
    return Targets(advantages, returns, blocks, means[1], variances[1] + means[1] ** 2, metrics, state)


def _sum(values: Tensor) -> Tensor:
    return values.double().sum()
