"""The mathematics of PPO on packed tensors: pure functions, no engine, no communication.

The T tokens of n samples are concatenated; `lengths` has the number of tokens of each sample. A per-token tensor is
[T]. `mask` [T] bool is True on response tokens. Inputs at other tokens have no influence, and outputs there are 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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


def shaped_rewards(
    kl: Tensor, scores: Tensor, mask: Tensor, lengths: Sequence[int], kl_coef: float
) -> Tensor:
    """-kl_coef * kl per token, and the score at the last response token (arXiv:1909.08593, eq. 2).

    kl [T]; scores [n]; mask [T] bool
    Returns [T], 0 where mask is False. The score of a sample without response tokens is not used.
    """
    rewards = torch.where(mask, -kl_coef * kl, 0.0)
    last = last_response_tokens(mask, lengths)
    answered = last >= 0
    rewards[last[answered]] += scores[answered].to(rewards.dtype)
    return rewards


def last_response_tokens(mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """The index into [T] of each sample's last response token: [n] int64; -1 where it has none."""
    places = torch.where(mask, torch.arange(len(mask), device=mask.device), -1)
    last = torch.full((len(lengths),), -1, device=mask.device)
    return last.scatter_reduce(0, sample_of_token(lengths, mask.device), places, "amax")


def sample_of_token(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The index of the sample that each token belongs to: [T] int64 of 0 .. n - 1."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    return torch.arange(len(lengths), device=device).repeat_interleave(counts)


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


def adapted_kl_coef(kl_coef: float, kl: float, target: float, horizon: int, n_seqs: int) -> float:
    """The next KL coefficient by the adaptive controller of arXiv:1909.08593, section 2.2; once per iteration.

    kl, target  mean KL per sequence and its target, in nats
    horizon     sequences over which the coefficient reacts
    n_seqs      sequences of this iteration
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * n_seqs / horizon)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """logprobs - old_logprobs, clamped so that its exp is finite in float32: [T] from [T] and [T].

    There is no gradient where it is clamped.
    """
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cliprange: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The negative clipped surrogate objective per token (arXiv:1707.06347, eq. 7).

    logprobs, old_logprobs, advantages  [T]
    dual_clip  c > 1: where the advantage A is negative the loss is at most -c A (arXiv:1912.09729, eq. 5), so
               that a token which became much likelier by accident cannot dominate a step; None: no bound
    Returns (loss, ratio, clipped), all [T]; clipped is True where a bound applies: such tokens give no gradient.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        loss, clipped = torch.minimum(loss, ceiling), clipped | (loss > ceiling)
    return loss, ratio.detach(), clipped


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float, huber_delta: float | None = None
) -> tuple[Tensor, Tensor]:
    """Clipped value loss per token (Engstrom et al., arXiv:2005.12729, section 3, item 1).

    values, old_values, returns  [T]
    huber_delta  an error e costs e^2 / 2 up to |e| = delta and delta (|e| - delta / 2) above (Huber, 1964);
                 None: e^2 / 2 everywhere
    Returns (loss, clipped), both [T]; clipped is True where the clipped value has the larger error.
    """
    # Not old + clamp(values - old): its rounding would make values inside the bounds count as clipped.
    near = values.clamp(old_values - cliprange, old_values + cliprange)
    free, bounded = (values - returns).abs(), (near - returns).abs()
    error = torch.maximum(free, bounded)
    if huber_delta is None:
        return error.square() / 2, bounded > free
    linear = huber_delta * (error - huber_delta / 2)
    return torch.where(error <= huber_delta, error.square() / 2, linear), bounded > free


def shifted(stage_values: Tensor, position_ids: Tensor) -> Tensor:
    """The value of the state *before* each token: [T]; 0 at each sample's first token.

    stage_values  [T], the value of the state after each token
    position_ids  [T]
    """
    return torch.where(position_ids == 0, 0.0, stage_values.roll(1))
