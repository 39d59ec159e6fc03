"""Log-probabilities and entropies of tokens from vocabulary-parallel logits, which are never gathered over tp.

Each tp rank holds the logits of its interval of the vocabulary. Only [T] vectors are all-reduced over the tp group:
the maximum and the sums of the softmax (as in Megatron-LM, arXiv:1909.08053, section 3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import all_reduce
from prefect_rlhf.rlhf_tasks.parallel.layout.work import LOGITS_AT_ONCE
from prefect_rlhf.rlhf_tasks.parallel.model.context_parallel import ContextRanks

LEFT_OUT = -1e30  # logit of a token that cannot be drawn: exp gives 0, and no NaN arises as from -inf


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Whose part of the vocabulary is where. Each tp rank has an interval; in the order of tp ranks they cover it.

    sizes    tokens of each tp rank's part
    tp_rank  this rank's number
    group    the tp group; None for one rank
    places   the place of each tp rank in the group, whose ranks are in the order of devices
    tokens   the tokens that count are those below: others have no part in a distribution; None: all count
    """

    sizes: tuple[int, ...]
    tp_rank: int = 0
    group: dist.ProcessGroup | None = None
    places: tuple[int, ...] = (0,)
    tokens: int | None = None

    @property
    def start(self) -> int:
        """The first token of this rank's part."""
        return sum(self.sizes[: self.tp_rank])

    def leave_out(self, scores: Tensor, by: float) -> None:
        """Overwrite the scores [n, this rank's part] of the tokens that do not count."""
        if self.tokens is not None:
            scores[:, max(0, self.tokens - self.start) :] = by

    def gather(self, mine: Tensor) -> Tensor:
        """All ranks' tensors of one shape, in the order of the vocabulary: [tp, ...], bit-equal on all of them."""
        if self.group is None:
            return mine[None]
        gathered = [torch.empty_like(mine) for _ in self.sizes]
        dist.all_gather(gathered, mine.contiguous(), group=self.group)
        return torch.stack([gathered[place] for place in self.places])

    def tokens_of(self, chosen: Tensor) -> list[Tensor]:
        """The tokens that all ranks have chosen: for each row their ids [..] int32, ascending, on the CPU.

        chosen  [n, this rank's part] bool
        """
        counts = self.gather(chosen.sum(1)).cpu()  # [tp, n]
        ids = torch.zeros(int(counts.sum(1).max()), dtype=torch.int32, device=chosen.device)
        mine = chosen.nonzero()[:, 1] + self.start
        ids[: len(mine)] = mine
        of_rank = [
            tokens[: int(count.sum())].split(count.tolist())
            for tokens, count in zip(self.gather(ids).cpu(), counts, strict=True)
        ]
        return [torch.cat(of_row) for of_row in zip(*of_rank, strict=True)]


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that could be drawn when a response was sampled: not those that top-k, top-p and `min_new_tokens`
    left out. Of each row the shorter list is recorded. As in logits, row p is about token p + 1.

    counts  [T] int32: n where only the n listed tokens could be drawn, -n where all but the n listed ones could; 0
            where all could, or none was drawn
    tokens  [sum(|counts|)] int32: the listed ids, row after row
    """

    counts: Tensor
    tokens: Tensor

    @staticmethod
    def listed(allowed: Tensor, vocabulary: Vocabulary) -> list[tuple[int, Tensor]]:
        """Of each row its count and its listed ids [..] int32, ascending, on the CPU; equal on all tp ranks.

        allowed  [n, this rank's part of the vocabulary] bool: which tokens could be drawn
        """
        left_out = ~allowed
        vocabulary.leave_out(left_out, False)
        could, could_not = vocabulary.gather(torch.stack([allowed.sum(1), left_out.sum(1)])).sum(0)
        names_others = could_not < could
        ids = vocabulary.tokens_of(torch.where(names_others[:, None], left_out, allowed))
        signs = (1 - 2 * names_others.int()).tolist()
        return [(sign * len(of_row), of_row) for sign, of_row in zip(signs, ids, strict=True)]

    @staticmethod
    def of(micro: MicroBatch) -> "KeptTokens | None":
        """From a micro-batch's keys `kept_counts` and `kept_tokens`; None if `generate` did not record them."""
        if "kept_counts" not in micro.data:
            return None
        counts, tokens = micro.data["kept_counts"], micro.data["kept_tokens"]
        if micro.rows is None:
            # Shift counts from position p + 1 to row p. A sample's first token was not drawn, so no ids change place.
            return KeptTokens(counts.roll(-1), tokens)
        here = torch.zeros_like(counts, dtype=torch.bool).index_fill_(0, micro.rows + 1, True)
        return KeptTokens(counts[micro.rows + 1], tokens[here.repeat_interleave(counts.long().abs())])

    def left_out(self, chunks: Sequence[slice], start: int, width: int) -> Iterator[Tensor]:
        """For each chunk of rows: [rows, width] bool, True for token ids start .. start + width - 1 that could not be
        drawn. A row where all could be, or nothing was drawn, is all False.

        chunks  consecutive slices that cover all rows
        """
        counts = self.counts.long().abs()
        last = torch.tensor([rows.stop - 1 for rows in chunks], dtype=torch.int64, device=counts.device)
        begin = 0
        for rows, end in zip(chunks, counts.cumsum(0)[last].tolist(), strict=True):
            here = counts[rows]
            numbers = torch.arange(len(here), device=here.device)
            numbers = numbers.repeat_interleave(here, output_size=end - begin)
            columns = self.tokens[begin:end].long() - start
            inside = (columns >= 0) & (columns < width)
            only_listed = self.counts[rows] > 0
            left_out = only_listed[:, None].repeat(1, width)
            left_out[numbers[inside], columns[inside]] = ~only_listed[numbers[inside]]
            yield left_out
            begin = end


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary,
    temperature: float = 1.0,
    kept: KeptTokens | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[t, targets[t]], and each distribution's entropy in nats; both are
    differentiable in the logits.

    logits        [T, vocabulary / tp], this rank's slice of the vocabulary
    targets       [T] int64, ids of the whole vocabulary
    kept          the softmax is over these tokens only; None: over all
    with_entropy  False: the entropy is not computed, and what is given for it means nothing
    Returns twice [T] float32 (float64 for float64 logits), equal on all tp ranks. The cross entropy is the negative
    log-probability. Collective over the tp group.
    """
    return _TokenStatistics.apply(logits, targets, vocabulary, temperature, kept, with_entropy)  # type: ignore[return-value]


def packed_logprobs(
    logits: Tensor,
    micro: MicroBatch,
    vocabulary: Vocabulary,
    temperature: float = 1.0,
    context: ContextRanks | None = None,
) -> Tensor:
    """Log-probability of each token given the tokens before it: [T]; 0 at each sample's first token.

    logits  [T, vocabulary / tp]; row p is the prediction for token p + 1 of the same sample. Where only some rows
            passed the head (`micro.rows`), [R, vocabulary / tp]; the result is 0 at the tokens that none predicts
    context  the ranks that divide the tokens; then the logits are of this rank's rows, the result of all
    Where the micro-batch says which tokens could be drawn (see `KeptTokens`), the softmax is over these only.
    """
    here = _here(micro, context)
    kept = KeptTokens.of(here)
    logprobs, _ = token_logprobs(
        logits, _next_tokens(here), vocabulary, temperature, kept, with_entropy=False
    )
    return _shift(logprobs, micro, context)


def packed_logprobs_and_entropy(
    logits: Tensor,
    micro: MicroBatch,
    vocabulary: Vocabulary,
    temperature: float = 1.0,
    context: ContextRanks | None = None,
) -> tuple[Tensor, Tensor]:
    """`packed_logprobs` [T], and the entropy [T] in nats of the distribution that each token was drawn from.

    logits, context  as in `packed_logprobs`
    """
    here = _here(micro, context)
    kept = KeptTokens.of(here)
    logprobs, entropy = token_logprobs(logits, _next_tokens(here), vocabulary, temperature, kept)
    return _shift(logprobs, micro, context), _shift(entropy, micro, context)


def _here(micro: MicroBatch, context: ContextRanks | None) -> MicroBatch:
    """The micro-batch with the rows whose logits are on this rank."""
    return micro if context is None else replace(micro, rows=context.own_rows(micro)[0])


def _next_tokens(micro: MicroBatch) -> Tensor:
    """The token after each row of the logits. With all rows, the entry at a sample's last token is not used."""
    return micro.input_ids.roll(-1) if micro.rows is None else micro.input_ids[micro.rows + 1]


def _shift(rows: Tensor, micro: MicroBatch, context: ContextRanks | None) -> Tensor:
    """Move each row one position later: [T], with 0 where no row comes and at the first position of each sample."""
    if context is not None:
        rows = context.gather_rows(rows, micro)
    if micro.rows is not None:
        return rows.new_zeros(micro.tokens).index_copy(0, micro.rows + 1, rows)
    return torch.where(micro.position_ids == 0, 0.0, rows.roll(1))


class _TokenStatistics(torch.autograd.Function):
    """(log-probability of the target, entropy), both [T]. With x the scaled logits and p their softmax:

    d logprob / dx_v = [v = target] - p_v        d entropy / dx_v = -p_v (log p_v + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocabulary: Vocabulary,
        temperature: float,
        kept: KeptTokens | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        columns = targets - vocabulary.start
        here = (columns >= 0) & (columns < logits.shape[1])
        columns = torch.where(here, columns, 0)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        tokens = logits.shape[0]
        maximum = torch.empty(tokens, dtype=dtype, device=logits.device)
        # With x = logit - maximum: the sum of exp(x), the sum of exp(x) x, and the logit of the target.
        sums = torch.zeros(3, tokens, dtype=dtype, device=logits.device)
        for rows, left_out in _chunks(logits, kept, vocabulary.start):
            x = _scaled(logits[rows], dtype, temperature)
            if left_out is not None:
                x.masked_fill_(left_out, LEFT_OUT)
            vocabulary.leave_out(x, LEFT_OUT)
            maximum[rows] = x.amax(1)
            sums[2, rows] = torch.where(here[rows], x.gather(1, columns[rows, None]).squeeze(1), 0.0)
            x -= maximum[rows, None]
            weights = x.exp()
            sums[0, rows] = weights.sum(1)
            if with_entropy:
                sums[1, rows] = weights.mul_(x).sum(1)
            del x, weights  # else they would stay while the next chunk is copied
        if vocabulary.group is not None:
            highest = all_reduce(maximum.clone(), vocabulary.group, dist.ReduceOp.MAX)
            step = maximum - highest
            sums[1] += step * sums[0]
            sums[:2] *= step.exp()
            maximum = highest
            all_reduce(sums, vocabulary.group)
        log_sum = sums[0].log()
        logprobs = sums[2] - maximum - log_sum
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, columns, here, maximum, log_sum, entropy)
        ctx.temperature, ctx.kept, ctx.vocabulary = temperature, kept, vocabulary
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs no backward pass
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None, None]:
        grad_logprobs, grad_entropy = gradients
        logits, columns, here, maximum, log_sum, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(maximum)
        result = torch.empty_like(logits)
        for rows, left_out in _chunks(logits, ctx.kept, ctx.vocabulary.start):
            log_p = _scaled(logits[rows], maximum.dtype, ctx.temperature)
            if left_out is not None:
                log_p.masked_fill_(left_out, LEFT_OUT)
            ctx.vocabulary.leave_out(log_p, LEFT_OUT)
            log_p -= maximum[rows, None]
            log_p -= log_sum[rows, None]
            slope = -grad_logprobs[rows, None]
            if grad_entropy is not None:
                slope = (log_p + entropy[rows, None]).mul_(-grad_entropy[rows, None]).add_(slope)
            grad = log_p.exp_().mul_(slope)
            at_target = torch.where(here[rows], grad_logprobs[rows], 0.0)
            grad.scatter_add_(1, columns[rows, None], at_target[:, None])
            result[rows] = grad if ctx.temperature == 1 else grad.div_(ctx.temperature)
            del log_p, grad, slope  # as above
        return result, None, None, None, None, None


def _scaled(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """A copy of the logits in `dtype`, divided by the temperature."""
    copied = logits.to(dtype, copy=True)
    return copied if temperature == 1 else copied.div_(temperature)


def _chunks(logits: Tensor, kept: KeptTokens | None, start: int) -> Iterator[tuple[slice, Tensor | None]]:
    """Slices of rows of about LOGITS_AT_ONCE logits each, and masks [rows, vocabulary / tp] of those to leave out.

    A mask is None without `kept`.
    """
    tokens, vocab = logits.shape
    step = max(1, LOGITS_AT_ONCE[logits.device.type] // max(1, vocab))
    chunks = [slice(first, min(first + step, tokens)) for first in range(0, tokens, step)]
    return zip(chunks, repeat(None) if kept is None else kept.left_out(chunks, start, vocab), strict=False)
