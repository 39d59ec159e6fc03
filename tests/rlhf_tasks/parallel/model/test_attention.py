"""Packed attention and decoding against attention written out by hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch, SharedPrefixes
from prefect_rlhf.rlhf_tasks.parallel.model import attention
from prefect_rlhf.rlhf_tasks.parallel.model.attention import in_one_kernel, kv_index, packed_attention
from tests.tiny_models import packed

CPU = torch.device("cpu")
HEADS, HEAD_DIM, SCALING = 4, 8, 0.3
EVEN, UNEVEN = (0, 0, 1, 1), (0, 1, 1, 1)


def by_hand(query: Tensor, key: Tensor, value: Tensor, kv_map, micro: MicroBatch, window=None) -> Tensor:
    """[1, heads, T, head_dim] -> [1, T, heads, head_dim], one score at a time."""
    outputs = []
    for head, kv in enumerate(kv_map):
        parts = zip(*(micro.per_sample(x) for x in (query[0, head], key[0, kv], value[0, kv])), strict=True)
        rows = []
        for q, k, v in parts:
            for i in range(len(q)):
                first = 0 if window is None else max(0, i - window + 1)
                weights = torch.softmax(k[first : i + 1] @ q[i] * SCALING, 0)
                rows.append(weights @ v[first : i + 1])
        outputs.append(torch.stack(rows))
    return torch.stack(outputs, dim=1)[None]


def inputs(lengths: tuple[int, ...], kv_heads: int = 2) -> tuple[MicroBatch, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    micro = packed([torch.zeros(length, dtype=torch.int64) for length in lengths])
    shapes = [(1, heads, micro.tokens, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return micro, query, key, value


def module_with(kv_map: tuple[int, ...], device: torch.device = CPU, layer: int = 5) -> nn.Module:
    module = nn.Module()
    module.kv_index, module.layer_idx = kv_index(kv_map, device), layer
    return module


def test_equal_groups_need_no_index():
    assert kv_index((0, 1, 2), CPU) is None
    assert kv_index(EVEN, CPU) is None
    index = kv_index(UNEVEN, CPU)
    assert index is not None
    assert index.tolist() == [0, 1, 1, 1]
    assert kv_index((0, 0, 0, 1), CPU) is not None


@pytest.mark.parametrize("kv_map", [EVEN, UNEVEN])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_packed_attention(kv_map: tuple[int, ...], window: int | None):
    micro, query, key, value = inputs((6, 1, 3))
    kwargs = {"scaling": SCALING, "micro": micro, "sliding_window": window}
    ours, _ = packed_attention(module_with(kv_map), query, key, value, None, **kwargs)
    theirs = by_hand(query, key, value, kv_map, micro, window)
    torch.testing.assert_close(ours, theirs)
    weight = torch.linspace(-1, 1, ours.numel()).view_as(ours)
    gradients = [torch.autograd.grad((o * weight).sum(), (query, key, value)) for o in (ours, theirs)]
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected)


def test_short_sequences_in_bfloat16_are_rounded_once_where_the_kernel_would_convert(monkeypatch):
    """Sequences of more tokens than `LONGEST_IN_FLOAT32` are left to the kernel, if it multiplies bfloat16 at all."""
    monkeypatch.setattr(attention, "_converts", lambda query: query.dtype == torch.bfloat16)
    monkeypatch.setattr(attention, "widens", lambda *_: False)
    micro, query, key, value = inputs((60, 60, 41))
    half = [x.detach().to(torch.bfloat16) for x in (query, key, value)]
    kwargs = {"scaling": SCALING, "micro": micro, "sliding_window": None}
    run = lambda tensors: packed_attention(module_with(EVEN), *tensors, None, **kwargs)[0]  # noqa: E731
    once = run([x.float() for x in half]).to(torch.bfloat16)
    assert torch.equal(run(half), once)
    monkeypatch.setattr(attention, "LONGEST_IN_FLOAT32", 50)
    theirs, ours = run(half).split((120, 41), dim=1)
    assert torch.equal(ours, once[:, 120:])
    assert not torch.equal(theirs, once[:, :120])
    monkeypatch.setattr(attention, "widens", lambda *_: True)
    assert torch.equal(run(half), once)


class ListCache:
    """Keys and values of every sequence as Python lists of rows; nothing of the product's cache."""

    def __init__(self, n: int) -> None:
        self.continues = False
        self.layers: set[int] = set()
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(n)]
        self.lengths: tuple[int, ...] = (1,) * n

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.layers.add(layer)
        owners = [i for i, length in enumerate(self.lengths) for _ in range(length)]
        for owner, key, value in zip(owners, keys, values, strict=True):
            self.rows[owner].append((key, value))

    def read(self, layer: int, window: int | None) -> list[tuple[Tensor, Tensor, Tensor]]:
        longest = max(map(len, self.rows))
        kv_heads, head_dim = self.rows[0][0][0].shape
        dtype = self.rows[0][0][0].dtype
        keys, values = torch.full((2, len(self.rows), kv_heads, longest, head_dim), 1e3, dtype=dtype)
        mask = torch.zeros(len(self.rows), 1, 1, longest, dtype=torch.bool)
        for i, rows in enumerate(self.rows):
            for j, (key, value) in enumerate(rows):
                keys[i, :, j], values[i, :, j] = key, value
                mask[i, 0, 0, j] = window is None or j > len(rows) - 1 - window
        return [(keys[:1], values[:1], mask[:1]), (keys[1:], values[1:], mask[1:])]


