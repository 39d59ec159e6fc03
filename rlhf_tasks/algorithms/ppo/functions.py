"""PPO's calls (arXiv:1707.06347; arXiv:2203.02155).

Each function runs on all ranks of its call's mesh. Their order: actor_generate; then reward_inference, ref_inference
and critic_inference; then actor_train and critic_train.

Actor and critic train on separate meshes. Each computes the targets (`learning_targets`: rewards shaped by the KL
penalty, advantages and returns) itself from the same keys, so they need not be sent. Both get the same numbers,
because every statistic is global and in float64. The critic learns values normalised by a running mean and std of the
returns (`ValueNorm`, after arXiv:1602.07714): exponential averages, bias-corrected like Adam's moments.
"""

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput, without_skipped
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import actor_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import on_tokens
from prefect_rlhf.rlhf_tasks.algorithms.shared.guards import are_equal, extremes, leaves_out_update
from prefect_rlhf.rlhf_tasks.algorithms.shared.judging import judge_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import (
    Counts,
    Objective,
    actor_inference,
    clipped_loss,
    kl_divergence,
    per_token,
    policy_steps,
    ref_inference,
    token_ratio,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.returns import (
    gae,
    moments,
    shaped_rewards,
    token_rewards,
    trajectories,
    whitened,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import Steps, counts_per_block, optimizer_steps
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import reward_inference
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms

__all__ = [
    "actor_generate",
    "actor_inference",
    "actor_train",
    "critic_inference",
    "critic_train",
    "judge_generate",
    "ref_inference",
    "reward_inference",
]

KL_STATE, NORM_STATE = "kl_coef", "value_norm"  # keys of a role's state
DECAY = 0.9  # per iteration: averages over about ten iterations, because the policy's returns drift
VARIANCE_FLOOR = 1e-4  # otherwise the targets would become huge where all returns are equal


def critic_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `values`, in reward units: the value of the state before each response token.

    If truncated responses are bootstrapped, also `final_values`: the value after each sample's last token.
    """
    norm = ValueNorm.of(engine.state)

    def output(stage_values: Tensor, micro: MicroBatch) -> Tensor:
        after = norm.denormalize(stage_values)
        before = torch.where(micro.data["response_mask"], shifted(after, micro.position_ids), 0.0)
        return torch.stack((before, after), dim=1)

    rows = engine.inference(batch, output, context.micro_batches)
    if rows is None or not engine.is_head:
        return CallOutput()
    before, after = rows.values.reshape(sum(rows.lengths), 2).unbind(1)
    data = {"values": Packed(before, rows.lengths)}
    if _ppo(context).truncated_responses == "bootstrap":
        last = torch.tensor(rows.lengths, dtype=torch.int64, device=engine.device).cumsum(0) - 1
        data["final_values"] = Packed(after[last], (1,) * len(batch))
    return CallOutput(SampleBatch(batch.ids, data))


def actor_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on the clipped policy loss (`clipped_loss`); none during the critic's warm-up.

    The loss of a mini-batch is the mean over its response tokens, of all replicas. It has no KL term: the KL penalty
    is in the rewards (`learning_targets`).
    Metrics: those of `learning_targets`, `leaves_out_update` and `policy_steps`.
    """
    config, batch = _ppo(context), without_skipped(batch)
    targets = learning_targets(engine, batch, context)
    engine.state.update(targets.state)
    if context.iteration < config.critic_warmup_iterations:
        return CallOutput(metrics={**targets.metrics, "policy/steps": 0.0})
    left_out, anomalies = leaves_out_update(engine, context, targets.metrics["kl"], targets.equal)
    objective = Objective(
        token_ratio,
        partial(clipped_loss, low=config.cliprange, high=config.cliprange, dual_clip=config.dual_clip),
        per_token,
        early_stop_ratio=config.early_stop_ratio,
    )
    tokens = targets.mini_batch_tokens
    metrics = policy_steps(
        engine,
        batch,
        context,
        objective,
        targets.advantages,
        batch["response_mask"].values,
        Counts([], tokens, tokens),
        first_iteration=config.critic_warmup_iterations,
        left_out=left_out,
    )
    return CallOutput(metrics={**targets.metrics, **anomalies, **metrics})


def critic_train(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Optimizer steps on the clipped value loss (`value_loss`), with normalised targets if `normalize_values` is set.

    The loss of a mini-batch is the mean over its response tokens, of all replicas.
    First the running mean and std are updated with this iteration's returns. Values are clipped around the old
    values. These are normalised with the mean and std of the inference, so they equal the model's outputs then.
    Metrics: loss/value and value/clip_ratio (means over the response tokens), grad_norm/critic, learning_rate/critic,
    skipped_steps/critic.
    """
    config, batch = _ppo(context), without_skipped(batch)
    targets = learning_targets(engine, batch, context)
    engine.state.update(targets.state)
    before = after = ValueNorm.of(engine.state)
    if config.normalize_values:
        after = before.updated(targets.returns_mean, targets.returns_square)
        after.put(engine.state)
    lengths = batch["input_ids"].lengths
    learned = SampleBatch(
        batch.ids,
        {
            **batch.read(),
            "response_mask": batch["response_mask"],
            "old_values": Packed(before.normalize(batch["values"].values), lengths),
            "returns": Packed(after.normalize(targets.returns), lengths),
        },
    )

    def loss(stage_values: Tensor, micro: MicroBatch) -> LossTerms:
        mask, data = micro.data["response_mask"], micro.data
        values = shifted(stage_values, micro.position_ids)
        terms, clipped = value_loss(values, data["old_values"], data["returns"], config.cliprange_value)
        return LossTerms(torch.where(mask, terms, 0.0).sum(), {"clip_ratio": (mask & clipped).sum()})

    steps = Steps(engine, loss, targets.mini_batch_tokens, context.micro_batches, ["clip_ratio"])
    settings = config.critic_optimizer
    for step in optimizer_steps(learned, context, settings, config.num_ppo_epochs):
        if targets.mini_batch_tokens[
            step.block
        ]:  # else only the optimizer's momentum would change the weights
            steps.take(step)
    return CallOutput(
        metrics={
            "loss/value": steps.mean("loss"),
            "value/clip_ratio": steps.mean("clip_ratio"),
            **steps.end("critic"),
        }
    )


def _ppo(context: CallContext) -> PPOConfig:
    assert isinstance(context.config, PPOConfig), f"{context.config.type} runs have no such call"
    return context.config


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
    equal              whether the scores of all samples are equal
    """

    advantages: Tensor
    returns: Tensor
    mini_batch_tokens: list[float]
    returns_mean: float
    returns_square: float
    metrics: Mapping[str, float]
    state: Mapping[str, Any]
    equal: bool


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
    along = trajectories(batch)
    kl = kl_divergence(batch["old_logprobs"].values, batch["ref_logprobs"].values, config.kl_estimator)
    kl = torch.where(mask, kl, 0.0)
    placed = token_rewards(batch)
    final_values = None
    if config.truncated_responses == "zero":
        truncated = on_tokens(batch["truncated"].values, batch["input_ids"].lengths)
        placed = torch.where(truncated, 0.0, placed)
    elif config.truncated_responses == "bootstrap":
        final_values = torch.where(batch["truncated"].values, batch["final_values"].values, 0.0)
        final_values = along.at_ends(final_values)
    rewards = shaped_rewards(kl, placed, mask, kl_coef)
    tokens = counts_per_block(batch, context, "response_mask").to(mask.device)
    n_samples = kl.new_tensor(len(batch), dtype=torch.float64)
    sums = torch.stack([kl.double().sum(), rewards.double().sum(), n_samples])
    ends = extremes(engine, batch["scores"].values)
    summed = engine.sum_over_dp(torch.cat([tokens, sums, ends])).tolist()
    *blocks, total_kl, reward, n = summed[: -len(ends)]
    count = sum(blocks)
    if config.whiten_rewards:
        (of_rewards,) = moments(engine, mask, count, rewards)
        rewards = whitened(rewards, mask, of_rewards, shift_mean=False)
    advantages, returns = gae(rewards, values, mask, along.lengths, config.gamma, config.lam, final_values)
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
    equal = are_equal(summed[-len(ends) :])
    return Targets(advantages, returns, blocks, of_returns.mean, square, metrics, state, equal)


def adapted_kl_coef(kl_coef: float, kl: float, target: float, horizon: int, n_seqs: int) -> float:
    """The next KL coefficient by the adaptive controller of arXiv:1909.08593, section 2.2; once per iteration.

    kl, target  mean KL per sequence and its target, in nats
    horizon     sequences over which the coefficient reacts
    n_seqs      sequences of this iteration
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * n_seqs / horizon)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Clipped value loss per token (Engstrom et al., arXiv:2005.12729, section 3, item 1).

    max((V - R)^2, (clip(V, V_old - cliprange, V_old + cliprange) - R)^2) / 2, with V values and R returns
    values, old_values, returns  [T]
    Returns (loss, clipped), both [T]; clipped is True where the clipped value has the larger error.
    """
    # Not old + clamp(values - old): its rounding would make values inside the bounds count as clipped.
    near = values.clamp(old_values - cliprange, old_values + cliprange)
    free, bounded = (values - returns).abs(), (near - returns).abs()
    error = torch.maximum(free, bounded)
    return error.square() / 2, bounded > free


def shifted(stage_values: Tensor, position_ids: Tensor) -> Tensor:
    """The value of the state *before* each token: [T]; 0 at each sample's first token.

    stage_values  [T], the value of the state after each token
    position_ids  [T]
    """
    return torch.where(position_ids == 0, 0.0, stage_values.roll(1))


@dataclass(frozen=True, slots=True)
class ValueNorm:
    """Running statistics of returns. weight: sum of the averaging weights. Without data it is 0: mean 0, std 1."""

    mean_sum: float = 0.0
    square_sum: float = 0.0
    weight: float = 0.0

    @staticmethod
    def of(state: MutableMapping[str, Any]) -> "ValueNorm":
        """The statistics in a role's state. They have no data at the start, or if values are not normalised."""
        return ValueNorm(**state.get(NORM_STATE, {}))

    def put(self, state: MutableMapping[str, Any]) -> None:
        """Store it in a role's state."""
        state[NORM_STATE] = asdict(self)

    @property
    def mean(self) -> float:
        return self.mean_sum / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        if not self.weight:
            return 1.0
        return max(self.square_sum / self.weight - self.mean**2, VARIANCE_FLOOR) ** 0.5

    def updated(self, mean: float, square: float) -> "ValueNorm":
        """The statistics after an iteration whose returns have this mean and mean of squares, over the global batch.

        Numbers that are not finite are ignored, because the averages would never be finite again.
        """
        if not (math.isfinite(mean) and math.isfinite(square)):
            return self
        return ValueNorm(
            DECAY * self.mean_sum + (1 - DECAY) * mean,
            DECAY * self.square_sum + (1 - DECAY) * square,
            DECAY * self.weight + (1 - DECAY),
        )

    def normalize(self, values: Tensor) -> Tensor:
        """Values in reward units -> normalised values; any shape."""
        return (values - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        """Normalised values -> values in reward units; any shape."""
        return values * self.std + self.mean
