"""Pictures are PNGs that show what they are given; what nobody measured is left out."""

import struct

import pytest

from flows.clocks import Span
from flows.pictures import curves, timeline


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG")
    return struct.unpack(">II", png[16:24])


def test_curves_draw_one_panel_for_each_title_that_has_data():
    rows = [{"iteration": 0, "reward": 0.1, "kl": 0.0}, {"iteration": 1, "reward": 0.3, "kl": 0.1}]
    one = size_of(curves(rows, [("Reward", ["reward"]), ("Absent", ["nothing"])]))
    two = size_of(curves(rows, [("Reward", ["reward"]), ("KL", ["kl"])]))
    assert two[0] == pytest.approx(2 * one[0], abs=2)


def test_curves_leave_out_values_that_were_not_finite():
    gap = [{"iteration": 0, "reward": 0.1}, {"iteration": 1, "reward": None}, {"iteration": 2, "reward": 0.3}]
    sound = [row for row in gap if row["reward"] is not None]
    assert curves(gap, [("Reward", ["reward"])]) == curves(sound, [("Reward", ["reward"])])
    assert curves(gap[1:2], [("Reward", ["reward"])]) == curves(gap[1:2], [])


def test_a_timeline_grows_with_its_ranks():
    spans = [Span(rank, 0, "actor_train", "train_step", 0.0, 1.0) for rank in range(8)]
    assert size_of(timeline(spans, "t"))[1] > size_of(timeline(spans[:2], "t"))[1]


def test_a_timeline_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one span"):
        timeline([], "empty")
