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


def _groups(prompts: list[int], answers: list[int]) -> SampleBatch:
    """Samples of prompts of these lengths, with answers of these lengths for each."""
    sequences = [
        torch.cat([torch.arange(length) + 1000 * number, torch.full((answer,), 10**6 + place)])
        for number, length in enumerate(prompts)
        for place, answer in enumerate(answers)
    ]
    return SampleBatch(tuple(range(len(sequences))), {"input_ids": Packed.of(sequences)})


def test_samples_of_a_prompt_come_into_one_micro_batch():
    micros = split(_groups([10, 10, 10], [5, 5, 5, 5]), 3)
    assert [micro.ids for micro in micros] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert [micro.computed_tokens for micro in micros] == [30, 30, 30]


def test_a_group_is_cut_where_there_are_more_micro_batches_than_groups():
    micros = split(_groups([10], [5, 5, 5, 5]), 2)
    assert [(micro.ids, micro.computed_tokens) for micro in micros] == [((0, 1), 20), ((2, 3), 20)]


def test_samples_are_dealt_by_length_where_consecutive_ones_would_fill_a_micro_batch_more():
    """Two of 108 tokens in turn are 208 with a shared prompt; one of 108 and one of 58 are 166 without."""
    micros = split(_groups([8], [50, 50, 100, 100]), 2)
    assert [micro.ids for micro in micros] == [(0, 2), (1, 3)]


def test_prompts_that_are_shared_leave_room_for_more_samples():
    batch = _groups([10, 10, 10], [5, 5, 5, 5])
    assert len(split(batch, 1, 45)) == 3
    assert len(split(batch, 1, 60)) == 2
    assert len(split(batch, 1, 90)) == 1


@given(
    st.lists(st.integers(8, 30), min_size=1, max_size=5),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 200)),
)
def test_micro_batches_of_groups_are_a_partition_within_bounds(
    prompts: list[int], answers: list[int], least: int, most: int | None
) -> None:
    """No micro-batch is fuller, and none more, than without sharing."""
    batch = _groups(prompts, answers)
    lengths = list(batch["input_ids"].lengths)
    micros = split(batch, least, most)
    assert sorted(sample for micro in micros for sample in micro.ids) == list(batch.ids)
    bound = most or max(sum(lengths[i] for i in part) for part in balance(lengths, least))
    assert all(micro.computed_tokens <= max(bound, *lengths) for micro in micros)
    assert most is not None or len(micros) <= least
    for micro in micros:
        assert list(micro.ids) == sorted(micro.ids)


def test_the_answers_of_a_pair_share_their_prompt():
    prompt = torch.arange(12)
    parts = [torch.cat([prompt + 100 * pair, torch.tensor([n] * n)]) for pair in (0, 1) for n in (3, 5)]
    (micro,) = split(SampleBatch((7, 7, 8, 8), {"input_ids": Packed.of(parts)}), 1)
    assert micro.computed_tokens == 2 * (12 + 3 + 5)
