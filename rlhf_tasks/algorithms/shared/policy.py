"""What a policy's train call minimises, and its optimizer steps.

Over the tokens t of a mini-batch's responses, on all replicas:

    loss = sum_t  w_t * b_t * (surrogate_t + beta * KL_t)  /  denominator

An algorithm gives its advantages and an `Objective`: the ratio of probabilities, the surrogate loss of a token, and
the weighting. The weighting gives w, which is 0 on tokens that are not learned, and the denominator. That counts the
mini-batch's responses (`per_response`, `per_sum`), its learned tokens (`per_token`), or the tokens that its responses
can have at most (`per_most_tokens`). b is 1, except where tokens are weighted by who has drawn them
(`behaviour_weights`). Sum and denominator are global, so no result depends on how the batch was split.

The T tokens of n samples are concatenated; `lengths` has the number of tokens of each sample. A per-token tensor is
[T]. `mask` [T] bool is True on response tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import Correction, CriticFreeConfig, PolicyConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import DRAWN_BY, KEPT, PROXIMAL
from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import (
    all_equal,
    on_tokens,
    per_group,
    response_lengths,
    response_sums,
)
from prefect_rlhf.rlhf_tasks.algorithms.shared.guards import are_equal, extremes, leaves_out_update
from prefect_rlhf.rlhf_tasks.algorithms.shared.schedule import (
    Steps,
    counts_per_block,
    optimizer_steps,
    planned_share,
)
from prefect_rlhf.rlhf_tasks.config.sampling import Samples
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.rewards import SKIPPED_SAMPLES

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: a larger log-ratio carries no information


# Ratios: (logprobs - old_logprobs [T], mask, lengths) -> the policy ratio that counts for each token: [T]

Ratio = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


def token_ratio(change: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """The policy ratio of each token: [T].

    change  [T], logprobs - old_logprobs, 0 where mask is False
    """
    return bounded(change).exp()


def geometric_ratio(change: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """The geometric mean of a response's ratios, on each of its tokens: [T] (GSPO, arXiv:2507.18071, eq. 7)."""
    means = response_sums(change, mask, lengths) / response_lengths(mask, lengths).clamp(min=1)
    return on_tokens(bounded(means).exp(), lengths)


def response_ratio(change: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """The ratio of a whole response's probabilities, on each of its tokens: [T]."""
    return on_tokens(bounded(response_sums(change, mask, lengths)).exp(), lengths)


def bounded(log_ratio: Tensor) -> Tensor:
    """A log-ratio, clamped so that its exp is finite in float32. There is no gradient where it is clamped."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


# Surrogates: (logprobs, ratio, advantages), all [T] -> (loss, where a bound applies), both [T]

Surrogate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def clipped_loss(
    logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The negative clipped surrogate objective per token (arXiv:1707.06347, eq. 7).

    logprobs, ratio, advantages  [T]
    low, high  the ratio counts only within 1 - low .. 1 + high (two bounds: arXiv:2503.14476, eq. 10)
    dual_clip  c > 1: where the advantage A is negative the loss is at most -c A (arXiv:1912.09729, eq. 5), so
               that a token which became much likelier by accident cannot dominate a step; None: no bound
    Returns (loss, clipped), both [T]; clipped is True where a bound applies: such tokens give no gradient.
    """
    free = -advantages * ratio
    near = -advantages * ratio.clamp(1 - low, 1 + high)
    loss, clipped = torch.maximum(free, near), near > free
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        loss, clipped = torch.minimum(loss, ceiling), clipped | (loss > ceiling)
    return loss, clipped


def cispo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, high: float) -> tuple[Tensor, Tensor]:
    """REINFORCE weighted by the bounded ratio, through which no gradient flows (arXiv:2506.13585, eq. 4).

    So every token gives a gradient, also where the ratio is bounded.
    logprobs, ratio, advantages  [T]
    high  bounds the ratio by 1 + high
    Returns (loss, clipped), both [T]; clipped is True where the ratio is bounded.
    """
    weight = ratio.detach()
    return -weight.clamp(max=1 + high) * advantages * logprobs, weight > 1 + high


# Weightings: how the losses of tokens make the loss of a mini-batch


