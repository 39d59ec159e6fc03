"""The Prefect server of a run: the configured one (PREFECT_API_URL), else our own for the run's folder.

Our own is a child process on a free loopback port, with SQLite in `RUN/prefect`, a random login, CSRF protection and
an exact CORS origin (flows/cluster/server_process.py). It ends when the context does, and also when this process is
killed. If it dies before that, it is restarted with the same address, login and database.
"""

import logging
import os
import secrets
import select
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path
from urllib.parse import urlsplit

from httpx import Client, HTTPError, HTTPStatusError, InvalidURL
from prefect.client.orchestration import get_client
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    get_current_settings,
    temporary_settings,
)
from prefect.utilities.asyncutils import run_coro_as_sync

from prefect_rlhf.flows.cluster.shutdown import leave_if_cancelled
from prefect_rlhf.flows.view.prefect_api import NO_LOGIN
from prefect_rlhf.flows.view.terminal import entering
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.system.child_processes import python_call
from prefect_rlhf.rlhf_tasks.system.reading import one_line

START_DEADLINE_S = 300.0  # 4 s on two quiet cores, 10-17 the first time; shared machines are slower
STOP_DEADLINE_S = 10.0
FOREIGN_ANSWER_S = 30.0  # to wait for a configured server's answer: a busy one may be slow
RESTARTS = 5  # of a server that keeps dying
LIVED_S = 600.0  # if it lived longer than this, the restarts are counted from 0 again

logger = logging.getLogger(__name__)


class ServerError(RuntimeError):
    """Our own server does not start; the message names its log."""


