"""The form of an approval in a browser. Import as `tests.flows.recurring.form`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect_rlhf.flows.cluster.server import PrefectServer
from tests.browser import chromium, logged_in


@contextmanager
def flow_run_page(server: PrefectServer, flow_run: str) -> Iterator[Any]:
    """The page of a flow run in Prefect's first UI, which has the form."""
    with chromium() as browser:
        page = logged_in(browser, server, "v1")
        page.goto(f"{server.ui_url}/runs/flow-run/{flow_run}")
        yield page


def answered(page: Any, heading: str, decision: str) -> str:
    """Resume a flow run by its form, with the comment `looks right`. Returns the text that the page had."""
    page.get_by_role("button", name="Resume").first.click()
    page.get_by_text(heading).first.wait_for()
    text = page.inner_text("body")
    page.locator(
        "xpath=(//*[normalize-space(text())='Decision']/following::button[@role='combobox' or "
        "contains(@class,'p-select')])[1] | //*[contains(@class,'p-select')]"
    ).last.click()
    page.get_by_text(decision, exact=True).last.click()
    page.locator("textarea").last.fill("looks right")
    page.get_by_role("button", name="Submit").last.click()
    return text
