"""Layers that mix the tokens of packed sequences by causal convolutions, and keep a state of fixed size.

A module here takes the place of transformers' own of the same name, with its linear modules, which are split over tp
as others are. The convolution of a channel needs that channel alone, so a rank holds some channels whole.

Where sequences share first tokens (`micro.shared`), linear modules compute these once; what mixes tokens computes
them for every sequence. Rows after those of the sequences are padding.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.model.attention import Cache


class Channels(nn.Module):
    """The weights of a causal convolution of this rank's channels: [channels, 1, kernel]; its biases [channels]."""

    def __init__(self, channels: int, kernel: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, device="meta"))
        self.bias = nn.Parameter(torch.empty(channels, device="meta")) if bias else None


class _Places(NamedTuple):
    """Where rows stand once there is a gap of `reach` rows before each sequence, for what came before it.

    tokens  [T] int64; gaps, ends  [n reach] int64: the gaps, and the last `reach` rows of each sequence
    """

    tokens: Tensor
    gaps: Tensor
    ends: Tensor


@lru_cache(maxsize=8)
def _places(lengths: tuple[int, ...], reach: int, device: torch.device) -> _Places:
    """The same for all layers of a pass."""
    with torch.inference_mode(False):
        sizes, numbers, gap = torch.tensor(lengths), torch.arange(len(lengths)), torch.arange(reach)
        starts = sizes.cumsum(0) - sizes + reach * numbers
        tokens = torch.arange(sum(lengths)) + reach * (numbers.repeat_interleave(sizes) + 1)
        gaps, ends = (starts[:, None] + gap).flatten(), ((starts + sizes)[:, None] + gap).flatten()
        return _Places(tokens.to(device), gaps.to(device), ends.to(device))


def causal_convolution(
    x: Tensor, weights: Tensor, bias: Tensor | None, lengths: tuple[int, ...], before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Each channel's convolution over the last tokens of its own sequence.

    x        [T, channels]: sequences one after the other
    weights  [channels, kernel], the last column of the current token; bias [channels] or None
    lengths  tokens of each of the n sequences
    before   [n, kernel - 1, channels]: what came before the tokens of each; None: nothing, which counts as zeros
    Returns (the same shape as x, of its dtype; the last kernel - 1 inputs of each sequence, as `before`).
    """
    n, reach = len(lengths), weights.shape[1] - 1
    before = x.new_zeros(n, reach, x.shape[1]) if before is None else before.to(x.dtype)
    if all(length == 1 for length in lengths):
        window = torch.cat([before, x[:, None]], 1)
        y = _weighed([window[:, j] for j in range(reach + 1)], weights, bias)
        return y, window[:, 1:]
    places = _places(lengths, reach, x.device)
    gapped = x.new_zeros(len(x) + n * reach, x.shape[1]).index_copy(0, places.tokens, x)
    gapped = gapped.index_copy(0, places.gaps, before.flatten(0, 1))
    rows = len(gapped) - reach
    y = _weighed([gapped[j : j + rows] for j in range(reach + 1)], weights, bias)
    last = gapped.index_select(0, places.ends).view(n, reach, x.shape[1])
    return y.index_select(0, places.tokens - reach), last


def _weighed(shifted: list[Tensor], weights: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of inputs [.., channels] times the columns of the weights, rounded once at its end."""
    dtype = shifted[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    columns = weights.to(wide).unbind(1)
    total = shifted[0] * columns[0]
    for input, column in zip(shifted[1:], columns[1:], strict=True):
        total = torch.addcmul(total, input.to(wide), column)
    return (total if bias is None else total + bias.to(wide)).to(dtype)


def rows_of(x: Tensor, micro: MicroBatch) -> Tensor:
    """The tokens of all sequences, of what a layer computes: x [computed tokens and padding, ...] -> [T, ...]."""
    return x[: micro.tokens] if micro.shared is None else micro.shared.whole(x, 0)


def computed_of(y: Tensor, micro: MicroBatch, rows: int) -> Tensor:
    """The reverse: y [T, ...] -> [rows, ...], shared tokens once, and zeros as padding."""
    y = y if micro.shared is None else micro.shared.once(y, 0)
    return F.pad(y, (0, 0) * (y.ndim - 1) + (0, rows - len(y)))


def states_before(cache: Cache | None, layer: int) -> tuple[Tensor, ...] | None:
    """What a layer has kept of each sequence of the micro-batch; None: nothing yet."""
    return cache.states(layer) if cache is not None and cache.continues else None


class ShortConvolution(nn.Module):
    """LFM2's: of three projections of its input, the product of two is convolved, then multiplied by the third.

    theirs    transformers' module, whose linear modules it takes
    channels  those that this rank holds
    """

    def __init__(self, theirs: Any, channels: int) -> None:
        super().__init__()
        self.layer: int = theirs.layer_idx
        self.in_proj, self.out_proj = theirs.in_proj, theirs.out_proj
        self.conv = Channels(channels, theirs.conv_kernel_size, theirs.bias)

    def forward(
        self, hidden_states: Tensor, micro: MicroBatch, cache: Cache | None = None, **_: Any
    ) -> Tensor:
        """hidden_states [1, rows, hidden] -> the same shape, equal on all ranks."""
        gate, out_gate, x = self.in_proj(hidden_states)[0].chunk(3, -1)
        [before] = states_before(cache, self.layer) or [None]
        weights, bias = self.conv.weight.squeeze(1), self.conv.bias
        mixed, last = causal_convolution(rows_of(gate * x, micro), weights, bias, micro.lengths, before)
        if cache is not None:
            cache.keep_states(self.layer, (last,))
        return self.out_proj((out_gate * computed_of(mixed, micro, len(x)))[None])
