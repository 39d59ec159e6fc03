"""flows/commands/local_run.py: what a command's process loads before it starts a run, and what is said first when a
run ends."""

import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
from httpx import HTTPStatusError, Request, Response
from prefect import flow
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from prefect_rlhf.flows.cluster.server import PrefectServer
from prefect_rlhf.flows.commands import local_run as session
from prefect_rlhf.flows.run.run_folder import full_disk
from tests.flows.cluster.test_server import servers_of


@pytest.mark.whole
def test_a_flow_process_starts_without_torch():
    code = "import sys, prefect_rlhf.flows.commands.local_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def write_to_a_full_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("more than there is room for")


def ends_by(error: Exception):
    async def run():
        raise error

    return run


@pytest.fixture
def end_of(tmp_path, monkeypatch, capsys):
    """What a command says whose run ends by an error."""
    server = PrefectServer("http://127.0.0.1:9/api", "", own=True)
    monkeypatch.setattr(session, "prefect_server", lambda _: nullcontext(server))

    def end(error: Exception) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            session._watched(tmp_path, "prefect-rlhf run ppo --resume x", ends_by(error))
        assert ended.value.code == 1
        address, *said = capsys.readouterr().out.splitlines()
        assert "http://127.0.0.1:9" in address
        return said

    return end


def test_a_full_disk_is_the_first_thing_said_whatever_error_tells_of_it(end_of, tmp_path):
    with pytest.raises(OSError, match="No space left") as full:
        write_to_a_full_disk()
    wrapped = RuntimeError("Prefect has failed")
    wrapped.__cause__ = full.value
    for error in (full.value, wrapped, RuntimeError("database: No space left on device")):
        cause, again, whole = end_of(error)
        assert cause.startswith(f"failed: No space left on device: {tmp_path} ")
        assert "are free" in cause
        assert again == "To continue: prefect-rlhf run ppo --resume x"
        assert whole == f"The whole error: {tmp_path / 'error.log'}"


def test_an_error_that_nobody_has_foreseen_is_one_line_and_whole_in_a_file(end_of, tmp_path):
    assert end_of(KeyError("what")) == [
        "failed: KeyError: 'what'",
        "To continue: prefect-rlhf run ppo --resume x",
        f"The whole error: {tmp_path / 'error.log'}",
    ]
    assert "Traceback" in (tmp_path / "error.log").read_text()


def test_a_run_that_prefect_has_lost_is_complete_where_its_summary_is(end_of, tmp_path, capsys):
    """Our own server has come back with an empty database: the engine cannot report the flow run's end."""
    error = ObjectNotFound(KeyError("flow run"))
    failed, _ = end_of(error)
    assert failed == "failed: Prefect's server does not know the flow run any more."

    async def run():
        (tmp_path / "summary.json").write_text('{"iterations": 3}')
        raise error

    assert session._watched(tmp_path, "the same command", run) == {"iterations": 3}
    assert "the run is complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "refuses the login"),
        (404, "refuses what it is asked for"),
        (500, "does not answer"),
        (503, "does not answer"),
    ],
)
def test_an_answer_of_the_server_is_told_as_what_it_is(end_of, status, words):
    request = Request("POST", "http://there")
    error = HTTPStatusError("no", request=request, response=Response(status, request=request))
    assert end_of(error)[0] == f"failed: Prefect's server {words} (no)."


def test_an_error_on_a_disk_with_room_is_none_of_a_full_disk(tmp_path):
    assert full_disk(ValueError("no"), tmp_path) is None
    assert full_disk(OSError(13, "Permission denied"), tmp_path) is None
    assert full_disk(ValueError("no"), tmp_path / "not" / "there") is None


def test_the_login_is_printed_in_the_one_piece_that_the_login_form_asks_for():
    server = PrefectServer("http://127.0.0.1:4711/api", "admin:secret", own=True)
    assert server.ui_line == "Prefect UI: http://127.0.0.1:4711   login: admin:secret"
    assert PrefectServer("http://h/api", "", own=False).ui_line == "Prefect UI: http://h"


def kill_server(folder):
    (server,) = servers_of(folder)
    server.kill()
    while servers_of(folder):
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_dies_for_good_costs_a_run_neither_its_end_nor_its_summary(
    tmp_path, monkeypatch, capsys
):
    """Killed before the flow begins: one sentence. Killed while it runs: the run is complete all the same."""
    monkeypatch.setattr("prefect_rlhf.flows.cluster.server.RESTARTS", 0)

    @flow(name="rlhf-fake", persist_result=False)
    async def run():
        kill_server(tmp_path)
        (tmp_path / "summary.json").write_text('{"iterations": 3}')

    async def too_late():
        kill_server(tmp_path)
        return await run()

    with temporary_settings({PREFECT_API_URL: None, PREFECT_CLIENT_MAX_RETRIES: 1}):
        with pytest.raises(SystemExit) as left:
            session._watched(tmp_path, "the same command", too_late)
        assert left.value.code == 1
        said = capsys.readouterr().out
        assert "failed: Prefect's server does not answer (Failed to reach API" in said
        assert "To continue: the same command" in said
        assert "Traceback" not in said
        assert session._watched(tmp_path, "the same command", run) == {"iterations": 3}
    assert "the run is complete" in capsys.readouterr().out
