from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from prefect_rlhf.planner.pricing.terms import LOGPROB_BYTES
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import micro_batch, predicting
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import split
from prefect_rlhf.rlhf_tasks.parallel.model import logprobs as module
from prefect_rlhf.rlhf_tasks.parallel.model.logprobs import (
    KeptTokens,
    Vocabulary,
    packed_logprobs,
    packed_logprobs_and_entropy,
    token_logprobs,
)

TOKENS, VOCAB = 37, 11
WHOLE = Vocabulary((VOCAB,))


def _logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(VOCAB, (TOKENS,), generator=generator)


def _plain(
    logits: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies by torch's own log_softmax."""
    log_p = (logits / temperature).log_softmax(1)
    if allowed is not None:
        log_p = (log_p + torch.where(allowed, 0.0, -1e9)).log_softmax(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def _allowed(targets: Tensor) -> Tensor:
    """About a third of the vocabulary for each row, or all but a third, its target included; one row allows its
    target alone, one all."""
    allowed = torch.rand(TOKENS, VOCAB, generator=torch.Generator().manual_seed(3)) < 0.3
    allowed[::3] = ~allowed[::3]
    allowed[5], allowed[7] = False, True
    return allowed | (torch.arange(VOCAB) == targets[:, None])


def _kept(allowed: Tensor) -> KeptTokens:
    """The same as `generate` records it."""
    counts, ids = zip(*KeptTokens.listed(allowed, WHOLE), strict=True)
    assert {count > 0 for count in counts} == {True, False}, "both what could be drawn and what could not"
    return KeptTokens(torch.tensor(counts, dtype=torch.int32), torch.cat(ids))


def _recorded(allowed: Tensor, drawn: Tensor, lengths: tuple[int, ...]) -> dict[str, Packed]:
    """The keys of the samples with these lengths.

    drawn  [T] bool: tokens of which it is recorded what else could be drawn
    """
    none = torch.zeros(0, dtype=torch.int32)
    rows = KeptTokens.listed(allowed, WHOLE)
    kept = [row if is_drawn else (0, none) for row, is_drawn in zip(rows, drawn, strict=True)]
    ends = list(accumulate(lengths, initial=0))
    return {
        "kept_counts": Packed(torch.tensor([count for count, _ in kept]), lengths),
        "kept_tokens": Packed.of([torch.cat([ids for _, ids in kept[a:b]]) for a, b in pairwise(ends)]),
    }


@pytest.mark.parametrize("tokens", [None, 9])
def test_of_what_could_be_drawn_and_what_could_not_the_shorter_list_is_recorded(tokens: int | None) -> None:
    """Tokens that do not count are in neither."""
    kept = torch.ones(4, VOCAB, dtype=torch.bool)
    kept[:, tokens or VOCAB :] = False
    kept[0, [2, 5]] = False
    kept[1, 2:] = False
    kept[2, 1:] = False
    found = KeptTokens.listed(kept, Vocabulary((VOCAB,), tokens=tokens))
    assert [(count, ids.tolist()) for count, ids in found] == [(-2, [2, 5]), (2, [0, 1]), (1, [0]), (0, [])]


def _weighted(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """A scalar that gives every row another gradient."""
    weights = torch.linspace(-1, 2, TOKENS, dtype=logprobs.dtype)
    return (weights * logprobs).sum() + (weights.flip(0) * entropy).sum()


@pytest.mark.parametrize("chunk", [1 << 20, 4 * VOCAB, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_log_softmax(monkeypatch, chunk: int, temperature: float) -> None:
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", chunk)
    logits, targets = _logits(torch.float64)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = token_logprobs(ours, targets, WHOLE, temperature)
    want = _plain(plain, targets, temperature)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(token_logprobs(logits, targets, WHOLE, temperature, None, False)[0], want[0])
    _weighted(*got).backward()
    _weighted(*want).backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-12, atol=1e-12)
    alone, _ = token_logprobs(ours, targets, WHOLE, temperature, with_entropy=False)
    (mine,) = torch.autograd.grad(alone.sum(), ours)
    (theirs,) = torch.autograd.grad(_plain(plain, targets, temperature)[0].sum(), plain)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1 << 20, 4 * VOCAB, 1])
def test_tokens_that_are_left_out_have_no_share(monkeypatch, chunk: int) -> None:
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", chunk)
    logits, targets = _logits(torch.float64)
    allowed = _allowed(targets)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = token_logprobs(ours, targets, WHOLE, 0.7, _kept(allowed))
    want = _plain(plain, targets, 0.7, allowed)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert got[0][5] == 0
    _weighted(*got).backward()
    _weighted(*want).backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-12, atol=1e-12)
    assert not ours.grad[~allowed].any()


def test_two_float32_copies_of_a_few_rows_are_the_largest_temporaries(monkeypatch) -> None:
    chunk, rows = 1 << 16, 256
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", chunk)
    logits = torch.zeros(rows, 1024, dtype=torch.bfloat16).requires_grad_()
    targets = torch.zeros(rows, dtype=torch.int64)

    def temporary_bytes(run: Callable[[], Any]) -> tuple[Any, int]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            result = run()
        events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = list(accumulate(event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())))
        return result, max(held) - held[-1]

    found, of_forward = temporary_bytes(lambda: token_logprobs(logits, targets, WHOLE, temperature=0.7))
    loss = found[0].sum() + found[1].sum()
    _, of_backward = temporary_bytes(loss.backward)
    for used in (of_forward, of_backward):
        assert chunk * LOGPROB_BYTES <= used < 1.2 * chunk * LOGPROB_BYTES


