"""The gated delta rule over packed sequences (arXiv:2412.06464), and the layer of Qwen3-Next and Qwen3.5 around it.

A head keeps a matrix S of a sequence, in which a key finds a value. A token first lets S fade by exp(decay), then
corrects what its key finds there towards its own value, by the share beta, and reads with its query:

    S <- exp(decay) S;   S <- S + beta k (v - S^T k)^T;   output = S^T q

Sequences are cut into chunks. Inside a chunk all corrections follow from one triangular system (the paper's section
3.3); only the chunks of a sequence follow each other. Heads are split over tp: a key head with its value heads stays
whole.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.work import DELTA_CHUNK
from prefect_rlhf.rlhf_tasks.parallel.model.attention import Cache
from prefect_rlhf.rlhf_tasks.parallel.model.convolutions import (
    Channels,
    causal_convolution,
    computed_of,
    rows_of,
    states_before,
)

SMALLEST_CHUNK = 8
EPS = 1e-6  # added to the squared length of queries and keys, as in transformers


class Chunks(NamedTuple):
    """Where the tokens of some sequences are once these are cut into chunks of `size` tokens.

    The longest sequences come first, and the first chunks of all of them before the second ones, so that the chunks
    of each step are neighbours.

    places  [T] int64: of each token, among the tokens of all chunks
    steps   number of sequences that have a chunk of each number
    order   [n] int64: the sequences, the longest first; ranks [n] int64: the place of each in this order
    """

    size: int
    places: Tensor
    steps: tuple[int, ...]
    order: Tensor
    ranks: Tensor


@lru_cache(maxsize=8)
def chunks_of(lengths: tuple[int, ...], device: torch.device) -> Chunks:
    """The chunks of sequences; the same for all layers of a pass."""
    size = min(DELTA_CHUNK, max(SMALLEST_CHUNK, 1 << (max(lengths) - 1).bit_length()))
    counts = [-(-length // size) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda sequence: -counts[sequence])
    steps = tuple(sum(count > step for count in counts) for step in range(max(counts)))
    with torch.inference_mode(False):
        ordered = torch.tensor(order)
        ranks = ordered.argsort()
        sizes, first = torch.tensor(lengths), torch.tensor([0, *steps]).cumsum(0)
        starts = sizes.cumsum(0) - sizes
        position = torch.arange(sum(lengths)) - starts.repeat_interleave(sizes)
        row = first[position // size] + ranks.repeat_interleave(sizes)
        places = row * size + position % size
        return Chunks(size, places.to(device), steps, ordered.to(device), ranks.to(device))


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: tuple[int, ...],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What each token reads, and the state after each sequence. Computed in float32 or wider.

    query, key   [T, heads, key_dim]: sequences one after the other; they are scaled to length 1 here
    value        [T, value heads, value_dim]; value heads are a multiple of heads, neighbours have the same key
    decay, beta  [T, value heads]: the logarithm of what stays of the state; the share of a correction
    lengths      tokens of each of the n sequences
    state        [n, value heads, key_dim, value_dim] before the first tokens; None: zero
    Returns ([T, value heads, value_dim] of the dtype of `value`, [n, value heads, key_dim, value_dim]).
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    group = value.shape[1] // key.shape[1]
    query, key = (_unit(x.to(wide)).repeat_interleave(group, 1) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    rows = (query, key, value.to(wide), decay.to(wide), beta.to(wide))
    if state is None:
        state = rows[2].new_zeros(len(lengths), value.shape[1], key.shape[-1], value.shape[-1])
    step = _one_token if all(length == 1 for length in lengths) else _in_chunks
    output, state = step(*rows, lengths, state.to(wide))
    return output.to(value.dtype), state


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, _: Any, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence, by the definition."""
    state = state * decay.exp()[..., None, None]
    present = (key[:, :, None] @ state).squeeze(2)
    state = state + key[..., None] * (beta[..., None] * (value - present))[:, :, None]
    return (query[:, :, None] @ state).squeeze(2), state