@pytest.mark.parametrize("kv_map", [EVEN, UNEVEN])
@pytest.mark.parametrize("window", [None, 3])
def test_prefill_and_decoding_equal_packed_attention(kv_map: tuple[int, ...], window: int | None):
    prompts, decoded = (4, 2), 3
    micro, query, key, value = (x.detach() if isinstance(x, Tensor) else x for x in inputs((7, 5)))
    expected = by_hand(query, key, value, kv_map, micro, window)
    module, cache = module_with(kv_map), ListCache(2)

    def step(tokens: list[int], lengths: tuple[int, ...]) -> Tensor:
        cache.lengths = lengths
        part = packed([torch.zeros(length, dtype=torch.int64) for length in lengths])
        q, k, v = (x[:, :, tokens] for x in (query, key, value))
        kwargs = {"scaling": SCALING, "micro": part, "cache": cache, "sliding_window": window}
        output, _ = packed_attention(module, q, k, v, None, **kwargs)
        return output

    starts = (0, 7)
    first = [start + i for start, length in zip(starts, prompts, strict=True) for i in range(length)]
    torch.testing.assert_close(step(first, prompts), expected[:, first])
    cache.continues = True
    for i in range(decoded):
        at = [start + length + i for start, length in zip(starts, prompts, strict=True)]
        torch.testing.assert_close(step(at, (1, 1)), expected[:, at])
    assert cache.layers == {5}


