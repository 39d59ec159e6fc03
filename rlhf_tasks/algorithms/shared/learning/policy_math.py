"""The mathematics of policy gradients on packed tensors: pure functions, no engine, no communication.

The T tokens of n samples are concatenated; `lengths` has the number of tokens of each sample. A per-token tensor is
[T]. `mask` [T] bool is True on response tokens. Inputs at other tokens have no influence, and outputs there are 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.graphs.rollout_calls import TOKEN_REWARDS
from rlhf_tasks.algorithms.shared.learning.packed import (
    last_response_tokens,
    on_tokens,
    response_lengths,
    response_sums,
    sample_of_token,
)
from rlhf_tasks.parallel.batch.samples import SampleBatch

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: a larger log-ratio carries no information


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) from each sampled token, in nats: [T] (Schulman, 2020).

    logprobs, ref_logprobs  [T]
    With d = logprobs - ref_logprobs: k1 = d (unbiased), k2 = d^2 / 2 (biased, low variance),
    k3 = exp(-d) - 1 + d (unbiased, never negative). Raises KeyError for another name.
    """
    d = (logprobs - ref_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    estimators = {"k1": lambda: d, "k2": lambda: d.square() / 2, "k3": lambda: torch.expm1(-d) + d}
    return estimators[estimator]()


def at_last_tokens(scores: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """The score of each sample at its last response token: [T], 0 elsewhere.

    scores [n]; mask [T] bool. The score of a sample without response tokens is not used.
    """
    last = last_response_tokens(mask, lengths)
    answered = last >= 0
    placed = scores.new_zeros(len(mask))
    placed[last[answered]] = scores[answered]
    return placed


def shaped_rewards(kl: Tensor, rewards: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """The rewards less kl_coef * kl per token (arXiv:1909.08593, eq. 2): [T], 0 where mask is False.

    kl, rewards  [T]; a score for the whole response is at its last token
    mask         [T] bool
    """
    return torch.where(mask, -kl_coef * kl + rewards.to(kl.dtype), 0.0)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    gamma: float,
    lam: float,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) for each sample of a packed batch.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  R_t = A_t + V_t

    t counts a sample's response tokens only, so tokens where mask is False are skipped.
    rewards, values  [T]
    mask             [T] bool
    final_values     [n], the value V after each sample's last response token: 0 for a response that ended; for a
                     truncated one the critic's value, for bootstrapping (arXiv:1712.00378, section 3); None: all 0
    Returns (advantages, returns), both [T], 0 where mask is False.
    Raises ValueError when the sizes differ.
    """
    if not len(rewards) == len(values) == len(mask) == sum(lengths):
        raise ValueError(
            f"rewards [{len(rewards)}], values [{len(values)}], mask [{len(mask)}] and lengths with sum "
            f"{sum(lengths)} must agree."
        )
    places = mask.nonzero().squeeze(1)
    samples = sample_of_token(lengths, mask.device)[places]
    counts = torch.bincount(samples, minlength=len(lengths))
    steps = torch.arange(len(places), device=mask.device) - (counts.cumsum(0) - counts)[samples]

    longest = int(counts.max()) if len(lengths) else 0
    padded = values.new_zeros(2, len(lengths), longest + 1)  # the last column is for the final value
    padded[0, samples, steps] = rewards[places].to(values.dtype)
    padded[1, samples, steps] = values[places]
    if final_values is not None:
        padded[1, torch.arange(len(lengths), device=mask.device), counts] = final_values.to(values.dtype)
    r, v = padded
    answered = torch.arange(longest, device=mask.device) < counts[:, None]
    delta = torch.where(answered, r[:, :-1] + gamma * v[:, 1:] - v[:, :-1], 0.0)
    running = values.new_zeros(len(lengths))
    for step in reversed(range(longest)):
        running = delta[:, step] + gamma * lam * running
        delta[:, step] = running

    advantages = torch.zeros_like(values)
    advantages[places] = delta[samples, steps]
    return advantages, torch.where(mask, advantages + values, 0.0)


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


def behaviour_weights(ratio: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """The weight of each token that an older policy has drawn: its probability under the proximal policy, before the
    train_step, over that under the policy that drew it, cut at `cap` (arXiv:2110.00641, section 3; arXiv:2505.24298,
    section 5.2; truncated as in V-trace, arXiv:1802.01561).

    ratio  [T] float64 of these probabilities: each token's, or on each token its response's
    Returns (weights float64, cut), both [T], 1 and False where mask is False; cut is True where the cap applies.
    """
    return torch.where(mask, ratio.clamp(max=cap), 1.0), mask & (ratio > cap)


def overlong_penalties(response_tokens: Tensor, most: int, buffer: float) -> Tensor:
    """The soft punishment of long responses: from 0 down to -1 at the most tokens (arXiv:2503.14476, eq. 13).

    response_tokens  [n] int64
    most             tokens of the longest response
    buffer           share of `most` over whose tokens, the last ones, the penalty grows
    Returns [n] float64.
    """
    width = buffer * most
    return -((response_tokens.double() - (most - width)) / width).clamp(0, 1)


def discounted_returns(rewards: Tensor, mask: Tensor, lengths: Sequence[int], gamma: float) -> Tensor:
    """The discounted sum of the rewards from each response token on: [T], 0 where mask is False.

    rewards  [T]
    """
    return gae(rewards, torch.zeros_like(rewards), mask, lengths, gamma, lam=1.0)[0]


def token_rewards(batch: SampleBatch) -> Tensor:
    """The reward of each token: [T], 0 outside responses. What is judged as a whole counts at the last token."""
    if TOKEN_REWARDS in batch.data:
        return batch[TOKEN_REWARDS].values
    return at_last_tokens(batch["scores"].values, batch["response_mask"].values, batch["input_ids"].lengths)
