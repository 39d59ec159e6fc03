"""The KV cache: keys and values of the tokens so far, in blocks of static memory.

A sequence that is decoded has a row. Its token at position p is in column p, and the row's table says in which block
a column is. Rows that began with the same tokens have the blocks that these fill in common:

            columns   0 1 2 3   4 5 6 7   8 9 ..     with blocks of 4 tokens
    row 0             block 3   block 1   block 7
    row 1             block 3   block 5              its next token goes to block 5

Attention reads copies: the blocks of a few rows after each other, as many columns as the longest of these rows has. A
mask hides the others. So no result depends on which blocks a row has, or how large they are.

The memory of a layer is allocated when its first keys are written, which show how many KV heads a tensor parallel
rank holds and how large they are.

A layer without attention keeps states instead: tensors of fixed size for each row. They move with their rows, and
are zero when a sequence enters.
"""

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.blocks import Blocks
from prefect_rlhf.rlhf_tasks.parallel.layout.work import BLOCK, READ_AT_ONCE, blocks_of, runs_of


class Piece(NamedTuple):
    """Positions first .. stop - 1 of the sequence in a row."""

    row: int
    first: int
    stop: int


class Entry(NamedTuple):
    """A sequence that enters.

    length  tokens that are in the cache before its first step
    most    columns that it has room for at most
    source  row of a sequence whose beginning is the same; None: these tokens are filled in
    place   under which it has parked the first of them; None: it has nothing parked
    """

    length: int
    most: int
    source: int | None
    place: int | None = None


