"""The KV cache: keys and values of the tokens so far, in static memory.

Sequences are right-aligned: all prompts end in the same column, so that the new tokens of all sequences go to the
same column in each step.

            column   0 1 2 3 4 | 5 6 7
    sequence 0         a b c d | e f        start 1: a mask hides the columns before a sequence's start
    sequence 1             a b | c d        the next token of both goes to column 7

The memory of a layer is allocated when its first keys are written, which show how many KV heads a tensor parallel
rank holds and how large they are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """The cache of some sequences on one pipeline stage.

    prompt_lengths  tokens of each prompt, none 0
    new_tokens      columns to reserve for tokens after the prompts
    span_multiple   reads start and end at multiples of this many columns. With 1 no unneeded column is read; with
                    more there are fewer different shapes (each needs a CUDA graph)

    rows  number of sequences in the cache
    span  (start, stop): a read returns the columns start .. stop - 1

    It begins in the prefill phase, in which attention writes whole prompts, packed in micro-batches (`prefill` names
    the sequences of the next micro-batch). The first `advance` begins decoding: one token per sequence and step. The
    column of the next token is stored in a device tensor too, so that a captured CUDA graph reads its current value.
    """

    def __init__(
        self, prompt_lengths: Sequence[int], new_tokens: int, device: torch.device, span_multiple: int = 1
    ) -> None:
        self.decoding = False
        self.rows = len(prompt_lengths)
        self._prompt_columns = max(prompt_lengths)
        self._span_multiple = span_multiple
        self._columns = -(-(self._prompt_columns + new_tokens) // span_multiple) * span_multiple
        self._device = device
        self._starts = torch.tensor([self._prompt_columns - length for length in prompt_lengths])
        self._device_starts = self._starts.to(device)
        self._column = self._prompt_columns - 1
        self._device_column = torch.tensor([self._column], device=device)
        self.span = self._find_span()
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [rows, kv heads, columns, head_dim] twice
        self._places: tuple[Tensor, Tensor] | None = None
        self._masks: dict[int | None, Tensor] = {}

    # For attention

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of the micro-batch's tokens, both [T, KV heads, head_dim]."""
        if layer not in self._layers:
            shape = (self.rows, keys.shape[1], self._columns, keys.shape[2])
            # Zeros, not empty memory: masked columns still enter the sums with weight 0, and 0 * NaN is NaN.
            self._layers[layer] = (keys.new_zeros(shape), values.new_zeros(shape))
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            if self.decoding:
                stored[: self.rows].index_copy_(2, self._device_column, new[:, :, None])
            else:
                assert self._places is not None, "prefill() comes before the first prompts"
                rows, columns = self._places
                stored[rows, :, columns] = new

    def read(self, layer: int, window: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """All keys and values of a layer, including the newest token's. Only while decoding.

        window  tokens that one may attend to, itself included (sliding-window attention); None: all
        Returns views of keys and values [n, KV heads, S, head_dim], and a bool mask [n, 1, 1, S] of the columns to
        attend to.
        """
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        keys, values = self._layers[layer]
        start, stop = self.span
        return keys[: self.rows, :, start:stop], values[: self.rows, :, start:stop], self._masks[window]

    def _mask(self, window: int | None) -> Tensor:
        columns = torch.arange(*self.span, device=self._device)
        starts = self._device_starts[:, None]
        if window is not None:
            starts = starts.clamp(min=self._device_column + 1 - window)
        return ((columns >= starts) & (columns <= self._device_column))[:, None, None]

    # For the decode loop

    def prefill(self, rows: Sequence[int]) -> None:
        """The next micro-batch holds the whole prompts of these rows, in this order."""
        assert not self.decoding
        columns = [torch.arange(int(self._starts[row]), self._prompt_columns) for row in rows]
        row_of_token = [torch.full_like(of_row, row) for row, of_row in zip(rows, columns, strict=True)]
        self._places = (torch.cat(row_of_token).to(self._device), torch.cat(columns).to(self._device))

    def advance(self) -> None:
        """Open the next column: the next micro-batch holds one new token for every row."""
        self.decoding = True
        self._column += 1
        assert self._column < self._columns, f"the cache has {self._columns} columns only"
        self._device_column += 1
        self.span = self._find_span()
        self.forget_masks()

    def forget_masks(self) -> None:
        """Compute the masks again at the next read. A captured CUDA graph must contain that computation."""
        self._masks.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order. Only rows that change place are copied."""
        moves = [(source, target) for target, source in enumerate(rows) if source != target]
        if moves:
            source, target = torch.tensor(moves, device=self._device).T
            for stored in (tensor for pair in self._layers.values() for tensor in pair):
                used = stored[:, :, slice(*self.span)]
                used[target] = used[source]
        self._starts = self._starts[list(rows)]
        self._device_starts = self._starts.to(self._device)
        self.rows = len(rows)
        self.span = self._find_span()
        self.forget_masks()

    def _find_span(self) -> tuple[int, int]:
        start, stop = int(self._starts.min()), self._column + 1
        multiple = self._span_multiple
        return start // multiple * multiple, -(-stop // multiple) * multiple


def vacate(finished: Sequence[bool], size: int) -> list[int]:
    """The `size` rows to keep when finished ones are removed: the last rows move into the free places.

    finished  one entry per row
    size      at least the number of unfinished rows; if it is more, finished rows stay to fill the batch
    Example: of 5 rows, 0 and 2 finished, size 3 keeps [4, 1, 3]: row 4 moves to place 0 and row 3 to place 2.
    """
    movers = [row for row in range(size, len(finished)) if not finished[row]]
    return [movers.pop() if finished[row] and movers else row for row in range(size)]
