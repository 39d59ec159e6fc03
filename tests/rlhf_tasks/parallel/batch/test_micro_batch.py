"""Micro-batches and the first tokens that their samples share."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import (
    SharedPrefixes,
    balance,
    common_prefixes,
    micro_batch,
    split,
)
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.work import LEAST_SHARED


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
    assert split(_batch([2, 3]).reorder([]), 5) == split(_batch([2, 3]).reorder([]), 5, 1) == []


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


CPU = torch.device("cpu")


def begins(*samples: list[int]) -> tuple[int, ...]:
    return common_prefixes(torch.tensor([t for sample in samples for t in sample]), [len(s) for s in samples])


def prompt(number: int, length: int) -> list[int]:
    return [1000 * number + place for place in range(length)]


def test_a_group_shares_its_prompt_and_no_more():
    first, second = prompt(1, 10), prompt(2, 12)
    group = [[*first, 5, 6], [*first, 7], [*first, 5, 6, 8, 9]]
    assert begins(*group, [*second, 1], [*second, 2]) == (0, 10, 10, 0, 12)


def test_what_all_have_in_common_counts_when_first_neighbours_have_more():
    common, further = prompt(1, 10), prompt(3, 2)
    assert begins([*common, *further, 1], [*common, *further, 2], [*common, 4]) == (0, 10, 10)


def test_samples_alike_to_the_end_compute_their_last_token_each():
    assert begins(prompt(1, 12), prompt(1, 12), prompt(1, 10)) == (0, 9, 9)


def test_a_few_tokens_are_not_shared():
    few, enough = prompt(1, LEAST_SHARED - 1), prompt(1, LEAST_SHARED)
    assert begins([*few, 1], [*few, 2]) == (0, 0)
    assert begins([*enough, 1], [*enough, 2]) == (0, LEAST_SHARED)
    assert begins() == ()
    assert begins([1]) == (0,)


def test_a_system_prompt_is_shared_by_all_where_groups_would_not_share_more():
    system = prompt(9, 20)
    alone = [[*system, *prompt(number, 30)] for number in range(4)]
    assert begins(*alone) == (0, 20, 20, 20)
    groups = [[*sample, number] for sample in alone for number in range(3)]
    assert begins(*groups) == (0, 50, 50) * 4
    long = [[*prompt(9, 200), *prompt(number, 30), answer] for number in range(3) for answer in range(3)]
    assert begins(*long) == (0, *[200] * 8)


@st.composite
def _samples(draw: st.DrawFn) -> list[list[int]]:
    """Samples that share prefixes of samples before them."""
    samples = [draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))]
    for _ in range(draw(st.integers(0, 8))):
        prefix = draw(st.sampled_from(samples))
        samples.append(
            prefix[: draw(st.integers(0, len(prefix)))]
            + draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
        )
    return samples


@given(_samples())
def test_shared_tokens_are_equal_and_rows_are_repeated_for_each_sample(samples: list[list[int]]) -> None:
    found, lengths = begins(*samples), [len(sample) for sample in samples]
    first: list[int] = []
    for begin, sample in zip(found, samples, strict=True):
        first = first if begin else sample
        assert sample[:begin] == first[:begin]
        assert begin < min(len(sample), len(first))
        assert begin == 0 or begin >= LEAST_SHARED
    shared = SharedPrefixes.of(found, lengths, CPU)
    whole = torch.tensor([token for sample in samples for token in sample])
    assert len(shared.computed) == sum(lengths) - sum(found) == shared.cu_seqlens[-1]
    padded = torch.cat([whole[shared.computed], torch.tensor([-1, -1])])
    assert torch.equal(shared.whole(padded, 0), whole)
    assert torch.equal(shared.whole(padded[None], 1), whole[None])
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0) + torch.tensor(found)
    assert torch.equal(shared.computed[shared.cu_seqlens[:-1].long()], starts)


def test_gradients_of_repeated_rows_are_summed():
    rows = torch.arange(12.0).requires_grad_()
    weights = torch.tensor([*[1.0] * 11, *[10.0] * 10, 100.0])
    shared = SharedPrefixes.of(begins([*prompt(1, 10), 1], [*prompt(1, 10), 2]), (11, 11), CPU)
    (shared.whole(rows, 0) * weights).sum().backward()
    gradient = rows.grad
    assert isinstance(gradient, Tensor)
    assert gradient.tolist() == [*[11.0] * 10, 1.0, 100.0]
