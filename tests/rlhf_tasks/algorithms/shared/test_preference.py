"""Several sequences of a sample follow each other under its id, and come apart again."""

import torch

from prefect_rlhf.rlhf_tasks.algorithms.shared.preference import CHOSEN, REJECTED, apart, side_by_side
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch


def batch_of(*sizes: tuple[int, int]) -> SampleBatch:
    data = {}
    for place, name in enumerate(("chosen", "rejected")):
        ids = [torch.full((size[place],), 10 * n + place) for n, size in enumerate(sizes)]
        data[f"{name}_ids"] = Packed.of(ids) if ids else Packed(torch.zeros(0, dtype=torch.int64), ())
        data[f"{name}_mask"] = Packed(data[f"{name}_ids"].values > 0, data[f"{name}_ids"].lengths)
    return SampleBatch(tuple(range(7, 7 + len(sizes))), data)


def test_the_answers_of_a_pair_follow_each_other_and_come_apart():
    together = side_by_side(batch_of((2, 1), (1, 3)), [CHOSEN, REJECTED])
    assert together.ids == (7, 7, 8, 8)
    assert [part.tolist() for part in together["input_ids"].split()] == [[0, 0], [1], [10], [11, 11, 11]]
    assert together["response_mask"].lengths == (2, 1, 1, 3)
    rows = Packed(torch.tensor([1.0, 2.0, 3.0, 4.0]), (1, 1, 1, 1))
    found = {name: packed.values.tolist() for name, packed in apart(rows, ["a", "b"]).items()}
    assert found == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


def test_a_replica_without_samples_has_an_empty_batch():
    together = side_by_side(batch_of(), [CHOSEN, REJECTED])
    assert (together.ids, together["input_ids"].lengths) == ((), ())
