"""The optimizer steps of a policy: one loss; an algorithm brings its ratio, its surrogate and its weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext
from rlhf_tasks.algorithms.shared.graphs.drawn_ahead import DRAWN_BY, PROXIMAL
from rlhf_tasks.algorithms.shared.graphs.rollout_calls import KEPT
from rlhf_tasks.algorithms.shared.learning.optimizer_steps import Steps
from rlhf_tasks.algorithms.shared.learning.packed import on_tokens, response_lengths
from rlhf_tasks.algorithms.shared.learning.policy_math import behaviour_weights, bounded, kl_divergence
from rlhf_tasks.algorithms.shared.learning.schedule import optimizer_steps, planned_share
from rlhf_tasks.algorithms.shared.policy_config import PolicyConfig
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.train.engine import Engine, LossTerms

Ratio = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""(logprobs - old_logprobs [T], mask [T], lengths) -> the policy ratio that counts for each token: [T]."""

Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logprobs, ratio, advantages), all [T] -> (loss, where a bound applies), both [T]."""

SUMS = ("ratio", "entropy", "clip_ratio", "approx_kl", "mismatch", "fresh")
WEIGHED = ("weight", "weight_squared", "cut")


@dataclass(frozen=True, slots=True)
class Objective:
    """What a policy's steps minimise, for each response token: surrogate loss + beta * KL(policy || reference).

    kl_estimator  k1, k2 or k3; only read where beta > 0
    """

    ratio: Ratio
    surrogate: Surrogate
    beta: float = 0.0
    kl_estimator: str = "k3"


class Weights(NamedTuple):
    """How the losses of tokens make the loss of a mini-batch: their weighted sum over all replicas / denominator.

    weights       [T] float64; 0 outside responses
    denominators  of each mini-batch, equal on all ranks; 0: nothing is learned there, and it has no step
    """

    weights: Tensor
    denominators: list[float]


class Counts(NamedTuple):
    """What there is in each mini-batch, over all replicas.

    responses  of the batch, without those of groups that were dropped
    learned    tokens that are learned
    tokens     of these responses
    """

    responses: list[float]
    learned: list[float]
    tokens: list[float]


def per_token(learned: Tensor, lengths: Sequence[int], counts: Counts, most: int) -> Weights:
    """The mean over all learned tokens of the mini-batch.

    The arguments of this and the following functions:
    learned  [T] bool
    most     tokens of the longest possible response
    """
    return Weights(learned.double(), counts.learned)


def per_response(learned: Tensor, lengths: Sequence[int], counts: Counts, most: int) -> Weights:
    """The mean over each response's learned tokens, then over all responses of the mini-batch."""
    shares = 1 / response_lengths(learned, lengths).clamp(min=1).double()
    return Weights(torch.where(learned, on_tokens(shares, lengths), 0.0), _responses(counts))


def per_sum(learned: Tensor, lengths: Sequence[int], counts: Counts, most: int) -> Weights:
    """The sum over each response's learned tokens, then the mean over all responses of the mini-batch."""
    return Weights(learned.double(), _responses(counts))


def per_most_tokens(learned: Tensor, lengths: Sequence[int], counts: Counts, most: int) -> Weights:
    """The sum over all learned tokens, divided by what the longest responses would have (arXiv:2503.20783)."""
    return Weights(learned.double(), [n * most for n in _responses(counts)])


def _responses(counts: Counts) -> list[float]:
    """The responses of each mini-batch; 0 where nothing is learned."""
    return [n if learned else 0.0 for n, learned in zip(counts.responses, counts.learned, strict=True)]