def test_a_microbatch_that_says_what_was_kept_is_scored_among_it() -> None:
    logits, targets = _logits(torch.float64)
    allowed = _allowed(targets)
    lengths, prompt = (9, TOKENS - 9), 3
    drawn = torch.cat([torch.arange(length) >= prompt for length in lengths])
    batch = SampleBatch((4, 7), {"input_ids": Packed(targets, lengths), **_recorded(allowed, drawn, lengths)})
    micro = micro_batch(batch.reorder([7, 4]))
    order = [*range(9, TOKENS), *range(9)]
    logits = logits[order]
    got, entropy = packed_logprobs_and_entropy(logits, micro, WHOLE, 0.7)
    assert torch.equal(packed_logprobs(logits, micro, WHOLE, 0.7), got)
    among = torch.where(drawn[:, None], allowed, True)[order].roll(-1, 0)
    want = _plain(logits, micro.input_ids.roll(-1), 0.7, among)
    inside = micro.position_ids > 0
    torch.testing.assert_close(got[inside], want[0].roll(1)[inside])
    torch.testing.assert_close(entropy[inside], want[1].roll(1)[inside])
    kept_here = KeptTokens.of(micro)
    assert kept_here is not None
    chunks = [slice(0, 9), slice(9, 10), slice(10, TOKENS)]
    for start, width in ((0, 4), (4, VOCAB - 4)):
        masks = list(kept_here.left_out(chunks, start, width))
        assert [len(mask) for mask in masks] == [9, 1, TOKENS - 10]  # never more than a chunk at a time
        assert torch.equal(torch.cat(masks), ~among[:, start : start + width])


@pytest.mark.parametrize("counted", [(2, 3, 5, 9, 12), (0, 4, 9, 10), ()], ids=["some", "firsts", "none"])
def test_rows_of_tokens_that_do_not_count_need_no_logits(counted: tuple[int, ...]) -> None:
    """Also where sampling kept few tokens. A first token has no row, whatever the mask says."""
    logits, targets = _logits(torch.float64)
    allowed = _allowed(targets)
    lengths = (9, TOKENS - 9)
    mask = torch.zeros(TOKENS, dtype=torch.bool).index_fill_(
        0, torch.tensor(counted, dtype=torch.int64), True
    )
    data = {"input_ids": Packed(targets, lengths), "counted": Packed(mask, lengths)}
    of_kept = _recorded(allowed, torch.arange(TOKENS) % 9 > 1, lengths)
    for keys in (data, data | of_kept):
        micro = micro_batch(SampleBatch((0, 1), keys))
        few = predicting(micro, "counted")
        assert few.rows is not None
        assert few.rows.tolist() == [t - 1 for t in counted if t not in (0, 9)]
        got = packed_logprobs_and_entropy(logits[few.rows], few, WHOLE, 0.7)
        whole = packed_logprobs_and_entropy(logits, micro, WHOLE, 0.7)
        torch.testing.assert_close(got, tuple(torch.where(mask, x, 0.0) for x in whole), rtol=1e-12, atol=0)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits, targets = _logits(torch.bfloat16)
    got, _ = token_logprobs(logits, targets, WHOLE)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, _plain(logits.float(), targets, 1.0)[0], rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 1e4]])
    assert token_logprobs(logits, torch.tensor([0]), Vocabulary((3,)))[0].item() == pytest.approx(-0.6931472)


