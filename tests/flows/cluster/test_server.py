"""The run's own Prefect server: locked down, reopened with its data, gone with its parent."""

import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from contextlib import closing, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from prefect import flow
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from prefect_rlhf.flows.cluster import server_process
from prefect_rlhf.flows.cluster.server import (
    RESTARTS,
    OwnServer,
    ServerError,
    _login,
    own_server,
    prefect_server,
    refuse_dead_server,
)
from prefect_rlhf.flows.cluster.server_process import begin_database, empty_database, put_aside
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.system.child_processes import python_call
from tests.loopback import served

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
ANSWER_S = 120.0  # of a server that has only just started, on a busy machine
REOPEN = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from prefect_rlhf.flows.cluster.server import own_server
    with own_server(Path(sys.argv[1])) as server:
        print(server.api_url, server.auth, flush=True)
        time.sleep(600)
""")


GARBAGE = textwrap.dedent("""
    import gc, sqlite3, sys, threading
    from prefect_rlhf.flows.cluster import server_process
    server_process.COLLECT_EVERY_S = 3.0
    server_process.collect_beside()
    database, waits_s = sys.argv[1], float(sys.argv[2])
    has_lock = sqlite3.connect(database, isolation_level=None)
    has_lock.execute("BEGIN IMMEDIATE")
    waits = sqlite3.connect(database, timeout=waits_s, isolation_level=None, check_same_thread=False)
    garbage = [waits.execute("SELECT 1 UNION SELECT 2")]
    garbage.append(garbage)
    outcome = []
    def write():
        try:
            waits.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            outcome.append(str(error))
    writer = threading.Thread(target=write)
    writer.start()
    writer.join(1)
    del garbage
    objects = [[] for _ in range(10 * gc.get_threshold()[0])]
    has_lock.execute("ROLLBACK")
    writer.join()
    print(outcome)