def policy_steps(
    engine: Engine,
    batch: SampleBatch,
    context: CallContext,
    objective: Objective,
    advantages: Tensor,
    weights: Weights,
    tokens: list[float],
    *,
    epochs: int = 1,
    first_iteration: int = 0,
    early_stop_ratio: float | None = None,
    ids: Sequence[int] | None = None,
) -> dict[str, float]:
    """The optimizer steps of one train call.

    advantages       [T]
    tokens           response tokens of each mini-batch, over all replicas
    first_iteration  the role's first training iteration
    early_stop_ratio once a step's mean ratio over its global mini-batch exceeds it, the iteration's remaining steps
                     are skipped on all ranks
    ids              of all replicas' samples that mini-batches are cut from; None: all of the iteration
    Returns the metrics
        loss/policy: mean of the mini-batches' losses, by their denominators
        entropy (nats), clip_ratio, policy/ratio, policy/approx_kl (nats; estimator k3, from the sampling policy):
            means over the response tokens of the applied steps
        policy/mismatch: mean |logprobs - old_logprobs| before the first step; only rounding, unless there is a fault.
            With staleness or segments, old_logprobs are those of the proximal policy where a pass of its own has
            computed them; else only tokens that the actor as it is has drawn are compared, and where it has drawn
            none this is left out
        policy/steps (number of applied steps), grad_norm/actor, learning_rate/actor, skipped_steps/actor
        those of `from_older`, with staleness or segments. Ratio and KL are then those from the proximal policy
    """
    config = _config(context)
    weighs = config.corrects_staleness and not config.infers_proximal
    samples, weights, staleness = _to_learn_from(
        engine, batch, advantages, weights, config, objective, weighs
    )
    cap = config.importance_cap if weighs else None
    loss = partial(_terms, engine, config.sampling.temperature, objective, cap)
    steps = Steps(
        engine,
        loss,
        weights.denominators,
        context.micro_batches,
        SUMS + (WEIGHED if weighs else ()),
        tokens,
        counted="response_mask",
        share=None if ids is None else planned_share(context, engine.placement.strategy.dp),
    )
    mismatch = dict[str, float]()
    for step in optimizer_steps(samples, context, config.optimizer, epochs, first_iteration, ids):
        if not weights.denominators[step.block]:
            continue  # only the optimizer's momentum would change the weights
        unchanged = steps.applied == 0
        means = steps.take(step)
        if unchanged and means["fresh"]:
            mismatch = {"policy/mismatch": means["mismatch"] / means["fresh"]}
        if early_stop_ratio is not None and means["ratio"] > early_stop_ratio:
            break
    if weighs:
        staleness |= _importance(steps)
    return {
        "loss/policy": steps.mean("loss"),
        "entropy": steps.mean("entropy"),
        "clip_ratio": steps.mean("clip_ratio"),
        "policy/ratio": steps.mean("ratio"),
        "policy/approx_kl": steps.mean("approx_kl"),
        **mismatch,
        "policy/steps": float(steps.applied),
        **steps.end("actor"),
        **staleness,
    }


def _to_learn_from(
    engine: Engine,
    batch: SampleBatch,
    advantages: Tensor,
    weights: Weights,
    config: PolicyConfig,
    objective: Objective,
    weighs: bool,
) -> tuple[SampleBatch, Weights, dict[str, float]]:
    """(what `_terms` reads of a batch, the tokens' weights, metrics of staleness).

    advantages  [T]
    weighs      whether `_terms` itself weighs tokens that older versions have drawn, in the only step's pass
    """
    mask, lengths = batch["response_mask"].values, batch["input_ids"].lengths
    fresh = mask
    if config.learns_from_older and not config.infers_proximal:
        fresh = mask & (batch[DRAWN_BY].values == engine.version)
    if weighs:
        staleness = _ages(engine.sum_over_dp(_tally(engine, batch, config)).tolist())
    else:
        batch, weights, staleness = from_older(engine, batch, weights, config, objective.ratio)
    dtype = batch["old_logprobs"].values.dtype
    own = {
        "fresh": Packed(fresh, lengths),
        "advantages": Packed(advantages.to(dtype), lengths),
        "weights": Packed(weights.weights.to(dtype), lengths),
    }
    ref = ("ref_logprobs",) if objective.beta > 0 else ()
    kept = KEPT if config.records_kept else ()
    read = ("input_ids", "response_mask", "old_logprobs", *ref, *kept)
    return SampleBatch(batch.ids, {key: batch[key] for key in read} | own), weights, staleness


def _importance(steps: Steps) -> dict[str, float]:
    """Metrics of the weights that the steps' own passes have computed."""
    mean = steps.mean("weight")
    return {
        "importance/mean": mean,
        "importance/cut_ratio": steps.mean("cut"),
        "importance/effective": mean**2 / steps.mean("weight_squared"),
    }


