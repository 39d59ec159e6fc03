"""Debian's chromium, and Prefect's UI in it. Import as `tests.browser`."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prefect_rlhf.flows.cluster.server import PrefectServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE_MS = 180_000  # for a page on a busy machine


@contextmanager
def chromium() -> "Iterator[Browser]":
    """A browser. Its library keeps an event loop running in this thread, so it is started last."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program, "these tests need a browser: apt-get install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


def logged_in(browser: "Browser", server: PrefectServer, ui: str | None = None) -> "Page":
    """A page of Prefect's UI, logged in by the form with what the terminal prints.

    ui  the version, v1 or v2; None: the one that Prefect shows first
    """
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(server.ui_url)
    page.locator("input[type=password]").fill(server.ui_line.rpartition("login: ")[2])
    page.get_by_role("button", name="Login").click()
    page.wait_for_url(re.compile("dashboard"))
    if ui is not None:
        page.evaluate("version => localStorage.setItem('prefect-ui-version', version)", ui)
    return page
