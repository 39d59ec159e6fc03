"""A report in a real browser without a network: it can be read at the width of a desk and of a telephone, in the
light and in the dark."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from prefect_rlhf.flows.run.reporting import write_report
from tests.browser import chromium
from tests.flows.reported_run import RECORDED, recorded_run, write_samples

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = pytest.mark.parametrize("width", [1280, 390])
LONG = "onelongword" * 40


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = recorded_run(tmp_path_factory.mktemp("runs"))
    write_samples(folder, 11, [{**RECORDED["samples"][0], "completion": LONG}, *RECORDED["samples"]])
    return write_report(folder)


@pytest.fixture
def visit(browser, report):
    """Open the report offline; gives the page, and what it has asked for or complained of."""
    contexts = []

    def go(width: int, scheme: str = "light") -> "tuple[Page, list[str]]":
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page, said = context.new_page(), []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        page.goto(report.as_uri())
        return page, said

    yield go
    for context in contexts:
        context.close()


@WIDTHS
def test_a_report_opens_offline_without_a_complaint_and_fits_its_window(visit, report, width):
    page, said = visit(width)
    assert said == [report.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("Every key", "other metrics"):
        page.get_by_text(name).first.click()
    assert page.get_by_text("total_iterations: 12").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@WIDTHS
def test_every_letter_of_a_picture_can_be_read(visit, width):
    page, _ = visit(width)
    heights = page.evaluate(
        "[...document.querySelectorAll('svg text')].filter(t => t.checkVisibility() && t.textContent)"
        ".map(t => t.getBoundingClientRect().height)"
    )
    assert len(heights) > 100
    assert min(heights) > 8.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_the_page_in_the_light_and_in_the_dark(visit, scheme):
    page, _ = visit(1280, scheme)
    ink, paper = (
        sum(map(int, re.findall(r"\d+", page.evaluate(f"getComputedStyle(document.body).{what}"))[:3])) / 3
        for what in ("color", "backgroundColor")
    )
    assert abs(ink - paper) > 150
    assert (paper < 60) == (scheme == "dark")


def test_a_curve_tells_its_values_where_the_mouse_is(visit):
    page, said = visit(1280)
    curve = page.locator("svg[data-points]").first
    curve.scroll_into_view_if_needed()
    box = curve.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + box["height"] / 2)
    last = RECORDED["metrics"][-1]
    assert page.locator("#tip").inner_text() == f"reward: {last['reward']:.3g} at 12"
    page.mouse.move(2, 2)
    assert not page.locator("#tip").is_visible()
    assert len(said) == 1
