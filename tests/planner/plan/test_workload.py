import pytest

from prefect_rlhf.planner.plan.workload import Lengths


def test_spans_of_a_distribution():
    lengths = Lengths(points=((10, 0.5), (4, 0.25), (12, 0.25)))
    assert lengths.spans() == [(1, 4, 1.0), (5, 10, 0.75), (11, 12, 0.25)]
    assert lengths.mean == 9.0
    assert sum((last - first + 1) * share for first, last, share in lengths.spans()) == lengths.mean


@pytest.mark.parametrize(
    ("points", "message"),
    [(((4, 0.5),), "add up to 0.5"), (((0, 1.0),), "at least 1 token"), (((4, 1.5), (5, -0.5)), "negative")],
)
def test_refused(points, message):
    with pytest.raises(ValueError, match=message):
        Lengths(points=points)