class KVCache:
    """The cache of some sequences on one pipeline stage.

    blocks         of its memory
    most_rows      most sequences at a time
    columns        most tokens of a sequence
    span_multiple  reads end at a multiple of this many columns. If it is 1, rows are read in runs of similar length,
                   so few unneeded columns are read. If it is more, all rows are read alike, so few shapes occur;
                   each shape needs a CUDA graph
    ahead          steps for which rows have room when `enter` and `extend` return

    rows       number of sequences in the cache; they are in rows 0 .. rows - 1
    lengths    tokens of each row
    blocks     which each row has
    continues  whether the new tokens attend to tokens of the cache; else only to each other

    Before each micro-batch, either `fill` names the pieces of sequences that it holds, or `advance` opens a column
    for one new token of every row. Columns and blocks of the new tokens are in device tensors, so that a captured
    CUDA graph reads their current values.
    """

    def __init__(
        self,
        blocks: int,
        most_rows: int,
        columns: int,
        device: torch.device,
        span_multiple: int = 1,
        ahead: int = 1,
    ) -> None:
        self.continues = False
        self.blocks = Blocks(blocks)
        self.lengths: list[int] = []
        self.most_rows = most_rows
        self._memory = blocks + 1
        self._device = device
        self._span_multiple = span_multiple
        self._ahead = ahead
        self._mosts: list[int] = []  # columns of each row, in the end and now
        self._limits: list[int] = []
        self._sources: dict[int, int] = {}  # of the rows that entered last
        self._changed: set[int] = set()  # rows of which the device does not know this yet
        width = blocks_of(-(-columns // span_multiple) * span_multiple)
        self._table = torch.zeros(most_rows, width, dtype=torch.int64, device=device)
        # The column of each row's newest token, the last that it has room for, and where that token is:
        self._newest = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._last = torch.zeros_like(self._newest)
        self._block = torch.zeros_like(self._newest)
        self._offset = torch.zeros_like(self._newest)
        self._row_numbers = torch.arange(most_rows, device=device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [blocks, kv heads, BLOCK, head_dim] twice
        self._states: dict[int, tuple[Tensor, ...]] = {}  # [most_rows, ...] each
        # Of the next micro-batch:
        self._sequences = torch.zeros(0, dtype=torch.int64, device=device)  # row of each sequence
        self._places: tuple[Tensor, Tensor] | None = None  # block of each new token, and its place there
        self._read = [(slice(0), 0)]  # runs of rows, and the columns that are read of them
        # Columns of these rows' new tokens:
        self._attending = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self._masks: dict[int | None, list[Tensor]] = {}
        self._indices: dict[int, list[Tensor]] = {}

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def span(self) -> int:
        """Columns that a read returns at most, from 0 on."""
        return max(span for _, span in self._read)

    @property
    def positions(self) -> Tensor:
        """Position of each row's newest token: [rows] int64."""
        return self._newest[: self.rows]

    # For attention

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of the micro-batch's tokens, both [T, KV heads, head_dim]."""
        assert self._places is not None, "fill() or advance() comes before the first tokens"
        if layer not in self._layers:
            shape = (self._memory, keys.shape[1], BLOCK)
            # Zeros, not empty memory: masked columns still enter the sums with weight 0, and 0 * NaN is NaN.
            self._layers[layer] = (
                _zeros((*shape, keys.shape[2]), keys),
                _zeros((*shape, values.shape[2]), values),
            )
        blocks, offsets = self._places
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored[blocks, :, offsets] = new

    def read(self, layer: int, window: int | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All keys and values of a layer for the sequences of the micro-batch, those of its new tokens included: for
        n rows after the other, few enough that their copies are small.

        window  tokens that one may attend to, itself included (sliding-window attention); None: all
        Yields keys and values [n, KV heads, S, head_dim], and a bool mask [n, 1, t, S] of the columns to which each
        of the t new tokens of a sequence attends.
        """
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        stored = self._layers[layer]
        heads = stored[0].shape[1]
        if heads not in self._indices:
            self._indices[heads] = self._index(heads)
        runs = zip(self._read, self._indices[heads], self._masks[window], strict=True)
        for (_, span), index, mask in runs:
            of_row = sum(each[0].nbytes for each in stored) * index.shape[2]
            at_once = max(1, READ_AT_ONCE[self._device.type] // of_row)
            for places, seen in zip(index.split(at_once), mask.split(at_once), strict=True):
                keys, values = (
                    each.flatten(0, 1)
                    .index_select(0, places.flatten())
                    .view(*places.shape[:2], -1, each.shape[3])[:, :, :span]
                    for each in stored
                )
                yield keys, values, seen

    def _index(self, heads: int) -> list[Tensor]:
        """Of each run: where the blocks of each row and KV head are, [n, heads, blocks], counted in blocks of a
        head."""
        numbers = torch.arange(heads, device=self._device)[:, None]
        return [self._table[rows, None, : blocks_of(span)] * heads + numbers for rows, span in self._read]

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
            self._states[layer] = tuple(state.new_zeros(self.most_rows, *state.shape[1:]) for state in states)
        for stored, new in zip(self._states[layer], states, strict=True):
            stored.index_copy_(0, self._sequences, new)

    # For the decode loop

    def enter(self, entries: Sequence[Entry]) -> None:
        """Give sequences the next rows. Before the next `advance`, `fill` writes their first tokens, or `share`
        copies what no block in common has."""
        first = self.rows
        assert first + len(entries) <= self.most_rows, f"the cache has {self.most_rows} rows only"
        # Before any of them takes room: what they have parked is not given to the others.
        parked = [[] if each.place is None else self.blocks.parked.pop(each.place, []) for each in entries]
        for entry, blocks in zip(entries, parked, strict=True):
            self.lengths.append(entry.length)
            self._mosts.append(entry.most)
            self._limits.append(self._room(self.rows - 1))
            self.blocks.enter(self._limits[-1], entry.source, entry.length, blocks)
        self._sources = {
            row: entry.source for row, entry in enumerate(entries, first) if entry.source is not None
        }
        self._newest[first : self.rows] = torch.tensor(self.lengths[first:], device=self._device) - 1
        self._changed.update(range(first, self.rows))
        for stored in (tensor for of_layer in self._states.values() for tensor in of_layer):
            stored[first : self.rows] = 0

    def _room(self, row: int) -> int:
        """The columns that a row's next steps take, and those that are left in their last block."""
        return min(self._mosts[row], blocks_of(self.lengths[row] + self._ahead) * BLOCK)

    def extend(self, rows: Sequence[int]) -> list[int]:
        """Let rows have room for their next steps, and the first ones before the others. Returns those that have lost
        theirs: they can only leave."""
        rooms = [(row, self._room(row)) for row in rows]
        growing = [row for row, room in rooms if room > self._limits[row]]
        if not growing:
            return []
        without = self.blocks.extend(rooms)
        for row, room in rooms:
            self._limits[row] = room
        self._changed.update(growing)
        self.release(without)
        return without

    def release(self, rows: Sequence[int]) -> None:
        """Take the blocks of some rows. What these read and write from now on is nobody's."""
        for row in rows:
            self.blocks.release(row)
            self._limits[row] = 1
        self._changed.update(rows)

    def park(self, row: int, place: int) -> None:
        """Take the blocks of a row, and have them ready for the sequence at this place, which comes back. Then what
        was written after its last token is written again."""
        self.blocks.park(row, place)
        self.release([row])

    def _tabulate(self) -> None:
        """Tell the device which blocks rows have now, and how many columns."""
        if not self._changed:
            return
        rows = sorted(self._changed)
        self._changed.clear()
        index = torch.tensor(rows, device=self._device)
        width = max(1, *(len(self.blocks.rows[row]) for row in rows))
        table = [self.blocks.rows[row] + [0] * (width - len(self.blocks.rows[row])) for row in rows]
        self._table[index, :width] = torch.tensor(table, device=self._device)
        self._last[index] = torch.tensor([self._limits[row] - 1 for row in rows], device=self._device)

    def fill(self, pieces: Sequence[Piece]) -> None:
        """The next micro-batch holds these pieces, in this order.

        They are beginnings of sequences; or later pieces, of equally many tokens, of sequences whose beginnings are
        in the cache.
        """
        self.continues = all(piece.first for piece in pieces)
        assert self.continues or not any(piece.first for piece in pieces), "beginnings and later pieces"
        self._tabulate()
        columns = [torch.arange(piece.first, piece.stop) for piece in pieces]
        blocks = [
            torch.tensor(self.blocks.rows[piece.row])[own // BLOCK]
            for own, piece in zip(columns, pieces, strict=True)
        ]
        whole = torch.cat(columns).to(self._device)
        self._places = (torch.cat(blocks).to(self._device), whole % BLOCK)
        self._sequences = torch.tensor([piece.row for piece in pieces], device=self._device)
        read = range(len(pieces) if self.continues else 1)
        runs = [(slice(pieces[n].row, pieces[n].row + 1), pieces[n].stop) for n in read]
        self._attend(runs, torch.stack([columns[n] for n in read]).to(self._device))

    def share(self) -> None:
        """Copy what the rows that have just entered begin with from their sources, but for the blocks in common: the
        last block, which each writes on, and states."""
        pairs = [(source, row) for row, source in self._sources.items()]
        copied = [
            (self.blocks.rows[source][length // BLOCK], self.blocks.rows[row][length // BLOCK])
            for source, row in pairs
            if (length := self.lengths[row]) % BLOCK
        ]
        self._copy(copied, (tensor for pair in self._layers.values() for tensor in pair))
        self._copy(pairs, (tensor for of_layer in self._states.values() for tensor in of_layer))

    def _copy(self, pairs: Sequence[tuple[int, int]], tensors: Iterable[Tensor]) -> None:
        """Copy in each tensor from the first number of each pair to the second."""
        if pairs:
            source, target = torch.tensor(pairs, device=self._device).T
            for stored in tensors:
                stored[target] = stored[source]

    def advance(self) -> None:
        """Open a column: the next micro-batch holds one new token for every row.

        In a row without room the last token is replaced. Only the row of a finished sequence can be without.
        """
        self.continues = True
        self._tabulate()
        rows = self.rows
        self.lengths = [
            min(length + 1, limit) for length, limit in zip(self.lengths, self._limits, strict=True)
        ]
        newest, block, offset = (each[:rows] for each in (self._newest, self._block, self._offset))
        newest.add_(1)
        torch.minimum(newest, self._last[:rows], out=newest)
        block.copy_(self._table[:rows].gather(1, newest[:, None] // BLOCK)[:, 0])
        torch.remainder(newest, BLOCK, out=offset)
        self._places = (block, offset)
        self._sequences = self._row_numbers[:rows]
        multiple = self._span_multiple
        runs = runs_of(self.lengths) if multiple == 1 else [(slice(0, rows), max(self.lengths))]
        self._attend([(run, -(-span // multiple) * multiple) for run, span in runs], newest[:, None])

    def _attend(self, runs: list[tuple[slice, int]], columns: Tensor) -> None:
        self._read = runs
        self._attending = columns
        self.forget_masks()

    def forget_masks(self) -> None:
        """Compute masks and places of blocks again at the next read. A captured CUDA graph must contain that."""
        self._masks.clear()
        self._indices.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order. Their blocks stay where they are."""
        moves = [(source, target) for target, source in enumerate(rows) if source != target]
        states = (tensor for of_layer in self._states.values() for tensor in of_layer)
        self._copy(moves, (self._newest, *states))
        self.blocks.keep(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self._mosts = [self._mosts[row] for row in rows]
        self._limits = [self._limits[row] for row in rows]
        self._changed = {
            target for target, source in enumerate(rows) if source != target or source in self._changed
        }


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
        # Meanwhile the thread that writes commits reads from the device.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = self._forward(self._x, micro, self._cache)
        self._cache.forget_masks()
        return graph, output
