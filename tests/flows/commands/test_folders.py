"""`prefect-rlhf ui`: the server of a run that has ended opens again, with its login, until Ctrl-C."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.flows.cluster.test_server import ANSWER_S, count_runs
from tests.flows.marked_command import MarkedCommand

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@contextmanager
def opened_ui(folder: Path, log: Path) -> Iterator[tuple[str, str]]:
    """(address, login) that the command prints; Ctrl-C has ended it and all of its processes afterwards."""
    with MarkedCommand(log, "ui", str(folder)) as ui:
        ui.wait_until(lambda: "Ctrl-C ends it" in ui.output)
        shown = re.search(r"Prefect UI: (http://127\.0\.0\.1:\d+) +login: (\S+)", ui.output)
        assert shown, ui.output
        yield shown[1], shown[2]
        ui.signal(signal.SIGINT)
        assert ui.process.wait(60) == 130, ui.output
        assert "Traceback" not in ui.output
        ui.assert_gone()


@pytest.mark.whole
def test_the_ui_opens_with_its_login_and_ends_on_ctrl_c(tmp_path):
    """Of a run that has only begun; tests/flows/test_killed_run.py opens a finished one's."""
    (tmp_path / "prefect").mkdir()
    with opened_ui(tmp_path, tmp_path / "log") as (address, login):
        assert login == (tmp_path / "prefect" / "auth").read_text()
        page = httpx.get(address, follow_redirects=True, timeout=ANSWER_S)
        assert page.status_code == 200
        assert "<title>Prefect" in page.text
        assert httpx.post(f"{address}/api/flow_runs/count", timeout=ANSWER_S).status_code in (401, 403)
        assert count_runs(f"{address}/api", login) == 0
