"""The Prefect server of a run: the one that the settings name, else our own for the run's folder.

Our own is a child process on a free loopback port, with SQLite in `RUN/prefect`, a random login, CSRF
protection and an exact CORS origin; it ends when the context does, and also when this process is killed
(flows/server_process.py).
"""

import os
import secrets
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from inspect import isawaitable
from pathlib import Path

from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    get_current_settings,
    temporary_settings,
)
from prefect.utilities.asyncutils import run_coro_as_sync

from flows.ending import leave_if_cancelled
from flows.terminal import entering
from rlhf_tasks.config import ConfigError

START_DEADLINE_S = 300.0  # 10-17 s on two quiet cores the first time; shared machines are slower
STOP_DEADLINE_S = 10.0
FOREIGN_ANSWER_S = 30.0  # of a server that takes the connection: a busy one may need some


@dataclass(frozen=True, slots=True)
class PrefectServer:
    """Where flows report to, and how to log in.

    api_url  http://HOST:PORT/api
    auth     `user:password`, or empty when the server asks for none
    own      True when we started it: it ends with our context
    """

    api_url: str
    auth: str
    own: bool

    @property
    def ui_url(self) -> str:
        """The address for a browser."""
        return self.api_url.removesuffix("/api")

    @property
    def ui_line(self) -> str:
        """What a terminal says of it: the address, and the login in the one piece that the login form asks for."""
        return f"Prefect UI: {self.ui_url}" + (f"   login: {self.auth}" if self.auth else "")

    @property
    def environment(self) -> dict[str, str]:
        """What other processes need to report to this server: their whole Prefect settings."""
        login = {"PREFECT_API_AUTH_STRING": self.auth} if self.auth else {}
        return {"PREFECT_API_URL": self.api_url, "DO_NOT_TRACK": "1", **login}


@contextmanager
def prefect_server(folder: Path) -> Iterator[PrefectServer]:
    """The server that this process' settings name (PREFECT_API_URL); without one, our own in
    `folder`/prefect.

    Inside the context this process' Prefect settings point to it. Raises TimeoutError when our own is not
    healthy in time.
    """
    configured = PREFECT_API_URL.value()
    if configured:
        auth = get_current_settings().api.auth_string
        yield PrefectServer(configured, auth.get_secret_value() if auth else "", own=False)
        return
    with entering("Prefect server", own_server(folder)) as server:
        yield server


def refuse_dead_server() -> None:
    """Raises ConfigError when the settings name a server and none answers there. Any answer will do: some have no
    health route for everybody."""
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return
    try:
        urllib.request.urlopen(f"{api_url}/health", timeout=FOREIGN_ANSWER_S).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLError):
            return  # Prefect has certificates of its own settings
        raise ConfigError(
            f"PREFECT_API_URL={api_url}: no Prefect server answers there ({reason}). Start it, or unset "
            "PREFECT_API_URL and the run starts its own."
        ) from None


@contextmanager
def own_server(folder: Path) -> Iterator[PrefectServer]:
    """Our own server over `folder`/prefect, which holds its data base, login and log; a finished run's
    reopens.

    Raises TimeoutError when it is not healthy in time, RuntimeError when it ends at once; both name the log.
    """
    home = (folder / "prefect").resolve()
    home.parent.mkdir(parents=True, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)  # the data base has prompts and answers
    auth = _login(home)
    with ExitStack() as stack:
        log = stack.enter_context(open(home / "server.log", "ab"))
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("server_process.py")), str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=home,
            start_new_session=True,  # Ctrl-C is for the flow, which still has to report its end
        )
        stack.callback(_stop, process)
        api_url = _address(process, home)
        _wait_healthy(process, api_url, home)
        stack.enter_context(
            temporary_settings(updates={PREFECT_API_URL: api_url, PREFECT_API_AUTH_STRING: auth})
        )
        stack.callback(_flush_logs)
        yield PrefectServer(api_url, auth, own=True)


def _login(home: Path) -> str:
    """The login of this home: made once, readable by its owner only.

    It appears whole: a server that finds an empty one would ask for none.
    """
    path = home / "auth"
    if not path.exists():
        descriptor, fresh = tempfile.mkstemp(dir=home)  # mode 0600
        with open(descriptor, "w") as file:
            file.write(f"admin:{secrets.token_urlsafe(18)}")
        with suppress(FileExistsError):
            os.link(fresh, path)
        os.unlink(fresh)
    return path.read_text()


def _address(process: subprocess.Popen[bytes], home: Path) -> str:
    """The one line that the child prints first."""
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if not line:
        raise RuntimeError(f"The Prefect server did not start. Its log: {home / 'server.log'}")
    return line


def _wait_healthy(process: subprocess.Popen[bytes], api_url: str, home: Path) -> None:
    """Poll the health route. A child that left because another server holds this home leaves that one to
    answer."""
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{api_url}/health", timeout=2):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        if process.poll() not in (None, 0):
            raise RuntimeError(
                f"The Prefect server ended with status {process.returncode}. Its log: {home / 'server.log'}"
            )
        leave_if_cancelled()
        time.sleep(0.1)
    raise TimeoutError(
        f"The Prefect server at {api_url} was not healthy within {START_DEADLINE_S:.0f} s. "
        f"Its log: {home / 'server.log'}"
    )


def _flush_logs() -> None:
    """Prefect sends logs in the background: the last ones must reach the server before it ends."""
    flushed = APILogWorker.drain_all(timeout=STOP_DEADLINE_S)
    if isawaitable(flushed):
        run_coro_as_sync(flushed)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Closing its input asks the server to leave; past the deadline it is killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_DEADLINE_S)
    finally:  # an impatient Ctrl-C may have ended the wait
        process.kill()
        process.wait()
        process.stdout.close()
