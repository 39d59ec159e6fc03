"""Sampling the next token, with one uniform random number per (sample id, position) in any layout and batch."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_tasks.parallel.generate.stop_strings import StopStrings
from rlhf_tasks.system.counter_random import counter_bits


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How responses are sampled.

    temperature     divides the logits; 0 takes the likeliest token (greedy)
    top_k           draw only from the k likeliest tokens, and those tied with the k-th; 0: from all
    top_p           draw only from the smallest set of likeliest tokens whose probability reaches top_p; 1: from all
    min_new_tokens  the first tokens of a response, this many, are never stop ids, and end no response
    max_new_tokens  a response of this many tokens is truncated
    stop_ids        tokens that end a response; the stop id belongs to the response
    stop_strings    strings that end a response with the token that completes one; the token belongs to the response
                    whole, with what it may hold behind the string

    Raises ValueError naming the field that is out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": (self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature, self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k, self.top_k >= 0, "at least 0"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_new_tokens": (
                self.min_new_tokens,
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"between 0 and max_new_tokens={self.max_new_tokens}",
            ),
        }
        for field, (value, holds, bounds) in checks.items():
            if not holds:
                raise ValueError(f"{field}={value} must be {bounds}.")


def uniform(seed: int, purpose: str, iteration: int, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """One uniform random number in [0, 1) per (sample id, position), a pure function of the arguments.

    sample_ids, positions  int64, of shapes that broadcast
    Returns float64 of the broadcast shape, on the device of the arguments; bit-equal on every device.
    """
    return counter_bits(seed, purpose, iteration, sample_ids, positions).to(torch.float64) * 2.0**-53


class Draw(NamedTuple):
    """Tokens drawn, one per row, and the distributions that they were drawn from.

    tokens    [n] int64
    logprobs  [n] float64, under the distribution drawn from, after exclusion, temperature, top-k and top-p. Greedy
              sampling reports the log-probability at temperature 1 instead. NaN where there is no distribution (a
              logit is NaN or +inf, or all are -inf); the token is then arbitrary
    scores    [n, vocab] float64, the logits of that distribution; -inf for the tokens that could not be drawn
    """

    tokens: Tensor
    logprobs: Tensor
    scores: Tensor


def sample(logits: Tensor, params: SamplingParams, uniforms: Tensor, new_tokens: Tensor) -> Draw:
    """Draw one token per row by inverting the cumulative distribution in float64.

    logits      [n, vocab] float, of the whole vocabulary
    uniforms    [n] float64 in [0, 1); greedy sampling does not use them
    new_tokens  [n] int64, number of each token in its response, from 0; below `params.min_new_tokens`, stop ids are
                excluded
    """
    scores = logits.to(torch.float64, copy=True)
    if params.min_new_tokens and params.stop_ids:
        stops = torch.tensor(params.stop_ids, device=logits.device)
        early = new_tokens[:, None] < params.min_new_tokens
        scores[:, stops] = scores[:, stops].masked_fill(early, -torch.inf)
    if params.temperature == 0:
        tokens = scores.argmax(-1, keepdim=True)
        logprobs = scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)
        return Draw(tokens[:, 0], logprobs[:, 0], scores)
    if params.temperature != 1:
        scores = scores / params.temperature
    scores = _keep_likeliest(scores, params)
    scores = scores - scores.amax(-1, keepdim=True)
    cumulative = scores.exp().cumsum(-1)
    total = cumulative[:, -1:]
    # u < 1, but u * total may be rounded up to total, which would select no token.
    threshold = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, total.new_zeros(())))
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    tokens = tokens.clamp(max=scores.shape[-1] - 1)  # a NaN threshold gives an index past the last token
    return Draw(tokens[:, 0], (scores.gather(-1, tokens) - total.log())[:, 0], scores)


def _keep_likeliest(scores: Tensor, params: SamplingParams) -> Tensor:
    """Scores [n, vocab] with -inf for the tokens that top-k, and after it top-p, exclude."""
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        likelier = probabilities.cumsum(-1) - probabilities
        left_out = (likelier >= params.top_p).scatter(-1, order, likelier >= params.top_p)
        left_out.scatter_(-1, order[:, :1], False)
        scores = scores.masked_fill(left_out, -torch.inf)
    return scores