""")

# In a process of its own, as the collector is the whole process's.
OLD_GARBAGE = textwrap.dedent("""
    import time, weakref
    from prefect_rlhf.flows.cluster import server_process
    server_process.COLLECT_EVERY_S = 0.05
    server_process.collect_beside()
    class Kept: pass
    kept = Kept()
    kept.itself, alive = kept, weakref.ref(kept)
    time.sleep(0.5)  # several collections have seen it
    del kept
    deadline = time.monotonic() + 20
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    print(alive())
""")


@flow(name="recorded")
def recorded() -> int:
    return 3


def asked(api_url: str, auth: str, path: str, **body: Any) -> Any:
    """The answer to a POST, as JSON."""
    user, password = auth.split(":")
    with httpx.Client(base_url=api_url, auth=(user, password), timeout=ANSWER_S) as client:
        token = client.get("/csrf-token", params={"client": "test"}).json()["token"]
        headers = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "test"}
        return client.post(path, headers=headers, json=body).json()


def count_runs(api_url: str, auth: str) -> int:
    return asked(api_url, auth, "/flow_runs/count")


def names_of_runs(api_url: str, auth: str) -> list[str]:
    return [run["name"] for run in asked(api_url, auth, "/flow_runs/filter", limit=200)]


def test_server_is_locked_down_reopens_and_dies_with_its_parent(tmp_path):
    with own_server(tmp_path) as server:
        assert PREFECT_API_URL.value() == server.api_url
        assert recorded() == 3
        assert stat.S_IMODE((tmp_path / "prefect" / "auth").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "prefect").stat().st_mode) == 0o700
        with httpx.Client(timeout=ANSWER_S) as client:
            assert client.get(f"{server.api_url}/flows/filter").status_code in (401, 405)
            assert client.post(f"{server.api_url}/flow_runs/count").status_code in (401, 403)
            user, password = server.auth.split(":")
            no_csrf = client.post(f"{server.api_url}/flow_runs/count", auth=(user, password))
            assert no_csrf.status_code == 403
            evil = client.get(f"{server.api_url}/health", headers={"Origin": "http://evil.example"})
            assert "access-control-allow-origin" not in evil.headers
            assert client.get(f"{server.ui_url}/ui-settings").json()["api_url"] == server.api_url
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.api_url}/health")

    elsewhere = f"sqlite+aiosqlite:///{tmp_path / 'other.db'}"  # of the user's own Prefect: not our server's
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": elsewhere,
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", REOPEN, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        api_url, auth = parent.stdout.readline().split()
        assert auth == server.auth
        assert count_runs(api_url, auth) == 1
        (served,) = psutil.Process(parent.pid).children()
        served.suspend()  # even so
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{api_url}/health", timeout=5)
        except httpx.ConnectError:
            return
        except httpx.TransportError:
            pass  # it is slow, or about to end
        time.sleep(0.2)
    pytest.fail("the server outlived its parent by 60 s")


@pytest.mark.whole
def test_a_cursor_that_becomes_garbage_does_not_stop_the_server_while_its_connection_waits(tmp_path):
    """Whoever has the database's lock goes on, so the connection's statement gets it."""
    arguments = [sys.executable, "-c", GARBAGE, str(tmp_path / "db"), "20"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_what_becomes_garbage_late_is_collected_sooner_than_a_lock_would_be_a_fault():
    """Most collections look only at what is young."""
    done = subprocess.run(
        [sys.executable, "-c", OLD_GARBAGE], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.stdout == "None\n", done.stderr
    assert server_process.COLLECT_EVERY_S * server_process.ALL_EVERY < server_process.LOCKED_S


def test_a_server_that_is_killed_comes_back_with_its_data_at_the_same_address(tmp_path, caplog, monkeypatch):
    """Links and clients have the address, so it wants its own port back, and waits for it where somebody has taken
    it meanwhile; a new server has another port."""
    monkeypatch.setattr(
        "prefect_rlhf.flows.cluster.server.RESTARTS", 1000
    )  # however long the port stays taken
    again = "the Prefect server has died (status -9); it is started again"
    with caplog.at_level("WARNING", "prefect_rlhf.flows.cluster.server"), own_server(tmp_path) as server:
        assert recorded() == 3
        (killed,) = servers_of(tmp_path)
        killed.kill()
        while killed in (found := servers_of(tmp_path)) or not found:
            time.sleep(0.1)
        wait_answer(server.api_url)
        assert count_runs(server.api_url, server.auth) == 1
        assert said(caplog) == [again]

        address = ("127.0.0.1", httpx.URL(server.api_url).port or 0)
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            (killed,) = servers_of(tmp_path)
            killed.kill()
            while True:
                with suppress(OSError):  # it has not ended yet
                    taken.bind(address)
                    break
            taken.listen()
            while len(said(caplog)) < 3:  # the first that is started again finds the port taken
                time.sleep(0.1)
            assert httpx.URL(address_of_new_server(tmp_path / "other")).port != address[1]
        wait_answer(server.api_url)
        assert count_runs(server.api_url, server.auth) == 1
    assert said(caplog)[1] == again
    assert "it is started again" in said(caplog)[2]
    assert servers_of(tmp_path) == []


def address_of_new_server(home: Path) -> str:
    """What the process of a new server says as soon as it has a port. It ends before it serves."""
    home.mkdir()
    _login(home)
    with subprocess.Popen(
        python_call("prefect_rlhf.flows.cluster.server_process:main", str(home), "0"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        process.kill()
    return address


def said(caplog):
    return [
        record.getMessage() for record in caplog.records if record.name == "prefect_rlhf.flows.cluster.server"
    ]


def servers_of(folder):
    """Our child processes that serve a folder."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie among them
            if str(folder / "prefect") in child.cmdline():
                found.append(child)
    return found


