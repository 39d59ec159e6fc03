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

from rlhf_tasks.algorithms.ppo import PPOConfig
from rlhf_tasks.algorithms.shared.context import CallContext
from rlhf_tasks.algorithms.shared.groups import on_tokens
from rlhf_tasks.algorithms.shared.policy import kl_divergence
from rlhf_tasks.algorithms.shared.returns import gae, moments, shaped_rewards, token_rewards, whitened
from rlhf_tasks.algorithms.shared.schedule import counts_per_block
from rlhf_tasks.parallel.batch.samples import SampleBatch
from rlhf_tasks.parallel.train.engine import Engine

KL_STATE = "kl_coef"


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
    """Shape rewards, estimate advantages and returns, compute the next adaptive KL coefficient.

    Rewards and advantages are whitened where the configuration says so.

    A truncated response keeps its score, gets 0 instead, or keeps its score and is bootstrapped with the critic's
    value of its last state (`truncated_responses`: keep, zero, bootstrap).

    All ranks of a trained role's mesh call it together. The KL coefficient is in `engine.state`, so each role has its
    own copy. This function does not change it: the call stores the next one, once per iteration. A KL that is not
    finite leaves the coefficient as it is.
    """
    config = context.config
    assert isinstance(config, PPOConfig)
    kl_coef = engine.state.get(KL_STATE, config.kl_coef)
    mask, values = batch["response_mask"].values, batch["values"].values
    lengths = batch["input_ids"].lengths
    kl = kl_divergence(batch["old_logprobs"].values, batch["ref_logprobs"].values, config.kl_estimator)
    kl = torch.where(mask, kl, 0.0)
    placed = token_rewards(batch)
    final_values = None
    if config.truncated_responses == "zero":
        placed = torch.where(on_tokens(batch["truncated"].values, lengths), 0.0, placed)
    elif config.truncated_responses == "bootstrap":
        final_values = torch.where(batch["truncated"].values, batch["final_values"].values, 0.0)
    rewards = shaped_rewards(kl, placed, mask, kl_coef)
    tokens = counts_per_block(batch, context, "response_mask").to(mask.device)
    n_samples = kl.new_tensor(len(batch), dtype=torch.float64)
    sums = torch.stack([kl.double().sum(), rewards.double().sum(), n_samples])
    *blocks, total_kl, reward, n = engine.sum_over_dp(torch.cat([tokens, sums])).tolist()
    count = sum(blocks)
    if config.whiten_rewards:
        (of_rewards,) = moments(engine, mask, count, rewards)
        rewards = whitened(rewards, mask, of_rewards, shift_mean=False)
    advantages, returns = gae(rewards, values, mask, lengths, config.gamma, config.lam, final_values)
    of_advantages, of_returns, of_errors = moments(engine, mask, count, advantages, returns, returns - values)

    kl_per_sequence = total_kl / n
    state: dict[str, float] = {}
    if config.kl_target is not None and math.isfinite(kl_per_sequence):
        state[KL_STATE] = adapted_kl_coef(
            kl_coef, kl_per_sequence, config.kl_target, config.kl_horizon, int(n)
        )
    if config.whiten_advantages:
        advantages = whitened(advantages, mask, of_advantages)
    metrics = {
        "kl": kl_per_sequence,
        "kl_coef": kl_coef,
        "shaped_reward": reward / n,
        "advantages/std": of_advantages.std,
        "returns/mean": of_returns.mean,
        "explained_variance": 1 - of_errors.variance / of_returns.variance
        if of_returns.variance > 0
        else 0.0,
    }
    square = of_returns.variance + of_returns.mean**2
    return Targets(advantages, returns, blocks, of_returns.mean, square, metrics, state)


def adapted_kl_coef(kl_coef: float, kl: float, target: float, horizon: int, n_seqs: int) -> float:
    """The next KL coefficient by the adaptive controller of arXiv:1909.08593, section 2.2; once per iteration.

    kl, target  mean KL per sequence and its target, in nats
    horizon     sequences over which the coefficient reacts
    n_seqs      sequences of this iteration
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * n_seqs / horizon)