def test_packed_logprobs_stand_at_their_own_token_and_are_zero_at_the_first() -> None:
    lengths = (5, 1, TOKENS - 6)
    logits, targets = _logits(torch.float64)
    batch = SampleBatch((0, 1, 2), {"input_ids": Packed(targets, lengths)})
    micro = micro_batch(batch)
    got, entropy = packed_logprobs_and_entropy(logits, micro, WHOLE)
    assert torch.equal(packed_logprobs(logits, micro, WHOLE), got)
    log_p = logits.log_softmax(1)
    start = 0
    for length in lengths:
        assert got[start] == 0
        assert entropy[start] == 0
        for p in range(start + 1, start + length):
            assert got[p].item() == pytest.approx(log_p[p - 1, targets[p]].item(), abs=1e-12)
            plain = -(log_p[p - 1].exp() * log_p[p - 1]).sum().item()
            assert entropy[p].item() == pytest.approx(plain, abs=1e-12)
        start += length


def test_the_last_row_of_each_sample_gets_no_gradient() -> None:
    logits, targets = _logits(torch.float64)
    micro = micro_batch(SampleBatch((0, 1), {"input_ids": Packed(targets, (4, TOKENS - 4))}))
    logits.requires_grad_()
    packed_logprobs(logits, micro, WHOLE).sum().backward()
    used = logits.grad.abs().sum(1) > 0
    assert used.nonzero().flatten().tolist() == [t for t in range(TOKENS) if t not in (3, TOKENS - 1)]


def _sharded(
    rank: int, world: int, temperature: float, some: bool, tokens: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    logits, targets = _logits(torch.float64)
    targets = targets.clamp(max=(tokens or VOCAB) - 1)
    parts = [split(VOCAB, world, part) for part in range(world)]
    mine = logits[:, slice(*parts[rank])].clone().requires_grad_()
    logprobs, entropy = token_logprobs(
        mine,
        targets,
        Vocabulary(tuple(part.size for part in parts), rank, dist.group.WORLD, tuple(range(world)), tokens),
        temperature,
        _kept(_allowed(targets)) if some else None,
    )
    _weighted(logprobs, entropy).backward()
    return logprobs.detach(), entropy.detach(), mine.grad


@pytest.mark.dist
@pytest.mark.parametrize(
    ("some", "tokens"), [(False, None), (True, None), (False, 7)], ids=["all tokens", "some tokens", "padded"]
)
@pytest.mark.parametrize("world", [2, 3])
def test_shards_of_the_vocabulary_equal_the_whole(ranks, world: int, some: bool, tokens: int | None) -> None:
    logits, targets = _logits(torch.float64)
    targets = targets.clamp(max=(tokens or VOCAB) - 1)
    logits.requires_grad_()
    allowed = _allowed(targets) if some else (torch.arange(VOCAB) < (tokens or VOCAB)).expand(TOKENS, -1)
    want = _plain(logits, targets, 0.7, allowed)
    _weighted(*want).backward()
    results = ranks.run(world, _sharded, 0.7, some, tokens)
    for logprobs, entropy, _ in results:
        torch.testing.assert_close((logprobs, entropy), want, rtol=1e-12, atol=1e-12)
    gradient = torch.cat([grad for _, _, grad in results], 1)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-12, atol=1e-12)
