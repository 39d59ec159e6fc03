"""The KV cache: what a sequence reads is what was written for it, whoever came and left."""

import pytest
import torch

from rlhf_tasks.parallel.generate.kv_cache import KVCache, vacate

CPU = torch.device("cpu")


def stamp(sequence: int, position: int) -> torch.Tensor:
    """Keys [2 heads, 3] that tell whose they are; the values are their negatives."""
    return torch.tensor([[sequence, position, 0.0], [sequence, position, 1.0]])


def write(cache: KVCache, layer: int, tokens: list[tuple[int, int]]) -> None:
    keys = torch.stack([stamp(*token) for token in tokens])
    cache.write(layer, keys, -keys)


def assert_holds(cache: KVCache, layer: int, lengths: dict[int, int], window: int | None = None) -> None:
    """Row i reads the first `lengths` positions of the i-th sequence named, in order, and nothing else."""
    keys, values, mask = cache.read(layer, window)
    assert keys.shape[0] == len(lengths)
    for row, (sequence, length) in enumerate(lengths.items()):
        seen = keys[row][:, mask[row, 0, 0]]
        first = 0 if window is None else max(0, length - window)
        expected = torch.stack([stamp(sequence, position) for position in range(first, length)], dim=1)
        assert torch.equal(seen, expected)
        assert torch.equal(values[row][:, mask[row, 0, 0]], -expected)


@pytest.mark.parametrize("multiple", [1, 4])
def test_sequences_come_grow_and_leave(multiple: int):
    prompts = [3, 1, 6, 2]
    cache = KVCache(prompts, 5, CPU, multiple)
    for rows in ([2, 0], [1, 3]):  # prompts in two micro-batches
        cache.prefill(rows)
        for layer in (4, 7):
            write(cache, layer, [(row, position) for row in rows for position in range(prompts[row])])
    lengths = dict(enumerate(prompts))
    for step in range(5):
        cache.advance()
        for layer in (4, 7):
            write(cache, layer, list(lengths.items()))
        lengths = {sequence: length + 1 for sequence, length in lengths.items()}
        for layer in (4, 7):
            assert_holds(cache, layer, lengths)
            assert_holds(cache, layer, lengths, window=3)
        if step == 1:  # the longest, in the middle, leaves: the last row takes its place
            kept = vacate([False, False, True, False], 3)
            cache.keep(kept)
            lengths = {sequence: lengths[sequence] for sequence in kept}
            assert list(lengths) == [0, 1, 3]
    for _ in range(-(6 + 5) % multiple):  # columns beyond the longest prompt and 5 new tokens
        cache.advance()
    with pytest.raises(AssertionError, match="columns"):
        cache.advance()


def test_a_read_spans_no_column_that_no_one_needs():
    cache = KVCache([2, 50], 10, CPU)
    cache.prefill([0, 1])
    write(cache, 0, [(0, p) for p in range(2)] + [(1, p) for p in range(50)])
    cache.advance()
    write(cache, 0, [(0, 2), (1, 50)])
    assert cache.read(0)[0].shape == (2, 2, 51, 3)
    cache.keep([0])
    assert cache.read(0)[0].shape == (1, 2, 3, 3)
    assert_holds(cache, 0, {0: 3})


@pytest.mark.parametrize(
    ("finished", "size", "kept"),
    [
        ([1, 0, 1, 0, 0], 3, [4, 1, 3]),
        ([0, 0, 1], 2, [0, 1]),
        ([1, 1, 0], 1, [2]),
        ([0, 0], 2, [0, 1]),
        ([1, 0, 1, 1, 0], 4, [4, 1, 2, 3]),  # two remain; finished ones fill the batch of four
        ([1, 1], 0, []),
    ],
)
def test_vacate_moves_the_last_rows_into_free_places(finished: list[int], size: int, kept: list[int]):
    assert vacate([bool(f) for f in finished], size) == kept
