"""Pictures are PNGs that show what they are given; what nobody measured is left out."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from prefect_rlhf.flows.commands.plans import STYLES
from prefect_rlhf.flows.view.clocks import Span
from prefect_rlhf.flows.view.pictures import (
    COLOURS,
    MOST_ROWS,
    curves,
    drawn_metrics,
    needed_arrows,
    outliers,
    plan_graph,
    timeline,
)
from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.rlhf_tasks.algorithms.configurations import load_config, read_assignments
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.rlhf_tasks.plans import small_plan

DEPLOYMENTS = Path(__file__).parents[3] / "deployments"


@pytest.fixture(scope="module")
def demo_plan() -> ExecutionPlan:
    """The plan of `make demo`: 23 nodes, with transfers, reallocations and releases."""
    ppo = algorithm("ppo")
    calls = ppo.graph(load_config(DEPLOYMENTS / "demo" / "ppo.yaml"))
    graph = DataflowGraph(calls, ppo.dataset_keys, name="ppo")
    return build_plan(graph, read_assignments(DEPLOYMENTS / "demo_plan.yaml", 4), Cluster(1, 4))


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG")
    return struct.unpack(">II", png[16:24])


def widest_frame(png: bytes) -> float:
    """The longest horizontal black line, as a share of the picture's width."""
    dark = imread(io.BytesIO(png))[..., :3].max(axis=-1) < 0.2
    ends = np.diff(np.pad(dark, ((0, 0), (1, 1))).astype(int).ravel()).nonzero()[0]
    return float((ends[1::2] - ends[::2]).max() / dark.shape[1])


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
    rows = [row(i, **dict.fromkeys(names, i / 2)) for i in range(2)]
    width, height = size_of(curves(rows))
    one = size_of(curves([row(0, reward=0.0)]))
    assert (width, height) == (one[0], n_rows * one[1])


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
    usual = [row(i, kl=0.3 + 0.02 * (i % 5)) for i in range(20)]
    spoilt = [row(0, kl=1e6), *usual[1:]]
    drawn, alone, flat = (curves(rows) for rows in (spoilt, usual, [row(0, kl=1e6), row(1, kl=0.3)]))
    assert size_of(drawn) == size_of(alone)
    assert len(drawn) > len(flat), "a flat line takes fewer bytes than a curve"


def test_notes_on_outliers_take_no_width_from_the_curves():
    """Two of eight panels have a note; their axes and all others keep nearly half of the picture's width."""
    losses = {f"loss/{name}": 0.004 for name in ("policy", "value", "entropy", "kl", "z")}
    rows = [
        row(
            i,
            reward=0.2 + 0.01 * (i % 7),
            kl=0.1 * (i % 5),
            **{key: v + 1e-4 * (i % 6) for key, v in losses.items()},
        )
        for i in range(40)
    ]
    for name, places in (("loss/value", [0]), ("loss/policy", [0, 3, 7])):
        for place in places:
            rows[place][name] = 4.9e-2 + place
    assert widest_frame(curves(rows)) > 0.38


def test_a_timeline_grows_with_its_ranks_and_lines():
    spans = [Span(rank, 0, "actor_train", "train_step", 0.0, 1.0) for rank in range(8)]
    low = size_of(timeline(spans[:2], "t"))[1]
    assert size_of(timeline(spans, "t"))[1] > low
    assert size_of(timeline(spans[:2], "t", lines=3))[1] > low


def test_a_timeline_of_many_ranks_draws_the_first_ones():
    spans = [Span(rank, 0, "actor_train", "train_step", 0.0, 1.0) for rank in range(MOST_ROWS + 9)]
    assert size_of(timeline(spans, "t")) == size_of(timeline(spans[:MOST_ROWS], "t"))


def test_a_timeline_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one span"):
        timeline([], "empty")


def test_every_kind_of_node_has_a_colour_of_its_own():
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert set(STYLES) == set(COLOURS)
    assert len(set(STYLES.values())) == len(STYLES)


def test_the_picture_of_a_plan_has_its_waits_but_no_implied_ones(demo_plan):
    def longer(node):
        return (
            node.model_copy(update={"after": (*node.after, "fetch")}) if node.name == "actor_train" else node
        )

    implied = demo_plan.model_copy(update={"nodes": tuple(map(longer, demo_plan.nodes))})
    graph = needed_arrows(implied)
    assert list(graph) == [node.name for node in demo_plan.nodes]
    assert set(graph.edges) == {(before, node.name) for node in demo_plan.nodes for before in node.after}
    width, height = size_of(plan_graph(demo_plan))
    assert size_of(plan_graph(small_plan()))[0] == width
    assert height > width / 2