class Weights(NamedTuple):
    """The loss of a mini-batch is the weighted sum of its tokens' losses, over all replicas, / its denominator.

    weights       [T] float64; 0 outside responses
    denominators  of each mini-batch, equal on all ranks; 0: nothing is learned there, and it has no step
    """

    weights: Tensor
    denominators: list[float]


class Counts(NamedTuple):
    """Numbers of responses and tokens of each mini-batch, over all replicas.

    responses  all that stay in the batch, also those of which no token is learned
    learned    tokens that are learned
    tokens     response tokens of these responses, learned or not
    """

    responses: list[float]
    learned: list[float]
    tokens: list[float]


Weighting = Callable[[Tensor, Sequence[int], Counts, int], Weights]


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
    """The sum over all learned tokens, divided by number of responses * `most` (Dr.GRPO, arXiv:2503.20783)."""
    return Weights(learned.double(), [n * most for n in _responses(counts)])


def _responses(counts: Counts) -> list[float]:
    """The responses of each mini-batch; 0 where nothing is learned."""
    return [n if learned else 0.0 for n, learned in zip(counts.responses, counts.learned, strict=True)]


# The KL divergence from the reference


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) from each sampled token, in nats: [T] (Schulman, 2020).

    logprobs, ref_logprobs  [T]
    With d = logprobs - ref_logprobs: k1 = d (unbiased), k2 = d^2 / 2 (biased, low variance),
    k3 = exp(-d) - 1 + d (unbiased, never negative). Raises KeyError for another name.
    """
    d = (logprobs - ref_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    estimators = {"k1": lambda: d, "k2": lambda: d.square() / 2, "k3": lambda: torch.expm1(-d) + d}
    return estimators[estimator]()


def reference_kl(batch: SampleBatch, estimator: str) -> Tensor:
    """KL(sampling policy || reference), estimated per token: [T], 0 outside responses."""
    kl = kl_divergence(batch["old_logprobs"].values, batch["ref_logprobs"].values, estimator)
    return torch.where(batch["response_mask"].values, kl, 0.0)


def ref_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `logprobs` of the responses under the model's current weights, at the temperature of sampling.

    Tokens that top-k and top-p left out are left out here too. So the KL penalty compares distributions over the same
    tokens: it is 0 if policy and reference are equal.
    """
    config = context.config
    assert isinstance(config, Samples), f"{config.type} runs have no such call"

    def output(logits: Tensor, micro: MicroBatch) -> Tensor:
        return engine.logprobs(logits, micro, config.sampling.temperature)

    rows = engine.inference(batch, output, context.micro_batches, counted="response_mask")
    if rows is None or not engine.is_head:
        return CallOutput()
    return CallOutput(SampleBatch(batch.ids, {"logprobs": rows}))


actor_inference = ref_inference
"""The same under the actor before its train_step: the proximal policy."""


# Tokens that another policy has drawn

RATIO_OF_LEVEL: Mapping[str, Ratio] = {
    "token": token_ratio,
    "sequence": response_ratio,
    "geometric": geometric_ratio,
}


def behaviour_weights(
    change: Tensor, mask: Tensor, lengths: Sequence[int], correction: Correction, ratio: Ratio
) -> tuple[Tensor, Tensor]:
    """The weight b of each token that another policy has drawn: r = p_proximal / p_drawn within bounds, with its
    probabilities under the proximal policy (the actor before the train_step) and under the policy that drew it
    (arXiv:2110.00641, section 3; arXiv:2505.24298, section 5.2).

    Truncated, r is cut at its bounds, as in V-trace (arXiv:1802.01561); masked, b is 0 outside them. With a veto b is
    0 on a whole response of which one token's own r is below it.

    change  [T] float64, log p_proximal - log p_drawn; 0 where mask is False
    ratio   gives r where the correction names no level
    Returns (weights float64, cut), both [T], 1 and False where mask is False; cut is True where b is not r.
    """
    low, high = correction.lower or 0.0, correction.upper or torch.inf
    r = (RATIO_OF_LEVEL[correction.level] if correction.level else ratio)(change, mask, lengths)
    cut = (r < low) | (r > high)
    weights = torch.where(cut, 0.0, r) if correction.kind == "masked" else r.clamp(low, high)
    if correction.veto is not None:
        unlikely = mask & (change < math.log(correction.veto))
        vetoed = on_tokens(response_sums(unlikely.double(), mask, lengths) > 0, lengths)
        weights, cut = torch.where(vetoed, 0.0, weights), cut | vetoed
    return torch.where(mask, weights, 1.0), mask & cut


