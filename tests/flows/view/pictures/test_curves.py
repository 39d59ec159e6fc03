"""Curves show what they are given; what nobody measured is left out."""

import numpy as np
import pytest

from prefect_rlhf.flows.view.pictures.curves import (
    MOST_POINTS,
    PANEL_HEIGHT,
    Curve,
    curve_panel,
    curves,
    drawn_metrics,
    outliers,
)
from prefect_rlhf.flows.view.pictures.svg import WIDTH
from tests.flows.view.pictures.drawn import elements_of, of_class, texts


def row(iteration: int, **metrics: float | None) -> dict[str, float | None]:
    return {"iteration": iteration, **metrics}


def test_every_reward_of_a_run_has_a_panel_and_so_has_each_loss():
    names = [
        "kl_coef",
        "loss/value",
        "kl",
        "rewards/mine/mean",
        "loss/policy",
        "rewards/exact/mean",
        "reward",
        "time/fetch",
    ]
    assert drawn_metrics(names) == [
        "reward", "rewards/mine/mean", "rewards/exact/mean", "kl", "loss/value", "loss/policy",
    ]  # fmt: skip


@pytest.mark.parametrize(("n_panels", "n_rows"), [(1, 1), (2, 1), (3, 2), (6, 3)])
def test_curves_stand_two_to_a_row(n_panels, n_rows):
    names = ["reward", "kl", "accuracy", "loss/a", "loss/b", "loss/c"][:n_panels]
    picture = curves([row(i, **dict.fromkeys(names, i / 2)) for i in range(2)])
    assert (picture.width, picture.height) == (WIDTH, n_rows * PANEL_HEIGHT)
    assert set(names) <= set(texts(picture))


def test_curves_leave_out_values_that_were_not_finite():
    gap = [row(0, reward=0.1), row(1, reward=None), row(2, reward=0.3)]
    sound = [each for each in gap if each["reward"] is not None]
    assert curves(gap) == curves(sound)
    with pytest.raises(ValueError, match="no metric"):
        curves(gap[1:2])


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([30.0, 0.5, 0.4, 0.3, 0.4, 0.5, 0.3, 0.4, 0.3, 0.4], [0]),
        ([0.4, 0.5, 0.4, -9.0, 0.4, 0.5, 0.3, 0.4, 0.3, 0.4], [3]),
        ([0.4, 0.5, 0.4, 0.3, 0.4, 0.5, 0.3, 0.4, 0.3, 9.0], []),  # it may have begun to leave its range
        ([8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.06], []),
        (
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0],
            [],
        ),  # nothing is flattened: the rest has no height
        ([30.0, 0.5, 0.4], []),
    ],
)
def test_an_outlier_is_what_would_flatten_the_rest(values, found):
    assert np.flatnonzero(outliers(np.array(values))).tolist() == found


def test_a_value_far_outside_does_not_flatten_the_others():
    """The curve of the others is drawn as if it were alone, but for the note on the one that is outside."""
    usual = [row(i, kl=0.3 + 0.02 * (i % 5)) for i in range(1, 20)]
    spoilt = [row(0, kl=1e6), *usual]
    drawn, alone = (curves(rows) for rows in (spoilt, usual))

    def scale(picture):
        return [text for text in texts(picture) if text.startswith("0.3")]

    assert scale(drawn) == scale(alone)
    assert len(scale(drawn)) > 2
    assert "outside: 1e6 at 1" in texts(drawn)


def test_a_curve_of_one_value_and_a_flat_one_are_drawn():
    for values in ([0.442], [0.442] * 9, [0.0]):
        panel = curve_panel("reward", [Curve(np.arange(len(values)), np.array(values))])
        assert len(of_class(panel, "curve")) == 1
        assert "nan" not in panel.body


def test_a_long_curve_is_thinned_to_means_with_the_range_of_what_they_stand_for():
    values = np.sin(np.arange(50_000) / 9)
    panel = curve_panel("reward", [Curve(np.arange(50_000), values)])
    [points] = [value for name, value in panel.data if name == "points"]
    assert len(points.split(";")) == MOST_POINTS
    assert len(of_class(panel, "band")) == 1
    assert len(panel.inline()) < 30_000


def test_curves_of_several_runs_share_axes_and_have_a_colour_each():
    runs = [Curve(np.arange(9), np.linspace(0, 1 + n, 9), name, n) for n, name in enumerate("ab")]
    panel = curve_panel("reward", runs)
    assert [line.get("class") for line in of_class(panel, "curve")] == ["curve s0", "curve s1"]
    assert dict(panel.data)["names"] == "a|b"


def test_a_metric_of_any_name_stays_text():
    name = 'rewards/<script>"&\x00\x1b[31m/mean'
    panel = curve_panel(name, [Curve(np.arange(2), np.array([0.0, 1.0]))])
    assert not [each for each in elements_of(panel) if each.tag.endswith("script")]
    assert any("<script>" in text for text in texts(panel))
