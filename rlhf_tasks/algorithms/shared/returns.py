"""Rewards, returns and advantages on packed tensors, and their statistics over all replicas.

The T tokens of n samples are concatenated; `lengths` has the number of tokens of each sample. A per-token tensor is
[T]. `mask` [T] bool is True on response tokens. Inputs at other tokens have no influence, and outputs there are 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import TOKEN_REWARDS
from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import last_response_tokens, sample_of_token
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import LENGTHS
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

WHITENING_EPSILON = 1e-8


def at_last_tokens(scores: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
    """The score of each sample at its last response token: [T], 0 elsewhere.

    scores [n]; mask [T] bool. The score of a sample without response tokens is not used.
    """
    last = last_response_tokens(mask, lengths)
    answered = last >= 0
    placed = scores.new_zeros(len(mask))
    placed[last[answered]] = scores[answered]
    return placed


class Trajectories(NamedTuple):
    """What returns run along: samples, or the branches of an agent's, each of which ends with its sample's score. So
    no token counts on what another branch draws.

    lengths  tokens of each
    samples  [number of trajectories], the place of its sample in the batch
    """

    lengths: tuple[int, ...]
    samples: Tensor

    def at_ends(self, of_samples: Tensor) -> Tensor:
        """A value of each sample at its last trajectory, 0 at the others: [number of trajectories]."""
        following = self.samples.new_full((1,), len(of_samples))
        is_last = self.samples != torch.cat([self.samples[1:], following])
        return torch.where(is_last, of_samples[self.samples], 0.0)


def trajectories(batch: SampleBatch) -> Trajectories:
    """The trajectories of a batch's samples."""
    tokens = batch["input_ids"]
    places = torch.arange(len(batch), device=tokens.values.device)
    if LENGTHS not in batch.data:
        return Trajectories(tokens.lengths, places)
    of_samples = batch[LENGTHS]
    counts = torch.tensor(of_samples.lengths, device=places.device)
    return Trajectories(tuple(of_samples.values.tolist()), places.repeat_interleave(counts))


def token_rewards(batch: SampleBatch) -> Tensor:
    """The reward of each token: [T], 0 outside responses. A score for the whole response counts at the last token of
    each of its trajectories."""
    if TOKEN_REWARDS in batch.data:
        return batch[TOKEN_REWARDS].values
    lengths, samples = trajectories(batch)
    return at_last_tokens(batch["scores"].values[samples], batch["response_mask"].values, lengths)


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


def discounted_returns(rewards: Tensor, mask: Tensor, lengths: Sequence[int], gamma: float) -> Tensor:
    """The discounted sum of the rewards from each response token on: [T], 0 where mask is False.

    rewards  [T]
    """
    return gae(rewards, torch.zeros_like(rewards), mask, lengths, gamma, lam=1.0)[0]


class Moments(NamedTuple):
    """Number, mean and (biased) variance of values."""

    n: float
    mean: float
    variance: float

    @property
    def std(self) -> float:
        """The unbiased standard deviation."""
        return (self.variance * self.n / max(self.n - 1, 1)) ** 0.5


def moments(engine: Engine, mask: Tensor, count: float, *values: Tensor) -> list[Moments]:
    """The moments of one or more per-token tensors over the tokens that `mask` marks. Collective over the mesh.

    values  [T] each
    mask    [T] bool
    count   marked tokens of all replicas
    """
    count = max(count, 1.0)
    sums = torch.stack([torch.where(mask, x.double(), 0.0).sum() for x in values])
    means = [total / count for total in engine.sum_over_dp(sums).tolist()]
    squares = torch.stack(
        [
            torch.where(mask, x.double() - mean, 0.0).square().sum()
            for x, mean in zip(values, means, strict=True)
        ]
    )
    variances = [total / count for total in engine.sum_over_dp(squares).tolist()]
    return [Moments(count, *pair) for pair in zip(means, variances, strict=True)]


def whitened(values: Tensor, mask: Tensor, of: Moments, shift_mean: bool = True) -> Tensor:
    """Scale values [T] to mean 0 and std 1: [T], 0 where mask is False.

    of          the values' moments
    shift_mean  False: the mean stays as it is
    """
    scaled = (values.double() - of.mean) / (of.std + WHITENING_EPSILON)
    return torch.where(mask, scaled if shift_mean else scaled + of.mean, 0.0).to(values.dtype)
