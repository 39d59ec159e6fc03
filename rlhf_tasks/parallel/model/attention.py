"""Attention over packed sequences and over a KV cache. The decoder layers call it through transformers'
`AttentionInterface`.

The layers are called with a batch dim of 1 around all tokens of a micro-batch. The micro-batch is passed on as a
keyword argument and says which tokens belong together.
"""

from collections.abc import Iterable
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.model.products import widens

if TYPE_CHECKING:
    from prefect_rlhf.rlhf_tasks.parallel.model.context_parallel import ContextRanks

PACKED = "rlhf_packed"
"""Name under which transformers finds `packed_attention`."""
LONGEST_IN_FLOAT32 = 512
"""Tokens of the longest sequence whose attention a CPU computes in float32 where the model's dtype is bfloat16.

torch's bfloat16 kernel converts where the CPU multiplies no bfloat16 tiles (AMX). Measured on an AMD EPYC (AVX-512,
no AMX), one thread, forward and backward pass, milliseconds in bfloat16 and in float32 with both conversions: 64
sequences of 24 tokens 19.5 and 5.9, 32 of 128 56 and 33, 8 of 256 68 and 59, 16 of 512 400 and 416, 2 of 1,024 138
and 164.
"""

WIDEST_HEAD = 256  # of torch's flash attention

# A varlen_attn without this argument accepts fewer KV heads than query heads anyway.
_GQA = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


