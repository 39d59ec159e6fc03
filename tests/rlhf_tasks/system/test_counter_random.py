"""Counter-based random numbers: known answers, even distribution, one answer however it is asked for."""

import numpy as np
import torch

from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import uniform
from prefect_rlhf.rlhf_tasks.system.counter_random import counter_bits, permutation, stream, stream_key


def test_stream_is_splitmix64():
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # the reference program, seed 0
    assert [int(x) % 2**64 for x in stream(0, np.arange(3))] == expected
    assert [x % 2**64 for x in stream(0, torch.arange(3)).tolist()] == expected


def test_known_answers():
    assert stream_key(1, "rollout", 0) == -5553977259341613876
    u = uniform(1, "rollout", 0, torch.tensor([0, 0, 1, 2**40]), torch.tensor([0, 1, 0, 7]))
    assert u.dtype == torch.float64
    assert u.tolist() == [0.4950847171802163, 0.6087364743377242, 0.8542132314642206, 0.6319235018626921]
    assert permutation(10, 1, "dataset", 0).tolist() == [8, 6, 4, 9, 5, 1, 3, 7, 2, 0]


def test_numpy_and_torch_give_the_same_bits():
    ids, positions = np.arange(50)[:, None] * 977, np.arange(20)[None]
    from_numpy = counter_bits(3, "x", 4, ids, positions)
    from_torch = counter_bits(3, "x", 4, torch.from_numpy(ids), torch.from_numpy(positions))
    assert np.array_equal(from_numpy, from_torch.numpy())


def test_a_number_does_not_depend_on_what_else_is_asked():
    ids, positions = torch.arange(64)[:, None], torch.arange(32)[None]
    table = uniform(7, "rollout", 3, ids, positions)
    alone = uniform(7, "rollout", 3, torch.tensor([41]), torch.tensor([17]))
    assert table[41, 17] == alone[0]


def test_every_argument_matters():
    one = torch.ones(1, dtype=torch.int64)
    base = (1, "rollout", 1, one, one)
    others = [(2, *base[1:]), (1, "evaluation", *base[2:]), (1, "rollout", 2, one, one)]
    others += [(1, "rollout", 1, one + 1, one), (1, "rollout", 1, one, one + 1)]
    values = {float(uniform(*arguments)) for arguments in [base, *others]}
    assert len(values) == len(others) + 1


def test_uniforms_are_evenly_spread():
    u = uniform(0, "rollout", 0, torch.arange(400)[:, None], torch.arange(500)[None])
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    n = u.numel()
    assert abs(float(u.mean()) - 0.5) < 4 * (1 / 12 / n) ** 0.5
    for values in (u.flatten(), u[:, 0], u[0]):  # all, neighbours in id, neighbours in position
        counts = torch.histc(values, bins=20, min=0, max=1)
        chi2 = float(((counts - len(values) / 20) ** 2 / (len(values) / 20)).sum())
        assert chi2 < 43.8  # 0.1% point at 19 degrees of freedom
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):  # serial correlation along positions and ids
        r = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(float(r)) < 4 / a.numel() ** 0.5


def test_permutations_are_permutations_and_differ_by_epoch():
    orders = [permutation(1000, 5, "dataset", epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(1000))
    assert not np.array_equal(orders[0], orders[1])
    assert abs(np.corrcoef(orders[0], orders[1])[0, 1]) < 4 / 1000**0.5
    assert permutation(0, 5, "dataset", 0).tolist() == []


def test_each_place_of_a_permutation_gets_each_row_equally_often():
    counts = np.zeros((5, 5))
    for epoch in range(2000):
        counts[np.arange(5), permutation(5, 11, "dataset", epoch)] += 1
    chi2 = ((counts - 400) ** 2 / 400).sum()
    assert chi2 < 39.3  # 0.1% point at 16 degrees of freedom
