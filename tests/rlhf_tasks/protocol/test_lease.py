"""Leases: one attempt of one run holds a rank."""

import pytest

from rlhf_tasks.protocol.lease import Lease, refusal


@pytest.mark.parametrize(
    ("holder", "wanted", "granted"),
    [
        (None, Lease("a", 0, "x"), True),
        (Lease("a", 0, "x"), Lease("a", 0, "x"), True),  # a repeat
        (Lease("a", 0, "x"), Lease("a", 1, "y"), True),  # the next attempt takes over
        (Lease("a", 1, "y"), Lease("a", 0, "x"), False),  # an earlier attempt is over
        (Lease("a", 0, "x"), Lease("a", 0, "y"), False),  # the same attempt twice
        (Lease("a", 0, "x"), Lease("b", 9, "z"), False),  # another run
    ],
)
def test_who_may_take_a_rank_from_whom(holder, wanted, granted):
    assert (refusal(holder, wanted) is None) == granted


def test_a_refusal_names_the_holder():
    assert "run 'a', attempt 0 (client x)" in refusal(Lease("a", 0, "x"), Lease("b", 0, "y"))