def ages(engine: Engine, batch: SampleBatch, oldest: int) -> dict[str, float]:
    """staleness/mean and staleness/max: train calls since a response token was drawn. Collective over the mesh."""
    of_tokens = engine.version - batch[DRAWN_BY].values[batch["response_mask"].values]
    counts = engine.sum_over_dp(torch.bincount(of_tokens, minlength=oldest + 1).double()).tolist()
    n = sum(counts)
    return {
        "staleness/mean": sum(age * count for age, count in enumerate(counts)) / n if n else 0.0,
        "staleness/max": float(max((age for age, count in enumerate(counts) if count), default=0)),
    }


# The steps


@dataclass(frozen=True, slots=True)
class Objective:
    """What a policy's steps minimise: see the head of this file.

    kl_estimator      k1, k2 or k3, of the KL in the loss; only read where beta > 0
    early_stop_ratio  once a step's mean ratio over its global mini-batch exceeds it, the iteration's remaining steps
                      are skipped on all ranks
    """

    ratio: Ratio
    surrogate: Surrogate
    weighting: Weighting
    beta: float = 0.0
    kl_estimator: str = "k3"
    early_stop_ratio: float | None = None


COMPARED = {
    "none": "rewards",
    "group": "rewards within each group",
    "greedy": "rewards and those of the greedy responses",
}
"""Baseline of an algorithm -> the rewards of which none is learned where they are equal."""

SUMS = ("ratio", "entropy", "clip_ratio", "approx_kl", "mismatch", "fresh")
BEHAVIOUR_SUMS = ("behaviour", "behaviour_squared", "cut", "drawn_kl")
"""What a step sums over response tokens for the metrics; the latter where they are weighted by who has drawn them."""


