"""The KV cache: keys and values of the tokens so far, in static memory.

A sequence that is decoded has a row. Its token at position p is in column p:

            column   0 1 2 3 4 5 6
    row 0            a b c d e
    row 1            a b            its next token goes to column 2; columns 2 .. 4 are hidden by a mask

The memory of a layer is allocated when its first keys are written, which show how many KV heads a tensor parallel
rank holds and how large they are.

A layer without attention keeps states instead: tensors of fixed size for each row. They move with their rows, and
are zero when a sequence enters.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.work import runs_of


class Piece(NamedTuple):
    """Positions first .. stop - 1 of the sequence in a row."""

    row: int
    first: int
    stop: int


class KVCache:
    """The cache of some sequences on one pipeline stage.

    slots          most sequences at a time
    columns        most tokens of a sequence
    span_multiple  reads end at a multiple of this many columns. If it is 1, rows are read in runs of similar length,
                   so few unneeded columns are read. If it is more, all rows are read at once, so few shapes occur;
                   each shape needs a CUDA graph

    rows       number of sequences in the cache; they are in rows 0 .. rows - 1
    continues  whether the new tokens attend to tokens of the cache; else only to each other

    Before each micro-batch, either `fill` names the pieces of sequences that it holds, or `advance` opens a column
    for one new token of every row. The columns of the new tokens are in a device tensor, so that a captured CUDA
    graph reads their current values.
    """

    def __init__(self, slots: int, columns: int, device: torch.device, span_multiple: int = 1) -> None:
        self.continues = False
        self._slots = slots
        self._device = device
        self._span_multiple = span_multiple
        self._most = columns
        self._columns = -(-columns // span_multiple) * span_multiple
        self._lengths: list[int] = []  # tokens of each row
        # The column of each row's newest token:
        self._newest = torch.zeros(slots, dtype=torch.int64, device=device)
        self._row_numbers = torch.arange(slots, device=device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [slots, kv heads, columns, head_dim] twice
        self._states: dict[int, tuple[Tensor, ...]] = {}  # [slots, ...] each
        # Of the next micro-batch:
        self._sequences = torch.zeros(0, dtype=torch.int64, device=device)  # row of each sequence
        self._places: tuple[Tensor, Tensor] | None = None  # row and column of each new token
        self._read = [(slice(0), 0)]  # runs of rows, and the columns that are read of them
        # Columns of these rows' new tokens:
        self._attending = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self._masks: dict[int | None, list[Tensor]] = {}

    @property
    def rows(self) -> int:
        return len(self._lengths)

    @property
    def span(self) -> int:
        """Columns that a read returns at most, from 0 on."""
        return self._read[0][1]

    @property
    def positions(self) -> Tensor:
        """Position of each row's newest token: [rows] int64."""
        return self._newest[: self.rows]

    # For attention

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of the micro-batch's tokens, both [T, KV heads, head_dim]."""
        assert self._places is not None, "fill() or advance() comes before the first tokens"
        if layer not in self._layers:
            shape = (self._slots, keys.shape[1], self._columns)
            # Zeros, not empty memory: masked columns still enter the sums with weight 0, and 0 * NaN is NaN.
            self._layers[layer] = (
                _zeros((*shape, keys.shape[2]), keys),
                _zeros((*shape, values.shape[2]), values),
            )
        rows, columns = self._places
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored[rows, :, columns] = new

    def read(self, layer: int, window: int | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """All keys and values of a layer for the sequences of the micro-batch, those of its new tokens included: for
        one run of n rows after the other.

        window  tokens that one may attend to, itself included (sliding-window attention); None: all
        Returns views of keys and values [n, KV heads, S, head_dim], and a bool mask [n, 1, t, S] of the columns to
        which each of the t new tokens of a sequence attends.
        """
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        keys, values = self._layers[layer]
        return [
            (keys[rows, :, :span], values[rows, :, :span], mask)
            for (rows, span), mask in zip(self._read, self._masks[window], strict=True)
        ]

    def _mask(self, window: int | None) -> list[Tensor]:
        masks = []
        columns = torch.arange(self.span, device=self._device)
        sizes = [rows.stop - rows.start for rows, _ in self._read]
        for newest, (_, span) in zip(self._attending[:, :, None].split(sizes), self._read, strict=True):
            mask = columns[:span] <= newest
            if window is not None:
                mask &= columns[:span] > newest - window
            masks.append(mask[:, None])
        return masks

    # For layers without attention

    def states(self, layer: int) -> tuple[Tensor, ...] | None:
        """The states of the micro-batch's sequences: [n, ...] each, zeros of one without tokens; None: all are."""
        stored = self._states.get(layer)
        return stored and tuple(each.index_select(0, self._sequences) for each in stored)

    def keep_states(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """Keep the states of the micro-batch's sequences after its tokens: [n, ...] each."""
        if layer not in self._states:
            self._states[layer] = tuple(state.new_zeros(self._slots, *state.shape[1:]) for state in states)
        for stored, new in zip(self._states[layer], states, strict=True):
            stored.index_copy_(0, self._sequences, new)

    # For the decode loop

    def enter(self, lengths: Sequence[int]) -> None:
        """Give sequences the next rows. Before the next `advance`, `fill` writes their first tokens, this many, or
        `share` copies them."""
        first = self.rows
        self._lengths += lengths
        assert self.rows <= self._slots, f"the cache has {self._slots} slots only"
        self._newest[first : self.rows] = torch.tensor(lengths, device=self._device) - 1
        for stored in (tensor for of_layer in self._states.values() for tensor in of_layer):
            stored[first : self.rows] = 0

    def fill(self, pieces: Sequence[Piece]) -> None:
        """The next micro-batch holds these pieces, in this order.

        They are beginnings of sequences, or one later piece of a single sequence whose beginning is in the cache.
        """
        self.continues = any(piece.first for piece in pieces)
        assert not self.continues or len(pieces) == 1, "later pieces come one by one"
        columns = [torch.arange(piece.first, piece.stop) for piece in pieces]
        rows = [torch.full_like(own, piece.row) for own, piece in zip(columns, pieces, strict=True)]
        self._places = (torch.cat(rows).to(self._device), torch.cat(columns).to(self._device))
        self._sequences = torch.tensor([piece.row for piece in pieces], device=self._device)
        row, _, stop = pieces[0]
        self._attend([(slice(row, row + 1), stop)], self._places[1][None])

    def share(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy what the second row of each pair entered with from the first row, whose sequence begins alike."""
        source, target = torch.tensor(pairs, device=self._device).T
        longest = max(self._lengths[row] for _, row in pairs)
        for stored in (tensor for pair in self._layers.values() for tensor in pair):
            stored[target, :, :longest] = stored[source, :, :longest]
        for stored in (tensor for of_layer in self._states.values() for tensor in of_layer):
            stored[target] = stored[source]

    def advance(self) -> None:
        """Open a column: the next micro-batch holds one new token for every row.

        In a full row the last token is replaced. Only the row of a finished sequence can be full.
        """
        self.continues = True
        rows = self.rows
        self._lengths = [min(length + 1, self._most) for length in self._lengths]
        newest = self._newest[:rows]
        newest.add_(1).clamp_(max=self._most - 1)
        self._places = (self._row_numbers[:rows], newest)
        self._sequences = self._row_numbers[:rows]
        multiple = self._span_multiple
        runs = runs_of(self._lengths) if multiple == 1 else [(slice(0, rows), max(self._lengths))]
        self._attend([(run, -(-span // multiple) * multiple) for run, span in runs], newest[:, None])

    def _attend(self, runs: list[tuple[slice, int]], columns: Tensor) -> None:
        self._read = runs
        self._attending = columns
        self.forget_masks()

    def forget_masks(self) -> None:
        """Compute the masks again at the next read. A captured CUDA graph must contain that computation."""
        self._masks.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order. Only rows that change place are copied."""
        moves = [(source, target) for target, source in enumerate(rows) if source != target]
        if moves:
            source, target = torch.tensor(moves, device=self._device).T
            longest = max(self._lengths[source] for source, _ in moves)
            for stored in (tensor for pair in self._layers.values() for tensor in pair):
                used = stored[:, :, :longest]
                used[target] = used[source]
            for stored in (tensor for of_layer in self._states.values() for tensor in of_layer):
                stored[target] = stored[source]
            self._newest[target] = self._newest[source]
        self._lengths = [self._lengths[row] for row in rows]


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of the dtype and on the device of a tensor.

    On the CPU a page of it is zeroed when it is first used, and so in a cache for long responses most never are.
    """
    size_bytes = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size_bytes:
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def vacate(finished: Sequence[bool], size: int) -> list[int]:
    """The `size` rows to keep when finished ones are removed: the last rows move into the free places.

    finished  one entry per row
    size      at least the number of unfinished rows; if it is more, finished rows stay to fill the batch
    Example: of 5 rows, 0 and 2 finished, size 3 keeps [4, 1, 3]: row 4 moves to place 0 and row 3 to place 2.
    """
    movers = [row for row in range(size, len(finished)) if not finished[row]]
    return [movers.pop() if finished[row] and movers else row for row in range(size)]


Forward = Callable[[Tensor, MicroBatch, KVCache], Tensor]


class DecodeGraphs:
    """CUDA graphs of one stage's decode step, one for each (rows, span of the cache) that occurs: for a small batch,
    launching the kernels one by one takes longer than running them.

    forward  the stage: (x, micro-batch, cache) -> output
    cache    of the decoding sequences; a graph is bound to its memory
    """

    def __init__(self, forward: Forward, cache: KVCache) -> None:
        self._forward = forward
        self._cache = cache
        self._shape: tuple[int, int] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None

    @staticmethod
    def rows_for(remaining: int) -> int:
        """The batch size for `remaining` sequences: the next power of two, so that there are few sizes."""
        return 1 << (remaining - 1).bit_length() if remaining else 0

    def run(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """The stage's output for one token per row, valid until the next call. Shapes as in `Stage.forward`."""
        shape = (self._cache.rows, self._cache.span)
        if shape != self._shape:
            # Earlier shapes seldom come again. A graph's memory is freed once graph and output are both freed.
            # Capturing into the memory pool of a freed graph is an error in torch's allocator.
            self._graph = self._output = None
            self._graph, self._output = self._capture(x, micro)
            self._shape = shape
        assert self._graph is not None
        assert self._output is not None
        self._x.copy_(x)
        self._positions.copy_(micro.position_ids)
        self._graph.replay()
        return self._output

    def _capture(self, x: Tensor, micro: MicroBatch) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step in a new memory pool. Returns the graph and the tensor for the output of a replay."""
        self._x = x.clone()
        self._positions = micro.position_ids.clone()
        micro = replace(micro, position_ids=self._positions)
        # Run once before the capture: a capture does not allow loading kernels or allocating library workspaces.
        # This is harmless: the captured step writes the same keys to the same column again.
        self._cache.forget_masks()
        self._forward(self._x, micro, self._cache)
        self._cache.forget_masks()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._forward(self._x, micro, self._cache)
        self._cache.forget_masks()
        return graph, output
