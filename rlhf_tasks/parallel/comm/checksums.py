"""Checksums by which both ends of a movement know that the bits are the same, computed where the tensors are.

What is summed are words of 64 bits, in rows; each row's sum is weighted by an odd number of its place, all modulo
2**64. So whatever changes within one word changes the checksum, and rows that change places do. Words that change
places within a row of 2,048 do not. A CPU reads words several times faster than it copies memory, and narrower
integers, which it has to widen first, twenty times slower; a GPU reads faster than anything arrives. For a small
tensor an operation costs more than its bytes, so the rows of many are weighted together (docs/adr/0037-digests.md).
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.system.invariants import InvariantError

WORD_BYTES = 8
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Item size in bytes -> the integer dtype that its bits are read as."""

_ROW = 2048
"""Words of a row."""


def checksum(values: Tensor) -> Tensor:
    """Of a tensor of any shape and dtype: one int64 scalar on its device."""
    return checksums([values], values.device)[0]


def checksums(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Of each tensor, of any shape and dtype: [n] int64 on a device. Bytes after the last whole word are summed by
    themselves."""
    rows = [list(_sums_of_rows(one)) for one in tensors]
    if not rows:
        return torch.zeros(0, dtype=torch.int64, device=device)
    counts = tuple(sum(map(len, one)) for one in rows)
    sums = torch.cat([part.to(device) for one in rows for part in one])
    # The highest bit of a sum weighs the same whatever odd number it is multiplied by; its lower half's bits do not.
    mixed = sums ^ ((sums >> 32) & 0xFFFFFFFF)
    return sums_of_segments(mixed * torch.cat([_odd_numbers(n, device) for n in counts]), counts)


def sums_of_segments(values: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The sum of each of the segments into which [n] int64 are cut. counts: elements of each, not 0"""
    if len(counts) == 1:
        return values.sum(0, keepdim=True)
    ends = values.cumsum(0)[torch.tensor([n - 1 for n in accumulate(counts)], device=values.device)]
    ends[1:] -= ends[:-1].clone()
    return ends


@lru_cache(maxsize=256)
def _odd_numbers(n: int, device: torch.device) -> Tensor:
    """[n]: 1, 3, 5, ..."""
    return torch.arange(1, 2 * n + 1, 2, device=device)


def _sums_of_rows(values: Tensor) -> Iterator[Tensor]:
    """[n] int64, one after the other: of whole rows of words, of the words that are left, of the bytes that are."""
    flat = values.detach().contiguous().view(-1)
    if n_rest := flat.nbytes % WORD_BYTES:
        flat = flat.view(torch.uint8)
        yield flat[len(flat) - n_rest :].sum(0, keepdim=True, dtype=torch.int64)
        flat = flat[: len(flat) - n_rest]
    words = _words(flat)
    if whole := len(words) // _ROW * _ROW:
        yield words[:whole].view(-1, _ROW).sum(1)
    if len(words) > whole or not (whole or n_rest):
        yield words[whole:].sum(0, keepdim=True)


def width_of_rows(inner: int, k: int) -> int:
    """Elements of a row of words of a matrix. inner: as `checksum_of_columns` has it; k: elements of a word"""
    return inner if inner % k == 0 else k


def checksum_of_columns(values: Tensor, left: int, inner: int) -> Tensor:
    """The summand of some columns in the checksum of a matrix, which is the sum of those of all its parts, however it
    is cut: one int64 scalar on the tensor's device.

    values  [rows, columns] of any dtype, its columns next to each other in memory
    left    number of the first column in the matrix
    inner   columns that share a weight, such as those of a row of the parameter; of fewer than fill words, a word's

    A word has k columns of which the first has a number divisible by k. A column that lies here without the others of
    its word adds its bits at its place in the word.
    """
    size, (n_rows, n_columns) = values.element_size(), values.shape
    k = WORD_BYTES // size
    width = width_of_rows(inner, k)
    begin = min(-left % k, n_columns)
    stop = begin + (n_columns - begin) // k * k
    totals = list[Tensor]()
    for first, last in ((0, begin), (stop, n_columns)):
        if first < last:
            numbers = torch.arange(left + first, left + last, device=values.device)
            bits = values[:, first:last].view(BITS[size]).to(torch.int64) & ((1 << 8 * size) - 1)
            places = (2 * (numbers // width) + 1) << (numbers % k * 8 * size)
            totals.append((bits.sum(0) * places).sum())
    if begin < stop:
        words = _words(values[:, begin:stop])
        words = words.sum(0) if n_rows > 1 else words[0]
        totals.append(_sum_of_rows(words, (left + begin) // k, width // k))
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()


def _sum_of_rows(words: Tensor, left: int, width: int) -> Tensor:
    """The sum of words, each times 2 n + 1 for the number n of its row of `width` words. left: number of the first"""
    if width == 1:
        return _weighted(words, left)
    # The end of a row, whole rows, and the beginning of one.
    head, first = min(-left % width, len(words)), -(-left // width)
    n_rows = (len(words) - head) // width
    tail = head + n_rows * width
    total = _weighted(words[head:tail].view(n_rows, width).sum(1), first)
    if head:
        total = total + words[:head].sum() * (2 * first - 1)
    if tail < len(words):
        total = total + words[tail:].sum() * (2 * (first + n_rows) + 1)
    return total


def _weighted(sums: Tensor, first: int) -> Tensor:
    """The sum of the sums of rows, each times 2 n + 1 for its row's number n. first: number of the first row"""
    weights = torch.arange(2 * first + 1, 2 * (first + len(sums)) + 1, 2, device=sums.device)
    return (sums * weights).sum()


def _words(values: Tensor) -> Tensor:
    """The words of a tensor whose last dim fills words. They are copied if they do not begin at words of memory."""
    k = WORD_BYTES // values.element_size()
    if any(step % k for step in (values.storage_offset(), *values.stride()[:-1])):
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.int64)


def require_same(what: str, names: Iterable[str], sent: Tensor, arrived: Tensor) -> None:
    """Raises InvariantError naming the first tensor whose checksums differ.

    what  was moved, between which ranks
    """
    if torch.equal(sent, arrived):
        return
    name = next(
        n for n, one, other in zip(names, sent.tolist(), arrived.tolist(), strict=True) if one != other
    )
    raise InvariantError(f"{what}: {name!r} has other bits than before")
