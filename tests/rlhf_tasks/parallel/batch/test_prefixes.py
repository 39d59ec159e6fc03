"""Which first tokens samples share, and how rows are repeated for them."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf_tasks.parallel.batch.prefixes import SharedPrefixes, common_prefixes
from rlhf_tasks.parallel.layout.shared_tokens import LEAST_SHARED

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
