"""The KV cache, and the CUDA graphs of decoding steps that read it."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefect_rlhf.rlhf_tasks.parallel.generate import kv_cache, slots
from prefect_rlhf.rlhf_tasks.parallel.generate.kv_cache import (
    DecodeGraphs,
    Entry,
    KVCache,
    Piece,
    vacate,
)
from prefect_rlhf.rlhf_tasks.parallel.generate.slots import DecodingPace
from prefect_rlhf.rlhf_tasks.parallel.layout.work import BLOCK
from prefect_rlhf.rlhf_tasks.system.rank_process import process_bytes
from tests.rlhf_tasks.parallel.generate.test_generation import STOPS, Alone, build, draw, prompts, responses

CPU = torch.device("cpu")
Token = tuple[int, int]  # sequence and position


def stamp(token: Token) -> torch.Tensor:
    """Keys [2 heads, 3] that tell whose they are; the values are their negatives."""
    return torch.tensor([[*token, 0.0], [*token, 1.0]])


def write(cache: KVCache, tokens: Sequence[Token], layers: Sequence[int] = (4, 7)) -> None:
    keys = torch.stack([stamp(token) for token in tokens])
    for layer in layers:
        cache.write(layer, keys, -keys)


def fill(cache: KVCache, lengths: Mapping[int, int], most: int = 60) -> None:
    """Sequences enter, with their first tokens in one pass."""
    first = cache.rows
    cache.enter([Entry(length, most, None) for length in lengths.values()])
    cache.fill([Piece(row, 0, length) for row, length in enumerate(lengths.values(), first) if length])
    write(cache, [(sequence, p) for sequence, length in lengths.items() for p in range(length)])


def step(cache: KVCache, lengths: Mapping[int, int]) -> dict[int, int]:
    """Write a token more of each sequence; the lengths after it."""
    assert not cache.extend(range(cache.rows))
    cache.advance()
    write(cache, list(lengths.items()))
    return {sequence: length + 1 for sequence, length in lengths.items()}


def assert_holds(cache: KVCache, lengths: Mapping[int, int], window: int | None = None) -> None:
    """Row i reads the first `lengths` positions of the i-th sequence named, in order, and nothing else."""
    for layer in (4, 7):
        rows = [row for run in cache.read(layer, window) for row in zip(*run, strict=True)]
        for (keys, values, mask), (sequence, length) in zip(rows, lengths.items(), strict=True):
            seen = mask[0, 0]
            first = 0 if window is None else max(0, length - window)
            expected = torch.stack([stamp((sequence, p)) for p in range(first, length)], dim=1)
            assert torch.equal(keys[:, seen], expected)
            assert torch.equal(values[:, seen], -expected)


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_sequences_come_grow_and_leave(monkeypatch, multiple: int, at_once: int):
    monkeypatch.setitem(kv_cache.READ_AT_ONCE, "cpu", at_once)
    cache = KVCache(20, 4, 60, CPU, multiple)
    lengths = {0: 3, 1: 1, 2: 26, 3: 12}
    fill(cache, lengths)
    for number in range(28):
        lengths = step(cache, lengths)
        assert_holds(cache, lengths)
        assert_holds(cache, lengths, window=3)
        if number == 8:
            # The longest, in the middle, leaves: the last row takes its place; another one enters, in its blocks.
            staying = vacate([False, False, True, False], 3)
            cache.keep(staying)
            lengths = {list(lengths)[row]: list(lengths.values())[row] for row in staying}
            assert list(lengths) == [0, 1, 3]
            fill(cache, {8: 18})
            lengths |= {8: 18}
    assert cache.blocks.peak < 20


def test_a_piece_of_a_sequence_attends_to_what_was_written_before():
    cache = KVCache(9, 3, 60, CPU)
    fill(cache, {5: 2})
    cache.enter([Entry(37, 60, None)])
    for first, stop in ((0, 13), (13, 35), (35, 37)):
        cache.fill([Piece(1, first, stop)])
        assert cache.continues == (first > 0)
        write(cache, [(6, position) for position in range(first, stop)])
        ((keys, _, mask),) = cache.read(4, window=4)
        assert (keys.shape[0], mask.shape) == (1, (1, 1, stop - first, stop))
        for number, position in enumerate(range(first, stop)):
            expected = [stamp((6, p)) for p in range(max(0, position - 3), position + 1)]
            assert torch.equal(keys[0][:, mask[0, 0, number]], torch.stack(expected, dim=1))
    assert_holds(cache, step(cache, {5: 2, 6: 37}))


@pytest.mark.parametrize("length", [BLOCK - 3, BLOCK, 2 * BLOCK + 5])
def test_rows_that_begin_alike_have_one_copy_of_what_fills_blocks_and_write_on_their_own(length: int):
    """Sequence 0 is the source: its stamps are what the others begin with."""
    cache = KVCache(12, 3, 60, CPU)
    fill(cache, {0: length})
    free = cache.blocks.free
    cache.enter([Entry(length, 60, 0), Entry(length, 60, 0)])
    cache.share()
    assert free - cache.blocks.free == 2
    for number in range(4):
        assert not cache.extend(range(3))
        cache.advance()
        write(cache, [(row, length + number) for row in range(3)])
    rows = [row for run in cache.read(4) for row in zip(*run, strict=True)]
    for row, (keys, _, mask) in enumerate(rows):
        tokens = [(0, p) for p in range(length)] + [(row, length + n) for n in range(4)]
        assert torch.equal(keys[:, mask[0, 0]], torch.stack([stamp(token) for token in tokens], dim=1))
    cache.keep([2])
    assert cache.blocks.free == 12 - len(cache.blocks.rows[0])
    cache.extend([0])
    cache.advance()
    ((keys, _, _),) = cache.read(4)
    assert torch.equal(keys[0][:, :length], torch.stack([stamp((0, p)) for p in range(length)], dim=1))


def test_what_a_row_loses_to_another_is_written_by_no_one_any_more():
    cache = KVCache(4, 3, 60, CPU)
    fill(cache, {0: BLOCK})
    fill(cache, {1: 2}, most=6)
    fill(cache, {2: BLOCK - 1})
    lengths = {0: BLOCK, 1: 2, 2: BLOCK - 1}
    for number in range(10):
        cache.advance()
        write(cache, list(lengths.items()))
        lengths = {sequence: length + 1 for sequence, length in lengths.items()}
        # Row 1 is the last of them. It stays, as in a captured graph, and would write on at its last column.
        without = cache.extend([2, 0, 1] if number == 0 else [2, 0])
        assert without == ([1] if number == 0 else [])
    cache.keep([0, 2])
    cache.extend([0, 1])
    cache.advance()
    write(cache, [(0, lengths[0]), (2, lengths[2])])
    assert_holds(cache, {0: lengths[0] + 1, 2: lengths[2] + 1})


def test_a_read_spans_no_column_that_no_one_needs():
    cache = KVCache(8, 2, 60, CPU)
    fill(cache, {0: 2, 1: 50})
    step(cache, {0: 2, 1: 50})
    assert next(iter(cache.read(4)))[0].shape == (2, 2, 51, 3)
    cache.keep([0])
    step(cache, {0: 3})
    assert next(iter(cache.read(4)))[0].shape == (1, 2, 4, 3)


@pytest.mark.parametrize("multiple", [1, 16])
def test_rows_behind_which_all_are_far_shorter_are_read_apart(multiple: int):
    cache = KVCache(12, 5, 48, CPU, multiple)
    lengths = {0: 30, 1: 40, 2: 9, 3: 12, 4: 3}
    fill(cache, lengths, 48)
    lengths = step(cache, lengths)
    assert_holds(cache, lengths)
    assert_holds(cache, lengths, window=5)
    spans = [keys.shape[0::2] for keys, _, _ in cache.read(4)]
    assert spans == ([(2, 41), (2, 13), (1, 4)] if multiple == 1 else [(5, 48)])


def test_a_finished_sequence_that_stays_beyond_its_end_disturbs_no_other():
    cache = KVCache(2, 2, 4, CPU)
    fill(cache, {0: 1, 1: 3}, most=4)
    lengths = {0: 1, 1: 3}
    for _ in range(3):
        lengths = step(cache, lengths)
    ((keys, _, mask),) = cache.read(4)
    assert torch.equal(keys[0][:, mask[0, 0, 0]], torch.stack([stamp((0, p)) for p in range(4)], dim=1))


def test_a_finished_sequence_stays_within_the_positions_of_the_longest():
    """Reads are rounded up to more columns. A model may have no position for these."""
    cache, lengths = KVCache(1, 1, 5, CPU, span_multiple=8), {0: 3}
    fill(cache, lengths, most=5)
    for _ in range(4):
        lengths = step(cache, lengths)
    assert cache.positions.tolist() == [4]
    assert cache.span == 8


def test_a_cache_on_the_cpu_takes_no_memory_for_what_is_never_written():
    cache, before = KVCache(64 * 256, 64, 4096, CPU), process_bytes(CPU)
    cache.enter([Entry(0, 4096, None)])
    cache.advance()
    keys = torch.ones(1, 4, 64)
    cache.write(0, keys, keys)
    ((read, _, _),) = cache.read(0)
    assert torch.equal(read, keys[..., None, :])
    size_bytes = 2 * 64 * 4096 * keys.numel() * keys.element_size()
    assert process_bytes(CPU) - before < size_bytes / 10


def test_more_sequences_than_rows_are_an_error():
    cache = KVCache(4, 1, 4, CPU)
    with pytest.raises(AssertionError, match="rows"):
        cache.enter([Entry(1, 4, None), Entry(2, 4, None)])


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


PACE = DecodingPace(check_every=4, span_multiple=8, graphs=True)
LENGTHS = [(3, 9, 1, 6, 4, 5, 2), (2,) * 13, (30, 1, 2, 3, 17)]
NEW_TOKENS = 30


class Recording(TorchDispatchMode):
    """Writes down every operation on tensors; reading a tensor on the host, which a capture forbids, fails."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a captured step waits for the device"
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class GraphOnCPU:
    """What a CUDA graph does: the same operations on the same memory again, and nothing of the Python around."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class Captures:
    """Stands in for `torch.cuda.graph`: counts captures, and holds that each begins with the last one gone."""

    def __init__(self) -> None:
        self.count = 0
        self._last: list[weakref.ref] = []

    @contextmanager
    def __call__(
        self, graph: GraphOnCPU, pool: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "a commit's thread reads from the device meanwhile"
        assert pool is None, "torch's allocator refuses the pool of a graph that is gone"
        assert not any(last() for last in self._last), "the memory of the graph before is still held"
        with Recording() as recording:
            yield
        graph.operations = recording.operations
        output = graph.operations[-1][-1]
        self._last = [weakref.ref(graph), weakref.ref(output)]
        self.count += 1


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    captures = Captures()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphOnCPU)
    monkeypatch.setattr(torch.cuda, "graph", captures)
    return captures


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_captured_steps_give_the_tokens_of_plain_ones(captures, monkeypatch, family: str, lengths):
    engine = build(family, torch.float64, **({"sliding_window": 4} if family == "mistral" else {}))
    batch, options = prompts(lengths), {"max_new_tokens": NEW_TOKENS, "stop_ids": STOPS}
    plain = draw(engine, batch, **options)
    monkeypatch.setitem(slots.PACES, "cpu", PACE)
    captured = draw(engine, batch, **options)
    assert captures.count >= 3, "the shapes must change for the test to say something"
    assert responses(captured) == responses(plain)
    assert len({len(response) for response in responses(plain).values()}) > 2
    assert torch.equal(captured["truncated"].values, plain["truncated"].values)
    torch.testing.assert_close(captured["old_logprobs"].values, plain["old_logprobs"].values)


def test_rows_are_powers_of_two():
    assert [DecodeGraphs.rows_for(n) for n in (0, 1, 2, 3, 4, 5, 9)] == [0, 1, 2, 4, 4, 8, 16]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_several_captures_on_a_device_give_the_tokens_of_the_cpu(monkeypatch, lengths):
    device = torch.device("cuda", 0)
    batch, options = prompts(lengths), {"max_new_tokens": NEW_TOKENS, "stop_ids": STOPS}
    plain = draw(build("llama", torch.float64), batch, **options)
    monkeypatch.setitem(slots.PACES, "cuda", PACE)
    made, capture = [], DecodeGraphs._capture
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *given: made.append(1) or capture(*given))
    captured = draw(build("llama", torch.float64, groups=Alone(device)), batch, **options)
    assert len(made) >= 3
    assert responses(captured) == responses(plain)