def policy_steps(
    engine: Engine,
    batch: SampleBatch,
    context: CallContext,
    objective: Objective,
    advantages: Tensor,
    learned: Tensor,
    counts: Counts,
    *,
    first_iteration: int = 0,
    ids: Sequence[int] | None = None,
    left_out: bool = False,
) -> dict[str, float]:
    """The optimizer steps of one train call.

    advantages       [T]
    learned          [T] bool, the tokens that are learned
    first_iteration  the role's first training iteration
    ids              of all replicas' samples that mini-batches are cut from; None: all of the iteration
    left_out         an anomaly leaves out all steps (guards.py)
    Returns the metrics
        loss/policy: mean of the mini-batches' losses, by their denominators
        entropy (nats), clip_ratio, policy/ratio, policy/approx_kl (nats; estimator k3, from the proximal policy,
            which without staleness and segments is the sampling policy): means over the response tokens of the
            applied steps
        policy/mismatch: mean |logprobs - old_logprobs| before the first step; only rounding, unless there is a fault.
            With staleness or segments there are two cases. If a separate pass has computed the proximal policy's
            logprobs, it compares with these. Else it is the mean over tokens that the actor's current weights have
            drawn, and is left out if there are none
        policy/steps (number of applied steps), grad_norm/actor, learning_rate/actor, skipped_steps/actor
        with staleness or segments those of `ages`, and where tokens are weighted by who has drawn them
            importance/mean (of the tokens' weights b), importance/cut_ratio (share of the tokens whose weight is cut,
            masked or vetoed), importance/effective (square of the sum of the weights / (tokens * sum of their
            squares); 1 where all are equal), importance/kl (nats a token, KL(policy that drew || proximal policy),
            estimator k3): over the response tokens of the applied steps
    """
    config = context.config
    assert isinstance(config, PolicyConfig), f"{config.type} runs have no policy loss"
    correction = config.corrects
    lengths = batch["input_ids"].lengths
    weights = objective.weighting(learned, lengths, counts, config.sampling.max_completion_length)
    steps = Steps(
        engine,
        partial(_terms, engine, config.sampling.temperature, objective, correction),
        weights.denominators,
        context.micro_batches,
        SUMS if correction is None else SUMS + BEHAVIOUR_SUMS,
        counts.tokens,
        counted="response_mask",
        share=None if ids is None else planned_share(context, engine.placement.strategy.dp),
    )
    samples = _read_by_terms(engine, batch, config, objective, advantages, weights)
    staleness = ages(engine, batch, config.oldest) if config.learns_from_older else {}
    mismatch = dict[str, float]()
    steps.left_out = left_out
    planned = optimizer_steps(samples, context, config.optimizer, config.passes, first_iteration, ids)
    for step in () if left_out else planned:
        if not weights.denominators[step.block]:
            continue  # only the optimizer's momentum would change the weights
        unchanged = steps.applied == 0
        means = steps.take(step)
        if unchanged and means["fresh"]:
            mismatch = {"policy/mismatch": means["mismatch"] / means["fresh"]}
        if objective.early_stop_ratio is not None and means["ratio"] > objective.early_stop_ratio:
            break
    metrics = {
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
    if correction is not None:
        mean = steps.mean("behaviour")
        metrics |= {
            "importance/mean": mean,
            "importance/cut_ratio": steps.mean("cut"),
            "importance/effective": mean**2 / squared
            if (squared := steps.mean("behaviour_squared"))
            else 0.0,
            "importance/kl": steps.mean("drawn_kl"),
        }
    return metrics


def _read_by_terms(
    engine: Engine,
    batch: SampleBatch,
    config: PolicyConfig,
    objective: Objective,
    advantages: Tensor,
    weights: Weights,
) -> SampleBatch:
    """What `_terms` reads of a batch."""
    mask, old = batch["response_mask"], batch["old_logprobs"]
    fresh = mask.values
    if config.learns_from_older and not config.infers_proximal:
        fresh = fresh & (batch[DRAWN_BY].values == engine.version)
    own = {
        "fresh": Packed(fresh, mask.lengths),
        "advantages": Packed(advantages.to(old.values.dtype), mask.lengths),
        "weights": Packed(weights.weights, mask.lengths),
    }
    ref = ("ref_logprobs",) if objective.beta > 0 else ()
    proximal = (PROXIMAL,) if config.infers_proximal else ()
    kept = KEPT if config.records_kept else ()
    read = ("response_mask", "old_logprobs", *ref, *proximal, *kept)
    return SampleBatch(batch.ids, batch.read() | {key: batch[key] for key in read} | own)


def _terms(
    engine: Engine,
    temperature: float,
    objective: Objective,
    correction: Correction | None,
    logits: Tensor,
    micro: MicroBatch,
) -> LossTerms:
    """The weighted losses of one micro-batch, and the sums over its response tokens for the metrics.

    With a correction this is decoupled PPO (arXiv:2110.00641): the ratio is to the proximal policy, whose
    log-probabilities `actor_inference` has computed. If a train call takes one optimizer step, the graph has no such
    call: this forward pass is the proximal policy's. The weights b do not change the denominators, so a token that
    counts less does not make the others count more.
    """
    data = micro.data
    mask, weights = data["response_mask"], data["weights"]
    logprobs, entropy = engine.logprobs_and_entropy(logits, micro, temperature)
    drawn = data["old_logprobs"]
    expected = old = data.get(PROXIMAL, drawn)
    behaviour = dict[str, Tensor]()
    if correction is not None:
        old = data.get(PROXIMAL, logprobs.detach())
        change = torch.where(mask, old - drawn, 0.0).double()
        by, cut = behaviour_weights(change, mask, micro.lengths, correction, objective.ratio)
        weights, near = weights * by, bounded(change)
        behaviour = {
            "behaviour": by,
            "behaviour_squared": by.square(),
            "cut": cut,
            "drawn_kl": torch.expm1(near) - near,
        }
    ratio = objective.ratio(logprobs - old, mask, micro.lengths)
    losses, clipped = objective.surrogate(logprobs, ratio, data["advantages"])
    if objective.beta > 0:
        kl = kl_divergence(logprobs, data["ref_logprobs"], objective.kl_estimator)
        losses = losses + objective.beta * kl
    change = bounded(logprobs - old).detach()
    sums = {
        "ratio": ratio.detach(),
        "entropy": entropy.detach(),
        "clip_ratio": clipped,
        "approx_kl": torch.expm1(change) - change,
        "mismatch": torch.where(data["fresh"], bounded(logprobs - expected).detach().abs(), 0.0),
        "fresh": data["fresh"],
        **behaviour,
    }
    return LossTerms(
        torch.where(weights > 0, weights.to(losses.dtype) * losses, 0.0).sum(),
        {name: torch.where(mask, values, 0).sum() for name, values in sums.items()},
    )


def learn(
    engine: Engine,
    batch: SampleBatch,
    context: CallContext,
    objective: Objective,
    advantages: Tensor,
    kl_estimator: str = "k3",
    ids: Sequence[int] | None = None,
    baseline: Literal["none", "group", "greedy"] = "group",
) -> CallOutput:
    """The train call of an algorithm without a critic: optimizer steps on the responses.

    With `mask_truncated_completions` no token of a truncated response is learned.

    advantages    [T]
    kl_estimator  of the metric kl
    ids           of the responses, of all replicas, that stay in the batch, in whole groups; mini-batches are cut
                  from these. None: all stay
    baseline      what a score is compared with: nothing, its group, or the score of the greedy response
    Metrics, besides those of `policy_steps`: kl (with a reference: mean KL(sampling policy || reference) per
    sequence, in nats), frac_reward_zero_std (with groups: share of the samples whose group's scores are all equal),
    those of `leaves_out_update`.
    Raises RewardError when the batch is empty on all replicas.
    """
    config, scores = context.config, batch["scores"].values
    assert isinstance(config, CriticFreeConfig), f"{config.type} runs have a critic"
    kl = reference_kl(batch, kl_estimator).double().sum() if config.beta > 0 else scores.new_zeros(())
    in_groups = per_group(all_equal, scores, batch.ids, config.group_size)
    as_baseline = scores == batch["greedy_scores"].values if baseline == "greedy" else in_groups
    n_here = scores.new_tensor(len(batch), dtype=torch.float64)
    whole = torch.stack([kl.double(), in_groups.sum().double(), as_baseline.sum().double(), n_here])
    of_tokens = {"advantages": Packed(advantages, batch["input_ids"].lengths)}
    batch = SampleBatch(batch.ids, {**batch.data, **of_tokens})
    if ids is not None:
        learned_from = set(ids)
        batch = batch.take([place for place, sample in enumerate(batch.ids) if sample in learned_from])

    lengths, learned = batch["input_ids"].lengths, batch["response_mask"].values
    if config.mask_truncated_completions:
        learned = learned & ~on_tokens(batch["truncated"].values, lengths)
    marks = SampleBatch(batch.ids, {"learned": Packed(learned, lengths), "tokens": batch["response_mask"]})
    counted = torch.cat([counts_per_block(marks, context, key, ids) for key in (None, "learned", "tokens")])
    own = torch.cat([counted.to(engine.device), whole, extremes(engine, scores)])
    summed = engine.sum_over_dp(own).tolist()
    *totals, total_kl, total_equal, total_as_baseline, n_samples = summed[: len(counted) + len(whole)]
    if not n_samples:
        raise RewardError(
            f"a reward failed on every sample of iteration {context.iteration}, so none is left to learn from. "
            f"{SKIPPED_SAMPLES} in the run folder has the reasons."
        )
    n = config.num_mini_batches
    counts = Counts(totals[:n], totals[n : 2 * n], totals[2 * n :])

    metrics: dict[str, float] = {}
    if config.beta > 0:
        metrics["kl"] = total_kl / n_samples
    if config.group_size > 1:
        metrics["frac_reward_zero_std"] = total_equal / n_samples
    elif baseline == "group":
        baseline = "none"
    of_all = are_equal(summed[len(counted) + len(whole) :])
    equal = of_all if baseline == "none" else total_as_baseline == n_samples
    kl_per_sequence = metrics.get("kl")
    left_out, anomalies = leaves_out_update(engine, context, kl_per_sequence, equal, COMPARED[baseline])
    steps = policy_steps(
        engine,
        batch,
        context,
        objective,
        batch["advantages"].values,
        learned,
        counts,
        ids=ids,
        left_out=left_out,
    )
    return CallOutput(metrics=metrics | anomalies | steps)