def wait_answer(api_url, seconds=240.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return httpx.get(f"{api_url}/health", timeout=5).raise_for_status()
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail("the server did not come back")


def sound(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE rows (text)")
        connection.executemany("INSERT INTO rows VALUES (?)", [("x" * 1000,)] * 100)
        connection.commit()


def no_data_base(path):
    path.write_bytes(os.urandom(50_000))


def cut_off(path):
    sound(path)
    os.truncate(path, 50_000)


def overwritten(path):
    sound(path)
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * 20_000)


@pytest.mark.parametrize("spoil", [no_data_base, cut_off, overwritten])
def test_a_damaged_data_base_is_put_aside(tmp_path, spoil):
    path = tmp_path / "prefect.db"
    spoil(path)
    spoilt = path.read_bytes()
    assert f"{path} cannot be used (" in put_aside(path)
    (kept,) = tmp_path.glob("prefect.db.damaged-*")
    assert kept.read_bytes() == spoilt
    assert not path.exists()
    assert put_aside(path) == ""


def test_a_sound_data_base_stays_and_one_that_is_locked_is_put_aside(tmp_path, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.cluster.server_process.LOCKED_S", 0.1)
    path = tmp_path / "prefect.db"
    sound(path)
    assert put_aside(path) == ""
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        assert "is locked" in put_aside(path)
    assert not path.exists()


@pytest.mark.slow
def test_a_damaged_data_base_is_replaced_by_an_empty_one_that_the_first_server_of_an_account_makes(
    tmp_path, caplog, monkeypatch
):
    """That of the run folder, and that of the account, which is as good as none. Later servers copy what was made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = empty_database()
    for spoilt in (tmp_path / "prefect" / "prefect.db", kept):
        spoilt.parent.mkdir(parents=True)
        no_data_base(spoilt)
    with caplog.at_level("WARNING", "prefect_rlhf.flows.cluster.server"), own_server(tmp_path) as server:
        assert recorded() == 3
        assert count_runs(server.api_url, server.auth) == 1
    (line,) = said(caplog)
    assert "Prefect begins with an empty one" in line
    with closing(sqlite3.connect(kept)) as made:
        assert made.execute("SELECT count(*) FROM flow_run").fetchone() == (0,)
        made.execute("CREATE TABLE mark (of INT)")
    begin_database(tmp_path / "second.db")
    with closing(sqlite3.connect(tmp_path / "second.db")) as copied:
        assert copied.execute("SELECT count(*) FROM mark").fetchone() == (0,)


@pytest.mark.parametrize("auth", ["", "admin:secret"])
def test_configured_server_is_used(tmp_path, auth):
    configured = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_API_AUTH_STRING: auth or None}
    with temporary_settings(configured), prefect_server(tmp_path) as server:
        assert (server.api_url, server.auth, server.own) == ("http://127.0.0.1:9/api", auth, False)
        assert server.environment.get("PREFECT_API_AUTH_STRING", "") == auth
    assert not (tmp_path / "prefect").exists()


@pytest.mark.parametrize("status", [200, 404, 401, 403])
def test_a_login_that_is_refused_is_said_before_the_start(status, monkeypatch):
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Authorization"])
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with served(HTTPServer(("127.0.0.1", 0), Answers)) as server:
        api_url = f"http://127.0.0.1:{server.server_port}/api"
        refusal = pytest.raises(ConfigError, match=f"{api_url}: the login was refused .*{status}")
        with (
            temporary_settings({PREFECT_API_URL: api_url, PREFECT_API_AUTH_STRING: "me:mine"}),
            refusal if status in (401, 403) else nullcontext(),
        ):
            refuse_dead_server()
    assert set(asked) == {"Basic bWU6bWluZQ=="}


def test_a_server_that_lives_long_may_die_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.cluster.server.LIVED_S", 0.0)
    server, begun = OwnServer(tmp_path), []

    def spawn(_):
        begun.append(1)
        if len(begun) == 3 * RESTARTS:
            server._stopping.set()
        return SimpleNamespace(wait=lambda: -9, stdin=None, stdout=None)

    server._process, server._api_url = spawn(0), "http://127.0.0.1:1/api"
    monkeypatch.setattr(server, "_spawn", spawn)
    monkeypatch.setattr(server, "_address", lambda _: "")
    server._watch()
    assert len(begun) == 3 * RESTARTS


@pytest.mark.timeout(60)
def test_a_server_that_tells_no_address_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.cluster.server.START_DEADLINE_S", 0.1)
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE) as silent:
        try:
            with pytest.raises(ServerError, match="has printed no address within"):
                OwnServer(tmp_path)._address(silent)
        finally:
            silent.kill()


def test_a_login_is_never_empty_even_when_its_writing_was_cut_off(tmp_path, monkeypatch):
    def cut_off(_):
        raise OSError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr("prefect_rlhf.flows.cluster.server.secrets.token_urlsafe", cut_off)
        with pytest.raises(OSError, match="cut off"):
            _login(tmp_path)
    assert len(_login(tmp_path)) > len("admin:") + 20