def _in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: tuple[int, ...],
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    chunks = chunks_of(lengths, value.device)
    size, number = chunks.size, sum(chunks.steps)

    def cut(x: Tensor) -> Tensor:
        """[T, heads, ...] -> [chunks, heads, size, ...]; rows after a sequence are zeros, which change no state."""
        placed = x.new_zeros(number * size, *x.shape[1:]).index_copy(0, chunks.places, x)
        return placed.unflatten(0, (number, size)).transpose(1, 2)

    query, key, value, faded, share = (cut(x) for x in (query, key, value, decay, beta))
    faded = faded.cumsum(-1)  # since the chunk began
    later = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    between = (faded[..., :, None] - faded[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighed = key * share[..., None]
    system = (weighed @ key.transpose(-1, -2)) * between
    wanted = torch.cat([value * share[..., None], weighed * faded.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    new, of_state = solved.split([value.shape[-1], key.shape[-1]], -1)
    inside = (query @ key.transpose(-1, -2)) * between
    reading = query * faded.exp()[..., None]
    writing = (key * (faded[..., -1:] - faded).exp()[..., None]).transpose(-1, -2)
    stays = faded[..., -1].exp()[..., None, None]

    state = state.index_select(0, chunks.order)
    outputs, ended = list[Tensor](), list[Tensor]()
    parts = (each.split(chunks.steps) for each in (new, of_state, inside, reading, writing, stays))
    for of_step, going_on in zip(zip(*parts, strict=True), [*chunks.steps[1:], 0], strict=True):
        values, of_before, scores, reads, writes, fade = of_step
        corrections = values - of_before @ state
        outputs.append(reads @ state + scores @ corrections)
        state, last = (state * fade + writes @ corrections).split([going_on, len(state) - going_on])
        ended.append(last)
    output = torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.places)
    return output, torch.cat(ended[::-1]).index_select(0, chunks.ranks)


class GatedNorm(nn.Module):
    """A root mean square norm inside heads, multiplied by an activated gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device="meta"))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., size] -> the same shape, of the dtype of x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(wide), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight
        return (normed * F.silu(gate.to(wide))).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """A layer's block in place of attention: projections, a short convolution, the gated delta rule, a gated norm.

    theirs  transformers' module, whose linear modules it takes. Qwen3-Next has two, whose outputs are sorted by key
            heads; Qwen3.5 has four
    heads   key heads of this rank
    """

    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module
    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module
    out_proj: nn.Module

    def __init__(self, theirs: Any, heads: int) -> None:
        super().__init__()
        self.layer: int = theirs.layer_idx
        self.group: int = theirs.num_v_heads // theirs.num_k_heads
        self.key_dim: int = theirs.head_k_dim
        self.value_dim: int = theirs.head_v_dim
        self.activation = ACT2FN[theirs.activation]
        for name, child in theirs.named_children():
            if isinstance(child, nn.Linear):
                self.add_module(name, child)
        keys, values = heads * self.key_dim, heads * self.group * self.value_dim
        parts = {"query": keys, "key": keys, "value": values}
        self.conv1d = nn.ModuleDict(
            {name: Channels(size, theirs.conv_kernel_size) for name, size in parts.items()}
        )
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.empty(heads * self.group, device="meta")) for _ in range(2)
        )
        self.norm = GatedNorm(self.value_dim, theirs.layer_norm_epsilon)

    def forward(
        self, hidden_states: Tensor, micro: MicroBatch, cache: Cache | None = None, **_: Any
    ) -> Tensor:
        """hidden_states [1, rows, hidden] -> the same shape, equal on all ranks."""
        mixed, gate, beta, step = self._project(hidden_states[0])
        conv_state, state = states_before(cache, self.layer) or (None, None)
        weights = torch.cat([part.weight for part in self._kernels]).squeeze(1)
        mixed, last = causal_convolution(rows_of(mixed, micro), weights, None, micro.lengths, conv_state)
        query, key, value = self._heads(self.activation(mixed))
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        decay = -self.A_log.to(wide).exp() * F.softplus(step.to(wide) + self.dt_bias)
        decay, beta = rows_of(decay, micro), rows_of(beta.sigmoid(), micro)
        output, state = gated_delta_rule(query, key, value, decay, beta, micro.lengths, state)
        if cache is not None:
            cache.keep_states(self.layer, (last, state))
        normed = self.norm(computed_of(output, micro, hidden_states.shape[1]), gate)
        return self.out_proj(normed.flatten(1)[None])

    @property
    def _kernels(self) -> list[Channels]:
        """Of query, key and value heads."""
        return [part for part in self.conv1d.values() if isinstance(part, Channels)]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [rows, hidden] -> what is convolved: query, key and value heads one after the other [rows, channels]; the
        gate of the output [rows, value heads, value_dim]; before their activations, beta and the steps of the decay
        [rows, value heads]."""
        if hasattr(self, "in_proj_qkv"):
            gate = self.in_proj_z(x).unflatten(-1, (-1, self.value_dim))
            return self.in_proj_qkv(x), gate, self.in_proj_b(x), self.in_proj_a(x)
        values = self.group * self.value_dim
        sizes = (self.key_dim, self.key_dim, values, values)
        *qkv, gate = self.in_proj_qkvz(x).unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        beta, step = self.in_proj_ba(x).unflatten(-1, (-1, 2 * self.group)).chunk(2, -1)
        mixed = torch.cat([part.flatten(1) for part in qkv], -1)
        return mixed, gate.reshape(len(x), -1, self.value_dim), beta.flatten(1), step.flatten(1)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The reverse of the first: query and key [T, heads, key_dim], value [T, value heads, value_dim]."""
        sizes = [len(part.weight) for part in self._kernels]
        query, key, value = mixed.split(sizes, -1)
        return (
            query.unflatten(-1, (-1, self.key_dim)),
            key.unflatten(-1, (-1, self.key_dim)),
            value.unflatten(-1, (-1, self.value_dim)),
        )
