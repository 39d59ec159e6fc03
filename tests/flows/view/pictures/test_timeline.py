"""A timeline has a lane for each rank and a bar for each node."""

import pytest

from prefect_rlhf.flows.commands.plans import STYLES
from prefect_rlhf.flows.view.clocks import Span
from prefect_rlhf.flows.view.pictures.colours import COLOURS, in_words
from prefect_rlhf.flows.view.pictures.timeline import MOST_BARS, MOST_ROWS, timeline
from tests.flows.view.pictures.drawn import hints, of_class, texts


def trained(rank: int, iteration: int = 0, start_s: float = 0.0, end_s: float = 1.0) -> Span:
    return Span(rank, iteration, "actor_train", "train_step", start_s, end_s)


def test_a_timeline_grows_with_its_ranks_and_lines():
    spans = [trained(rank) for rank in range(8)]
    low = timeline(spans[:2], "t").height
    assert timeline(spans, "t").height > low
    assert timeline(spans[:2], "t", lines=3).height > low


def test_a_timeline_of_many_ranks_draws_the_first_ones_and_says_so():
    picture = timeline([trained(rank) for rank in range(MOST_ROWS + 9)], "t")
    assert len(of_class(picture, "k-train_step")) == MOST_ROWS + 1, "a bar for each, and the legend's"
    assert f"t, first {MOST_ROWS} of {MOST_ROWS + 9} rows" in texts(picture)


def test_a_timeline_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one span"):
        timeline([], "empty")


def test_each_bar_tells_its_node_iteration_and_seconds():
    picture = timeline([trained(0), trained(0, 1, 1.0, 1.004)], "t")
    assert hints(picture) == ["actor_train, iteration 1: 1 s", "actor_train, iteration 2: 4 ms"]
    assert [bar.get("class") for bar in of_class(picture, "odd")] == ["k-train_step odd"]
    assert texts(picture).count("actor_train") == 1, "a label only where it fits"


def test_a_bar_that_ends_in_the_next_line_has_a_part_in_each():
    picture = timeline([trained(0, 0, 0.0, 3.0), trained(1, 0, 3.0, 4.0)], "t", lines=2)
    assert len(of_class(picture, "k-train_step")) == 3 + 1


def test_of_very_many_nodes_the_shortest_are_left_out():
    spans = [trained(0, 0, float(n), n + (0.9 if n % 2 else 0.001)) for n in range(3 * MOST_BARS)]
    picture = timeline(spans, "t")
    assert len(of_class(picture, "k-train_step")) == MOST_BARS + 1
    assert len(picture.alone()) < 1_500_000


def test_every_kind_of_node_has_a_colour_of_its_own():
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert set(STYLES) == COLOURS.keys() - {"waiting", "overhead"}
    assert len(set(STYLES.values())) == len(STYLES)


def test_the_legend_has_the_kinds_that_are_drawn():
    spans = [
        trained(0),
        Span(0, 0, "save_actor", "save", 1.0, 2.0),
        Span(0, 0, "new", "a new kind", 2.0, 3.0),
    ]
    assert texts(timeline(spans, "t"))[-3:] == [in_words("train_step"), "save", "a new kind"]
