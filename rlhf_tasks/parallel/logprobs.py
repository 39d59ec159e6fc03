"""Log-probabilities and entropies of tokens from vocabulary-parallel logits, never gathered over tp.

Each tp rank holds the logits of its interval of the vocabulary. Only [T] vectors cross the tp group: the
maximum and the sums below it (as in Megatron-LM, arXiv:1909.08053, section 3).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_tasks.parallel.groups import all_reduce
from rlhf_tasks.parallel.micro_batch import MicroBatch

CHUNK_ELEMENTS = 1 << 20  # of float32 temporaries: 4 MiB each, whatever the number of tokens
LEFT_OUT = -1e30  # logit of a token that cannot be drawn: exp gives 0, and no inf - inf a NaN


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The part of the vocabulary on this rank.

    start  first token id of this rank's logits
    group  the tp group, None for one rank
    """

    start: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that top-k and top-p kept where a response's tokens were drawn, as `generate` records them.

    counts  [T] int32: how many tokens there were to draw this one from; 0 where nothing was drawn
    tokens  [sum(counts)] int32: their ids, one place after the other
    """

    counts: Tensor
    tokens: Tensor

    @staticmethod
    def of(micro: MicroBatch) -> "Kept | None":
        """What a micro-batch carries under `kept_counts` and `kept_tokens`, None where it does not."""
        if "kept_counts" not in micro.data:
            return None
        return Kept(micro.data["kept_counts"], micro.data["kept_tokens"])

    def allowed(self, start: int, width: int) -> Tensor:
        """[T, width] bool for `width` token ids from `start` on: row p, as in logits, is about token p + 1.

        Every token is allowed where nothing was drawn.
        """
        counts = self.counts.long()
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts) - 1
        columns = self.tokens.long() - start
        here = (columns >= 0) & (columns < width)
        allowed = (counts.roll(-1) == 0)[:, None].repeat(1, width)
        allowed[rows[here], columns[here]] = True
        return allowed


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
    temperature: float = 1.0,
    allowed: Tensor | None = None,
) -> Tensor:
    """log softmax(logits / temperature)[t, targets[t]]; differentiable in the logits.

    logits   [T, V_local] this rank's slice of the vocabulary; targets [T] int64 ids of the whole vocabulary
    allowed  [T, V_local] bool: the softmax is over these tokens only; default: over all
    Returns [T], float32 (float64 for float64 logits), equal on all tp ranks.
    A cross entropy is minus this. All ranks of the tp group must call it together.
    """
    return _TokenStatistics.apply(logits, targets, shard, temperature, allowed, False)[0]  # type: ignore[index]


def token_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
    temperature: float = 1.0,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `token_logprobs`, with each distribution's entropy in nats [T]; differentiable too."""
    return _TokenStatistics.apply(logits, targets, shard, temperature, allowed, True)  # type: ignore[return-value]


def packed_logprobs(logits: Tensor, micro: MicroBatch, shard: VocabShard, temperature: float = 1.0) -> Tensor:
    """[T]: at p, the log-probability of token p given the tokens before it; 0 at each sample's first token.

    logits [T, V_local]: row p is the prediction for token p + 1 of the same sample. Where the micro-batch says
    which tokens sampling kept (see `Kept`), the probability is that among them.
    """
    allowed = _allowed(logits, micro, shard)
    return _shift(token_logprobs(logits, _next_tokens(micro), shard, temperature, allowed), micro)


def packed_logprobs_and_entropy(
    logits: Tensor, micro: MicroBatch, shard: VocabShard, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As `packed_logprobs`, with the entropy [T] of the distribution that token p was drawn from."""
    allowed = _allowed(logits, micro, shard)
    logprobs, entropy = token_logprobs_and_entropy(logits, _next_tokens(micro), shard, temperature, allowed)
    return _shift(logprobs, micro), _shift(entropy, micro)


def _allowed(logits: Tensor, micro: MicroBatch, shard: VocabShard) -> Tensor | None:
    kept = Kept.of(micro)
    return None if kept is None else kept.allowed(shard.start, logits.shape[1])


def _next_tokens(micro: MicroBatch) -> Tensor:
    """The token after each position. What stands after a sample's last token is never used (see _shift)."""
    return micro.input_ids.roll(-1)


def _shift(rows: Tensor, micro: MicroBatch) -> Tensor:
    """Move each row one position later, with 0 at the first position of each sample."""
    return torch.where(micro.position_ids == 0, 0.0, rows.roll(1))


class _TokenStatistics(torch.autograd.Function):
    """(log-probability of the target, entropy) per row. With x the scaled logits and p their softmax:

    d logprob / dx_v = [v = target] - p_v        d entropy / dx_v = -p_v (log p_v + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        allowed: Tensor | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        columns = targets - shard.start
        here = (columns >= 0) & (columns < logits.shape[1])
        columns = torch.where(here, columns, 0)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        tokens = logits.shape[0]
        maximum = torch.empty(tokens, dtype=dtype, device=logits.device)
        # With x the distance to the maximum: sum of exp(x), of exp(x) x, and the target's logit itself.
        sums = torch.zeros(3, tokens, dtype=dtype, device=logits.device)
        for rows in _chunks(logits):
            x = logits[rows].to(dtype) / temperature
            if allowed is not None:
                x.masked_fill_(~allowed[rows], LEFT_OUT)
            maximum[rows] = x.amax(1)
            sums[2, rows] = torch.where(here[rows], x.gather(1, columns[rows, None]).squeeze(1), 0.0)
            x -= maximum[rows, None]
            weights = x.exp()
            sums[0, rows] = weights.sum(1)
            if with_entropy:
                sums[1, rows] = weights.mul_(x).sum(1)
        if shard.group is not None:
            highest = all_reduce(maximum.clone(), shard.group, dist.ReduceOp.MAX)
            step = maximum - highest
            sums[1] += step * sums[0]
            sums[:2] *= step.exp()
            maximum = highest
            all_reduce(sums, shard.group)
        log_sum = sums[0].log()
        logprobs = sums[2] - maximum - log_sum
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, columns, here, maximum, log_sum, entropy, allowed)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        grad_logprobs, grad_entropy = gradients
        logits, columns, here, maximum, log_sum, entropy, allowed = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _chunks(logits):
            log_p = logits[rows].to(maximum.dtype) / ctx.temperature
            if allowed is not None:
                log_p.masked_fill_(~allowed[rows], LEFT_OUT)
            log_p -= maximum[rows, None]
            log_p -= log_sum[rows, None]
            slope = -grad_logprobs[rows, None]
            if ctx.with_entropy:
                slope = slope - grad_entropy[rows, None] * (log_p + entropy[rows, None])
            grad = log_p.exp_().mul_(slope)
            at_target = torch.where(here[rows], grad_logprobs[rows], 0.0)
            grad.scatter_add_(1, columns[rows, None], at_target[:, None])
            result[rows] = grad.div_(ctx.temperature)
        return result, None, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of rows with about CHUNK_ELEMENTS logits each."""
    tokens, vocab = logits.shape
    step = max(1, CHUNK_ELEMENTS // max(1, vocab))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]