@dataclass(frozen=True, slots=True)
class PrefectServer:
    """The server that flows report to, and its login.

    api_url  http://HOST:PORT/api
    auth     `user:password`; "" when the server needs no login
    own      True when we started it; it then ends with the context
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
        """The line for the terminal: the address, and the login in one piece, as the login form asks for it."""
        return f"Prefect UI: {self.ui_url}" + (f"   login: {self.auth}" if self.auth else "")

    @property
    def environment(self) -> dict[str, str]:
        """What other processes need to report to this server: their whole Prefect settings."""
        login = {"PREFECT_API_AUTH_STRING": self.auth} if self.auth else {}
        return {"PREFECT_API_URL": self.api_url, "DO_NOT_TRACK": "1", **login}


@contextmanager
def prefect_server(folder: Path) -> Iterator[PrefectServer]:
    """The server in this process's settings (PREFECT_API_URL); without one, our own in `folder`/prefect.

    Inside the context this process's Prefect settings point to it. Raises ServerError when our own does not start.
    """
    configured = PREFECT_API_URL.value()
    if configured:
        auth = get_current_settings().api.auth_string
        yield PrefectServer(configured, auth.get_secret_value() if auth else "", own=False)
        return
    with entering("Prefect server", own_server(folder)) as server:
        yield server


def refuse_dead_server() -> None:
    """Raises ConfigError when the configured server does not answer or refuses the login, and when the environment
    names a proxy that clients cannot use.

    Any other answer is accepted, because some servers do not have the route that is asked for.
    """
    try:
        Client().close()
    except (ImportError, ValueError) as error:  # a SOCKS proxy without its package, an unknown kind
        raise ConfigError(
            f"the environment names a proxy that cannot be used: {one_line(str(error))}. Unset ALL_PROXY, or install "
            "what it needs."
        ) from None
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return
    try:
        with (
            temporary_settings(
                {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: FOREIGN_ANSWER_S}
            ),
            get_client(sync_client=True) as client,
        ):
            client.hello()
    except HTTPStatusError as error:
        status = error.response.status_code
        if status in NO_LOGIN:
            raise ConfigError(
                f"PREFECT_API_URL={api_url}: the login was refused there (status {status}). Set "
                "PREFECT_API_AUTH_STRING or PREFECT_API_KEY to one that the server knows."
            ) from None
    except (HTTPError, InvalidURL, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"PREFECT_API_URL={api_url}: no Prefect server answers there ({error}). Start it, or unset "
            "PREFECT_API_URL and the run starts its own."
        ) from None


@contextmanager
def own_server(folder: Path) -> Iterator[PrefectServer]:
    """Our own server on `folder`/prefect, which has its database, login and log. Also reopens that of a finished run.

    Raises ServerError when it ends at once, or is not healthy in time.
    """
    home = (folder / "prefect").resolve()
    home.parent.mkdir(parents=True, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)  # the database has prompts and answers
    auth = _login(home)
    served = OwnServer(home)
    with ExitStack() as stack:
        stack.callback(served.stop)
        api_url = served.start()
        stack.enter_context(
            temporary_settings(updates={PREFECT_API_URL: api_url, PREFECT_API_AUTH_STRING: auth})
        )
        stack.callback(_flush_logs)
        yield PrefectServer(api_url, auth, own=True)


class OwnServer:
    """The process of our own server, and a thread that restarts it when it dies.

    home  its PREFECT_HOME
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._turn = threading.Lock()  # held while the server is started or stopped
        self._watching = threading.Thread(target=self._watch, name="prefect-server", daemon=True)

    def start(self) -> str:
        """Start the server. Returns its address as soon as it answers. Raises ServerError."""
        self._process = self._spawn(0)
        self._api_url = self._address(self._process)
        self._wait_healthy(self._process)
        self._watching.start()
        return self._api_url

    def stop(self) -> None:
        """Ask the server to end, by closing its standard input; kill it after STOP_DEADLINE_S."""
        with self._turn:
            self._stopping.set()
            process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_DEADLINE_S)
        finally:  # an impatient Ctrl-C may have ended the wait
            process.kill()
            process.wait()
            _close_pipes(process)

    def _watch(self) -> None:
        """Restart a server that has died, up to RESTARTS times. Status 0 means that another server uses the same
        home."""
        again = 0
        while True:
            assert self._process is not None
            began_s = time.monotonic()
            status = self._process.wait()
            _close_pipes(self._process)
            if time.monotonic() - began_s >= LIVED_S:
                again = 0
            self._stopping.wait(2.0 * again)  # seconds: the reason why it died so soon may be temporary
            with self._turn:
                if self._stopping.is_set() or status == 0:
                    return
                if again == RESTARTS:
                    logger.warning(
                        "the Prefect server has died %d times; the run continues without it", again + 1
                    )
                    return
                logger.warning("the Prefect server has died (status %d); it is started again", status)
                self._process = self._spawn(urlsplit(self._api_url).port or 0)
            again += 1
            with suppress(ServerError):  # it has died once more
                self._address(self._process)

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        with open(self._home / "server.log", "ab") as log:
            return subprocess.Popen(
                python_call("prefect_rlhf.flows.cluster.server_process:main", str(self._home), str(port)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._home,
                start_new_session=True,  # Ctrl-C is for the flow, which still has to report its end
            )

    def _address(self, process: subprocess.Popen[bytes]) -> str:
        """Read the address from the child's first line; log what the line says about a damaged database."""
        assert process.stdout is not None
        answers, _, _ = select.select([process.stdout], [], [], START_DEADLINE_S)
        if not answers:
            raise ServerError(
                f"The Prefect server has printed no address within {START_DEADLINE_S:.0f} s. Its log: "
                f"{self._home / 'server.log'}"
            )
        address, _, said = process.stdout.readline().decode().strip().partition(" ")
        if not address:
            raise ServerError(f"The Prefect server did not start. Its log: {self._home / 'server.log'}")
        if said:
            logger.warning("%s", said)
        return address

    def _wait_healthy(self, process: subprocess.Popen[bytes]) -> None:
        """Poll the health route. If the child exited because another server has this home, that one answers."""
        log = self._home / "server.log"
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self._api_url}/health", timeout=2):
                    return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                pass
            if process.poll() not in (None, 0):
                raise ServerError(
                    f"The Prefect server ended with status {process.returncode}. Its log: {log}"
                )
            leave_if_cancelled()
            time.sleep(0.1)
        raise ServerError(
            f"The Prefect server at {self._api_url} was not healthy within {START_DEADLINE_S:.0f} s. Its log: {log}"
        )


def _login(home: Path) -> str:
    """The login of this home, made once and readable only by its owner.

    The file is created with its content, because a server that reads an empty file would require no login.
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


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _flush_logs() -> None:
    """Send the last logs before the server ends: Prefect sends them in the background."""
    flushed = APILogWorker.drain_all(timeout=STOP_DEADLINE_S)
    if isawaitable(flushed):
        run_coro_as_sync(flushed)