def from_older(
    engine: Engine,
    batch: SampleBatch,
    weights: Weights,
    config: PolicyConfig,
    ratio: Ratio,
    micro_batches: int = 1,
) -> tuple[SampleBatch, Weights, dict[str, float]]:
    """Prepare a train_step on samples that older versions have drawn: (batch, weights, metrics).

    This is decoupled PPO (arXiv:2110.00641). Each token's weight is multiplied by its `behaviour_weights`. The policy
    ratio is taken to the proximal policy: `old_logprobs` of the batch become the proximal policy's. The denominators
    stay, so a token that counts less does not make the others count more. Without staleness and segments nothing is
    changed, and with `importance_cap` null only metrics are added.

    The proximal policy's log-probabilities are those that `actor_inference` has computed. Where a train_step takes
    one optimizer step, the graph has no such call. Then a forward pass computes them here. `policy_steps` does
    without it, since its step is that pass.

    ratio          the objective's. Where its actions are whole responses, so are those that are weighted
    micro_batches  of the forward pass
    Metrics, over the response tokens; none where nothing is older:
        staleness/mean, staleness/max  train calls since a token was drawn
        importance/mean                mean weight
        importance/cut_ratio           share of the tokens whose weight the cap cuts
        importance/effective           square of the sum of the weights / (tokens * sum of their squares); 1 where all
                                       are equal
    Collective over the mesh.
    """
    if not config.learns_from_older:
        return batch, weights, {}
    tally = _tally(engine, batch, config)
    if config.importance_cap is None:
        return batch, weights, _ages(engine.sum_over_dp(tally).tolist())
    mask, drawn, lengths = batch["response_mask"].values, batch["old_logprobs"], batch["input_ids"].lengths
    proximal = batch.data.get(PROXIMAL)
    if proximal is None:
        proximal = engine.inference(
            batch,
            lambda logits, micro: engine.logprobs(logits, micro, config.sampling.temperature),
            micro_batches,
            counted="response_mask",
        )
    if proximal is None:
        proximal = drawn  # a rank of an earlier stage, which computes no loss
    change = torch.where(mask, proximal.values - drawn.values, 0.0).double()
    by, cut = behaviour_weights(ratio(change, mask, lengths), mask, config.importance_cap)
    of_tokens = torch.stack(
        [mask.sum().double(), by[mask].sum(), by[mask].square().sum(), cut.sum().double()]
    )
    *counts, n, total, squares, n_cut = engine.sum_over_dp(torch.cat([tally, of_tokens])).tolist()
    metrics = {
        **_ages(counts),
        "importance/mean": total / n if n else 1.0,
        "importance/cut_ratio": n_cut / n if n else 0.0,
        "importance/effective": total**2 / (n * squares) if squares else 1.0,
    }
    batch = SampleBatch(batch.ids, {**batch.data, "old_logprobs": proximal})
    return batch, weights._replace(weights=weights.weights * by), metrics


def _tally(engine: Engine, batch: SampleBatch, config: PolicyConfig) -> Tensor:
    """This replica's response tokens of each age, in train calls since they were drawn: [oldest + 1] float64."""
    ages = engine.version - batch[DRAWN_BY].values[batch["response_mask"].values]
    return torch.bincount(ages, minlength=config.oldest + 1).double()


def _ages(counts: Sequence[float]) -> dict[str, float]:
    """The metrics of the tokens' ages; counts: response tokens of each age, over all replicas."""
    n = sum(counts)
    return {
        "staleness/mean": sum(age * count for age, count in enumerate(counts)) / n if n else 0.0,
        "staleness/max": float(max((age for age, count in enumerate(counts) if count), default=0)),
    }


def _terms(
    engine: Engine,
    temperature: float,
    objective: Objective,
    cap: float | None,
    logits: Tensor,
    micro: MicroBatch,
) -> LossTerms:
    """The weighted losses of one micro-batch, and the sums over its response tokens for the metrics.

    cap  of the weights of tokens that older versions have drawn, where this pass is that of the proximal policy, too;
         else None
    """
    data = micro.data
    mask, old, weights = data["response_mask"], data["old_logprobs"], data["weights"]
    logprobs, entropy = engine.logprobs_and_entropy(logits, micro, temperature)
    weighed = dict[str, Tensor]()
    if cap is not None:
        change = torch.where(mask, logprobs.detach() - old, 0.0).double()
        by, cut = behaviour_weights(objective.ratio(change, mask, micro.lengths), mask, cap)
        old, weights = logprobs.detach(), (weights * by).to(weights.dtype)
        weighed = {"weight": by, "weight_squared": by.square(), "cut": cut}
    ratio = objective.ratio(logprobs - old, mask, micro.lengths)
    losses, clipped = objective.surrogate(logprobs, ratio, data["advantages"])
    if objective.beta > 0:
        kl = kl_divergence(logprobs, data["ref_logprobs"], objective.kl_estimator)
        losses = losses + objective.beta * kl
    change = bounded(logprobs - old).detach()
    from_drawn = bounded(logprobs - data["old_logprobs"]).detach()
    sums = {
        "ratio": ratio.detach(),
        "entropy": entropy.detach(),
        "clip_ratio": clipped,
        "approx_kl": torch.expm1(change) - change,
        "mismatch": torch.where(data["fresh"], from_drawn.abs(), 0.0),
        "fresh": data["fresh"],
        **weighed,
    }
    return LossTerms(
        torch.where(weights > 0, weights * losses, 0.0).sum(),
        {name: torch.where(mask, values, 0).sum() for name, values in sums.items()},
    )


def _config(context: CallContext) -> PolicyConfig:
    assert isinstance(context.config, PolicyConfig), f"{context.config.type} runs have no policy loss"
    return context.config
