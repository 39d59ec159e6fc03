import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_tasks.parallel.batch.micro_batch import balance, micro_batch, split
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch


def _batch(lengths: list[int]) -> SampleBatch:
    ids = tuple(range(10, 10 + len(lengths)))
    tokens = [torch.arange(length) + 100 * sample for sample, length in zip(ids, lengths, strict=True)]
    return SampleBatch(
        ids,
        {
            "input_ids": Packed.of(tokens),
            "double": Packed.of([2 * t for t in tokens]),
            "scores": Packed.of([torch.tensor([float(sample)]) for sample in ids]),
        },
    )


def test_a_micro_batch_packs_positions_and_starts() -> None:
    micro = micro_batch(_batch([3, 1, 2]))
    assert micro.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert micro.cu_seqlens.dtype == torch.int32
    assert micro.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert micro.lengths == (3, 1, 2)
    assert micro.tokens == 6
    assert [part.tolist() for part in micro.per_sample(micro.position_ids)] == [[0, 1, 2], [0], [0, 1]]


def test_split_keeps_every_key_with_its_sample() -> None:
    batch = _batch([5, 1, 4, 2])
    micros = split(batch, 2)
    assert [micro.ids for micro in micros] == [(10, 11), (12, 13)]
    for micro in micros:
        assert torch.equal(micro.data["double"], 2 * micro.input_ids)
        assert micro.data["scores"].tolist() == list(micro.ids)
        assert "input_ids" not in micro.data


def test_fewer_samples_make_fewer_micro_batches() -> None:
    assert len(split(_batch([2, 3]), 5)) == 2
    assert split(_batch([2, 3]).select([]), 5) == split(_batch([2, 3]).select([]), 5, 1) == []


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 200))
def test_no_micro_batch_has_more_tokens_than_it_may(lengths: list[int], least: int, most: int) -> None:
    """Or than the longest sample. A batch that has few enough is cut no further."""
    batch = _batch(lengths)
    micros = split(batch, least, most)
    assert sorted(sample for micro in micros for sample in micro.ids) == list(batch.ids)
    assert all(micro.tokens <= max(most, *lengths) for micro in micros)
    assert len(micros) >= min(least, len(lengths))
    if sum(lengths) <= most:
        assert len(micros) == min(least, len(lengths))


def test_micro_batches_are_as_large_as_a_long_sample_makes_one_anyway() -> None:
    assert [micro.ids for micro in split(_batch([9, 2, 2, 2, 2]), 1, 4)] == [(10,), (11, 12, 13, 14)]
    assert [micro.ids for micro in split(_batch([4, 2, 2, 2, 2]), 1, 4)] == [(10,), (11, 13), (12, 14)]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 8))
def test_parts_are_a_balanced_partition(lengths: list[int], parts: int) -> None:
    dealt = balance(lengths, parts)
    assert sorted(i for part in dealt for i in part) == list(range(len(lengths)))
    assert all(dealt)
    sums = [sum(lengths[i] for i in part) for part in dealt]
    if sums:
        assert max(sums) - min(sums) <= max(lengths)


def test_the_two_answers_of_a_pair_stay_together_in_order():
    lengths = (3, 1, 9, 2, 4, 4, 1, 5)
    ids = (4, 4, 5, 5, 6, 6, 7, 7)
    parts = [torch.full((length,), place) for place, length in enumerate(lengths)]
    micros = split(SampleBatch(ids, {"input_ids": Packed.of(parts)}), 3)
    assert len(micros) == 3
    seen = []
    for micro in micros:
        firsts = [int(part[0]) for part in micro.per_sample(micro.input_ids)]
        assert [place + 1 for place in firsts[::2]] == firsts[1::2]
        assert all(a == b for a, b in zip(micro.ids[::2], micro.ids[1::2], strict=True))
        seen += firsts
    assert sorted(seen) == list(range(8))
