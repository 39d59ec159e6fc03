"""The pictures of the documentation, made anew from a finished demo: `make pictures`.

    python -m bench.screenshots runs/demo docs/pictures

Prefect's page of the PPO run, the report of that run and its timeline, in the browser that the tests use.
"""

import re
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_rlhf.flows.cluster.server import own_server
from prefect_rlhf.flows.run.reporting import write_report
from prefect_rlhf.flows.run.run_folder import newest_flow_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTH, HEIGHT = 1200, 760
PATIENCE_MS = 120_000
SETTLED_MS = 4_000  # graphs move until they fit


def main(demo: Path, target: Path) -> None:
    """Write run-page.png, report.png and timeline.png."""
    from playwright.sync_api import sync_playwright

    target.mkdir(parents=True, exist_ok=True)
    run = demo / "stages" / "ppo"
    with ExitStack() as stack:
        program = shutil.which("chromium")
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        stack.callback(browser.close)
        report = opened(browser)
        report.goto(write_report(run).resolve().as_uri())
        report.screenshot(path=target / "report.png")
        report.locator("#time svg").last.screenshot(path=target / "timeline.png")
        server = stack.enter_context(own_server(demo))
        page = opened(browser)
        log_in(page, server)
        page.goto(f"{server.ui_url}/runs/flow-run/{newest_flow_run(run)}")
        page.get_by_text("ppo/ppo").first.wait_for()
        page.wait_for_timeout(SETTLED_MS)
        page.mouse.click(1076, 468)  # the graph's button that shows all of it has no name
        page.mouse.move(20, 560)
        page.wait_for_timeout(SETTLED_MS)
        page.screenshot(path=target / "run-page.png")


def opened(browser: "Browser") -> "Page":
    """A new window in the light."""
    page = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light").new_page()
    page.set_default_timeout(PATIENCE_MS)
    return page


def log_in(page: "Page", server: Any) -> None:
    """Log in by the form."""
    page.goto(server.ui_url)
    page.locator("input[type=password]").fill(server.ui_line.rpartition("login: ")[2])
    page.get_by_role("button", name="Login").click()
    page.wait_for_url(re.compile("dashboard"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
