"""Batches as values: what is joined, cut, repeated, reordered and padded on one rank. All cases are by hand."""

import pytest
import torch

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, concat

LENGTHS = (2, 0, 3)
BATCH = SampleBatch(
    (7, 4, 9),
    {
        "tokens": Packed(torch.tensor([70, 71, 90, 91, 92]), LENGTHS),
        "mask": Packed(torch.tensor([True, False, True, True, False]), LENGTHS),
        "score": Packed(torch.tensor([0.7, 0.4, 0.9]), (1, 1, 1)),
    },
)


def rows(batch: SampleBatch, key: str = "tokens") -> dict[int, list]:
    return {sample: part.tolist() for sample, part in zip(batch.ids, batch[key].split(), strict=True)}


def test_select_takes_keys_and_reorder_takes_samples():
    assert list(BATCH.select("score", "tokens").data) == ["score", "tokens"]
    turned = BATCH.reorder((9, 7))
    assert rows(turned) == {9: [90, 91, 92], 7: [70, 71]}
    with pytest.raises(KeyError):
        BATCH.select("values")
    with pytest.raises(KeyError):
        BATCH.reorder((5,))


def test_union_has_the_keys_of_both():
    joined = BATCH.select("tokens") | BATCH.select("score", "tokens")
    assert set(joined.data) == {"tokens", "score"}
    assert rows(joined) == rows(BATCH)


def test_a_union_of_other_samples_or_other_values_is_refused():
    with pytest.raises(ValueError, match="union of the samples 7, 4, 9 and 9, 4, 7: they are not the same"):
        BATCH.union(BATCH.reorder((9, 4, 7)))
    other = SampleBatch(BATCH.ids, {"score": Packed(torch.tensor([0.7, 0.4, 0.8]), (1, 1, 1))})
    with pytest.raises(ValueError, match="both batches have 'score', with other values"):
        BATCH.union(other)


def test_repeat_puts_the_copies_of_a_sample_side_by_side():
    twice = BATCH.select("tokens").repeat(2)
    assert twice.ids == (7, 7, 4, 4, 9, 9)
    assert twice["tokens"].lengths == (2, 2, 0, 0, 3, 3)
    assert twice["tokens"].values.tolist() == [70, 71, 70, 71, 90, 91, 92, 90, 91, 92]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_concat_is_the_inverse_of_chunk(n):
    parts = BATCH.chunk(n)
    assert len(parts) == n
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    whole = concat(parts)
    assert whole.ids == BATCH.ids
    assert all(torch.equal(whole[key].values, BATCH[key].values) for key in BATCH.data)
    assert all(whole[key].values.dtype == BATCH[key].values.dtype for key in BATCH.data)
    with pytest.raises(ValueError, match="concat of batches with the keys tokens, mask, score and tokens"):
        concat([BATCH, BATCH.select("tokens")])


def test_a_sample_of_several_sequences_is_taken_apart_and_joined_again():
    several = {"input_ids": BATCH["tokens"], "response_mask": BATCH["mask"], "score": BATCH["score"]}
    several["kept_counts"] = Packed(torch.tensor([0, -2, 1, 0, 3]), LENGTHS)
    several["kept_tokens"] = Packed(torch.arange(6), (2, 0, 4))
    several["sequence_lengths"] = Packed(torch.tensor([2, 1, 2]), (1, 0, 2))
    apart = SampleBatch(BATCH.ids, several).sequences()
    assert apart.ids == (7, 9, 9)
    assert [part.tolist() for part in apart["input_ids"].split()] == [[70, 71], [90], [91, 92]]
    assert [part.tolist() for part in apart["kept_tokens"].split()] == [[0, 1], [2], [3, 4, 5]]
    assert apart.data.keys() == several.keys() - {"score", "sequence_lengths"}
    assert apart["response_mask"].joined((1, 0, 2)).lengths == LENGTHS
    assert BATCH.sequences() is BATCH


def test_unpad_is_the_inverse_of_pad():
    padded = BATCH.pad("tokens", fill=-1)
    assert padded.tolist() == [[70, 71, -1], [-1, -1, -1], [90, 91, 92]]
    assert BATCH.pad("mask").tolist() == [[True, False, False], [False] * 3, [True, True, False]]
    doubled = BATCH.unpad("tokens", doubled=2 * padded)
    assert rows(doubled, "doubled") == {7: [140, 142], 4: [], 9: [180, 182, 184]}
    with pytest.raises(
        ValueError, match=r"'doubled' is \[3, 2\], but 'tokens' has 3 samples of up to 3 rows"
    ):
        BATCH.unpad("tokens", doubled=padded[:, :2])