class Cache(Protocol):
    """What one generation keeps of its sequences, as layers see it: keys and values of their tokens, or a state of
    fixed size (`states`). `layer` is the layer's number in the model."""

    @property
    def continues(self) -> bool:
        """Whether the new tokens attend to the cache. Then each of the n sequences of the micro-batch has as many new
        tokens t, so T = n * t: while decoding, one."""
        ...

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of the micro-batch's tokens, both [T, KV heads, head_dim].

        They come after rotary embedding; KV heads are those of this rank.
        """
        ...

    def read(self, layer: int, window: int | None) -> Iterable[tuple[Tensor, Tensor, Tensor | None]]:
        """Of some sequences after the other, as they are asked for: keys and values [n, KV heads, S, head_dim] of the
        next n, new tokens included, and the mask bool [n, 1, t, S].

        The mask is True where a new token may attend; None: everywhere. window: the sliding window in tokens.
        """
        ...

    def states(self, layer: int) -> tuple[Tensor, ...] | None:
        """What `keep_states` has kept of each sequence of the micro-batch: tensors [n, ...], zeros of a sequence
        without tokens so far; None: all are without."""
        ...

    def keep_states(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """Keep the states after the micro-batch's tokens, of each sequence: tensors [n, ...]."""
        ...


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    micro: MicroBatch,
    cache: Cache | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a micro-batch.

    Where sequences share first tokens (`micro.shared`), T is C here: the tokens that are computed.

    module          the attention module, with `layer_idx`, `kv_index` (see the function `kv_index`) and, where cp
                    ranks divide the tokens, `context`: then T is this rank's rows; where layers share keys and
                    values, also `keys_of`, the layer whose keys it is given, and `writes_keys`, True for the first of
                    these on a stage
    query           [1, heads, T, head_dim], this rank's heads, after rotary embedding
    key, value      [1, KV heads, T, head_dim], likewise
    scaling         factor on the scores
    cache           keys and values are written to it and, where sequences continue, read from it; None: no cache
    sliding_window  tokens that one may attend to, itself included; None: all before it
    softcap         scores s become softcap * tanh(s / softcap) (Gemma 2); None: they stay as they are
    s_aux           sinks [heads]: of each head, the score of attending to nothing (GPT-OSS); None: there are none
    Returns ([1, T, heads, head_dim], None), as transformers expects of an attention function.
    """
    assert attention_mask is None, "the micro-batch says what attends to what"
    kv_index: Tensor | None = module.kv_index  # pyright: ignore[reportAssignmentType]
    if sliding_window is None:  # Qwen2-MoE's modules know their window, and pass none
        sliding_window = cast(int | None, getattr(module, "sliding_window", None))
    context = cast("ContextRanks | None", getattr(module, "context", None)) if cache is None else None
    size = query.shape[2]
    if context is not None:
        query, key, value = context.to_heads(query, key, value, micro)
        kv_index, s_aux = context.kv_index, None if s_aux is None else s_aux[context.heads]
    if micro.shared is not None:
        assert cache is None, "a cache has all tokens of its sequences"
        key, value = micro.shared.whole(key, 2), micro.shared.whole(value, 2)
    if cache is not None:
        layer = cast(int, getattr(module, "keys_of", module.layer_idx))
        if getattr(module, "writes_keys", True):
            cache.write(layer, *(x[0, :, : micro.tokens].transpose(0, 1) for x in (key, value)))
        if cache.continues:
            t, first, outputs = micro.lengths[0], 0, list[Tensor]()
            for run in cache.read(layer, sliding_window):
                rest, first = first, first + len(run[0]) * t
                outputs.append(_cached(query[:, :, rest:first], *run, kv_index, scaling, softcap, s_aux))
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None
    if kv_index is not None:
        key, value = key.index_select(1, kv_index), value.index_select(1, kv_index)
    in_memory = softcap is not None or s_aux is not None
    alike = query.shape[-1] == value.shape[-1]  # the kernel takes no narrower values
    if alike and not in_memory and in_one_kernel(query.device, query.dtype, query.shape[-1]):
        output = _varlen(query, key, value, micro, scaling, sliding_window)
    else:
        output = _per_sequence(query, key, value, micro, scaling, sliding_window, softcap, s_aux)
    return output if context is None else context.to_tokens(output, micro, size), None


AttentionInterface.register(PACKED, packed_attention)


def in_one_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash attention takes all sequences of a micro-batch at once (`_varlen`)."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and narrow and head_dim % 8 == 0 and head_dim <= WIDEST_HEAD


def kv_index(kv_head_map: tuple[int, ...], device: torch.device) -> Tensor | None:
    """The local KV head of each local query head: [heads] int64; None where all KV heads have equally many.

    The kernels need equal groups. Elsewhere (e.g. 9 query and 3 KV heads split over 2 ranks) the KV heads are
    repeated by this index.

    kv_head_map  as from `Layout.kv_head_map`
    """
    group = len(kv_head_map) // (kv_head_map[-1] + 1)
    if kv_head_map == tuple(i // group for i in range(len(kv_head_map))):
        return None
    return torch.tensor(kv_head_map, device=device)


def _per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    micro: MicroBatch,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """scaled_dot_product_attention on any device and dtype. Shapes as in `packed_attention`; of shared tokens, there
    are keys and values for each of their sequences, queries only once.

    Rows after those of the sequences are padding; their output is 0.

    Neighbours of one length make a batch of one call, without padding. `split` has one backward pass for all parts;
    slices would each fill a gradient of the whole size.
    """
    begins = (0,) * len(micro.lengths) if micro.shared is None else micro.shared.begins
    runs = [(*of_run, len(list(same))) for of_run, same in groupby(zip(begins, micro.lengths, strict=True))]
    queries, keys = [(length - begin) * n for begin, length, n in runs], [length * n for _, length, n in runs]
    padding = query.shape[2] - sum(queries)
    parts = [
        x[0].split([*rows, x.shape[2] - sum(rows)], dim=1)[:-1]
        for x, rows in ((query, queries), (key, keys), (value, keys))
    ]
    outputs = []
    for (begin, length, n), *of_run in zip(runs, *parts, strict=True):
        q, k, v = (x.unflatten(1, (n, -1)).transpose(0, 1) for x in of_run)  # [n, heads, rows, head_dim]
        seen = length if window is None else min(window, length)
        in_memory = softcap is not None or sinks is not None
        causal = not in_memory and seen == length and not begin
        mask = None if causal else _window_mask(begin, length, seen, query.device)
        if in_memory:
            output = _in_memory(q, k, v, mask, scaling, softcap, sinks)
        else:
            if _converts(query) and (length <= LONGEST_IN_FLOAT32 or widens(query.device, query.dtype)):
                q, k, v = q.float(), k.float(), v.float()
            output = F.scaled_dot_product_attention(
                *(q, k, v), attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True
            ).to(query.dtype)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    if padding:
        outputs.append(outputs[-1].new_zeros(padding, *outputs[-1].shape[1:]))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _converts(query: Tensor) -> bool:
    """Whether torch's attention kernel converts what it multiplies: bfloat16 on a CPU without AMX.

    A property of the machine, not a measurement: a resumed run must compute as before.
    """
    return (
        query.device.type == "cpu"
        and query.dtype == torch.bfloat16
        and not torch.cpu._is_amx_tile_supported()
    )


def _in_memory(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped scores or sinks, which no kernel of torch's computes; the scores stand in memory.

    query [n, heads, L, head_dim]; key, value [n, KV heads, S, head_dim]; mask bool, as [n, 1, L, S]; None: all
    sinks [heads]
    Returns [n, heads, L, head_dim].
    """
    n, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(n, kv_heads, heads // kv_heads * length, head_dim)
    scores = (grouped @ key.transpose(2, 3)).reshape(n, heads, length, key.shape[2]) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    wide = torch.promote_types(query.dtype, torch.float32)
    if sinks is not None:
        nothing = sinks[:, None, None].to(scores.dtype).expand(n, heads, length, 1)
        scores = torch.cat([scores, nothing], -1)
    weights = scores.softmax(-1, dtype=wide)[..., : key.shape[2]].to(query.dtype)
    output = weights.reshape(n, kv_heads, heads // kv_heads * length, key.shape[2]) @ value
    return output.reshape(n, heads, length, head_dim)


def _window_mask(begin: int, length: int, window: int, device: torch.device) -> Tensor:
    """Bool [length - begin, length]: a token from `begin` on sees itself and the window - 1 tokens before it."""
    position = torch.arange(length, device=device)
    distance = position[begin:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, micro: MicroBatch, scaling: float, window: int | None
) -> Tensor:
    """All sequences in one flash-attention kernel; CUDA and 16-bit dtypes only. Shapes as in `_per_sequence`.

    The last query of a sequence is at its last key's position, however many queries there are.
    """
    shared, longest = micro.shared, max(micro.lengths)
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        micro.cu_seqlens if shared is None else shared.cu_seqlens,
        micro.cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **_GQA,  # pyright: ignore[reportArgumentType]
    )
    assert isinstance(output, Tensor)
    return output[None]


def _cached(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    kv_index: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """t new tokens of each of n sequences against its cached ones, in which they are included.

    query [1, heads, n * t, head_dim]; keys, values [n, KV heads, S, head_dim]; mask bool [n, 1, t, S] or None
    Returns [1, n * t, heads, head_dim].
    """
    if kv_index is not None:
        keys, values = keys.index_select(1, kv_index), values.index_select(1, kv_index)
    _, heads, tokens, head_dim = query.shape
    n, kv_heads = keys.shape[:2]
    t, group = tokens // n, heads // kv_heads
    # The query heads of a KV head become the rows of one query, so that no KV head is copied.
    of_sequence = query[0].unflatten(1, (n, t)).transpose(0, 1)  # [n, heads, t, head_dim]
    if softcap is not None or sinks is not None:
        output = _in_memory(of_sequence, keys, values, mask, scaling, softcap, sinks)
        return output.transpose(1, 2).reshape(1, tokens, heads, head_dim)
    grouped = of_sequence.reshape(n, kv_heads, group * t, head_dim)
    if mask is not None and t > 1:
        mask = mask.repeat(1, 1, group, 1)
    # Of one row the kernel makes products by vectors: 64 sequences, 8 heads of 64, on an AMD EPYC without AMX, of 96
    # keys 5.1 ms and in float32 2.3, of 512 31 and 13. From two rows on it is as fast as float32, or faster.
    if group * t == 1 and _converts(query):
        grouped, keys, values = grouped.float(), keys.float(), values.float()
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    output = output.to(query.dtype)
    return output.reshape(n, heads, t, -1).transpose(1, 2).reshape(1, tokens, heads, -1)