@pytest.mark.parametrize(("kv_heads", "once"), [(HEADS, True), (HEADS // 2, False)])
def test_one_query_in_bfloat16_is_rounded_once_where_the_kernel_would_convert(
    monkeypatch, kv_heads: int, once: bool
):
    """Two query heads of a KV head are two rows of one query, which are left to the kernel."""
    monkeypatch.setattr(attention, "_converts", lambda query: query.dtype == torch.bfloat16)
    module, n = module_with(tuple(head * kv_heads // HEADS for head in range(HEADS))), 60

    def decoded(dtype: torch.dtype) -> Tensor:
        micro, *tokens = inputs((1,) * n, kv_heads)
        cache = ListCache(n)
        for cache.continues in (False, True):
            part = [x.detach().to(torch.bfloat16).to(dtype).roll(int(cache.continues), 2) for x in tokens]
            output, _ = packed_attention(module, *part, None, scaling=SCALING, micro=micro, cache=cache)
        return output.to(torch.bfloat16)

    assert torch.equal(decoded(torch.bfloat16), decoded(torch.float32)) == once


def sharing(lengths: tuple[int, ...]) -> tuple[MicroBatch, Tensor, Tensor, Tensor]:
    """Sequences that share first tokens; queries, keys and values of the tokens that are computed."""
    begins = (0, *[min(lengths) - 1] * (len(lengths) - 1))
    micro, *computed = inputs(lengths)
    micro = replace(micro, shared=SharedPrefixes.of(begins, lengths, CPU))
    return micro, *(x.detach()[:, :, micro.shared.computed].requires_grad_() for x in computed)


@pytest.mark.parametrize("kv_map", [EVEN, UNEVEN])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("lengths", [(9, 6, 6, 10), (5, 5)])
def test_attention_to_shared_tokens(kv_map: tuple[int, ...], window: int | None, lengths: tuple[int, ...]):
    micro, *computed = sharing(lengths)
    kwargs = {"scaling": SCALING, "micro": micro, "sliding_window": window}
    ours, _ = packed_attention(module_with(kv_map), *computed, None, **kwargs)
    whole = [micro.shared.whole(x, 2) for x in computed]
    theirs = by_hand(*whole, kv_map, micro, window)[:, micro.shared.computed]
    torch.testing.assert_close(ours, theirs)
    weight = torch.linspace(-1, 1, ours.numel()).view_as(ours)
    gradients = [torch.autograd.grad((o * weight).sum(), computed) for o in (ours, theirs)]
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_attention_to_shared_tokens_on_cuda(window: int | None):
    device = torch.device("cuda")
    micro, *computed = sharing((60, 41, 33))
    theirs = by_hand(*(micro.shared.whole(x, 2) for x in computed), EVEN, micro, window)
    theirs = theirs[:, micro.shared.computed]
    shared = SharedPrefixes.of(micro.shared.begins, micro.lengths, device)
    micro = replace(micro, cu_seqlens=micro.cu_seqlens.to(device), shared=shared)
    wide = [x.detach().to(device, torch.bfloat16).requires_grad_() for x in computed]
    kwargs = {"scaling": SCALING, "micro": micro, "sliding_window": window}
    ours, _ = packed_attention(module_with(EVEN, device), *wide, None, **kwargs)
    torch.testing.assert_close(ours.cpu().float(), theirs, rtol=0.05, atol=0.05)
    ours.float().square().sum().backward()
    theirs.square().sum().backward()
    for mine, expected in zip(wide, computed, strict=True):
        torch.testing.assert_close(mine.grad.cpu().float(), expected.grad, rtol=0.1, atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_map", [EVEN, UNEVEN])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_on_cuda(kv_map: tuple[int, ...], window: int | None):
    device = torch.device("cuda")
    micro, query, key, value = inputs((60, 1, 33))
    micro = MicroBatch(
        *(x.to(device) for x in (micro.input_ids, micro.cu_seqlens, micro.position_ids)),
        micro.ids,
        micro.lengths,
        {},
    )
    theirs = by_hand(query, key, value, kv_map, micro, window)
    wide = [x.detach().to(device, torch.bfloat16).requires_grad_() for x in (query, key, value)]
    kwargs = {"scaling": SCALING, "micro": micro, "sliding_window": window}
    ours, _ = packed_attention(module_with(kv_map, device), *wide, None, **kwargs)
    torch.testing.assert_close(ours.cpu().float(), theirs, rtol=0.05, atol=0.05)
    ours.float().square().sum().backward()
    theirs.square().sum().backward()
    for mine, expected in zip(wide, (query, key, value), strict=True):
        torch.testing.assert_close(mine.grad.cpu().float(), expected.grad, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "fits"),
    [
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.bfloat16, 12, False),
        ("cuda", torch.bfloat16, 320, False),
        ("cuda", torch.float32, 64, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_one_kernel_is_for_16_bits_on_gpus_and_heads_that_it_can_read(device, dtype, head_dim, fits):
    assert in_one_kernel(torch.device(device), dtype, head_dim) == fits
