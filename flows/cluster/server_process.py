"""Process entry point: one Prefect server for one run folder, which ends when its parent does.

HOME is the server's own PREFECT_HOME; its file `auth` holds the login. The process listens on loopback, on the port
that it is told, or on a free one. It writes its address to HOME/api-url, prints it as one line, and serves until its
standard input closes: the kernel closes that pipe however the parent dies, and wakes this process if it is stopped.
There is one server per HOME (flock): a second one prints the address of the first, and exits. A database that cannot
be used is renamed; the line then says so after the address. A new database is a copy of an empty one, which the first
server of an account makes.
"""

import asyncio
import fcntl
import gc
import itertools
import os
import shutil
import socket
import sqlite3
import sys
import threading
import time
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

from prefect_rlhf.rlhf_tasks.system.child_processes import wake_after_parent

COLLECT_EVERY_S = 2.0
ALL_EVERY = 4  # collections: others look only at what is young. Below LOCKED_S: garbage may hold a lock
LOCKED_S = 10.0  # to wait for the database's lock: only this server writes to it, so a longer lock is a fault


def settings(home: Path, port: int, auth: str) -> dict[str, str]:
    """The server's environment: nothing from the user's own Prefect profile, login required, no telemetry."""
    origin = f"http://127.0.0.1:{port}"
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"{origin}/api",
        "PREFECT_API_AUTH_STRING": auth,
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origin,
        "PREFECT_UI_API_URL": f"{origin}/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def damage(database: Path) -> str:
    """Why a database cannot be used; "" when it can, or does not exist."""
    if not database.exists():
        return ""
    try:
        with closing(sqlite3.connect(database, timeout=LOCKED_S, isolation_level=None)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        return str(error)
    return "" if found == "ok" else str(found)


def put_aside(database: Path) -> str:
    """Rename a database that cannot be used, with its log. Returns a sentence about it; "" when it can be used."""
    reason = damage(database)
    if not reason:
        return ""
    kept = f"{database.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", "-wal", "-shm"):
        part = database.with_name(database.name + suffix)
        if part.exists():
            part.rename(database.with_name(kept + suffix))
    return (
        f"{database} cannot be used ({reason}): it is kept as {kept}, and Prefect begins with an empty one."
    )


def empty_database() -> Path:
    """Where this account keeps the empty database of the installed Prefect."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "prefect-rlhf" / f"prefect-{version('prefect')}.db"


def begin_database(database: Path) -> None:
    """Make a new database, with Prefect's tables. Its settings must be in the environment.

    Prefect makes the tables by all migrations since its first release, which takes four seconds of a core and waits
    for the disk three hundred times. So that is done once, and later databases are copies.
    """
    kept = empty_database()
    if kept.exists() and not damage(kept):
        shutil.copyfile(kept, database)
        return
    from prefect.server.database import provide_database_interface

    asyncio.run(provide_database_interface().create_db())
    with suppress(OSError):  # without a cache that can be written, the next server migrates again
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{os.getpid()}.tmp")
        try:
            with closing(sqlite3.connect(database)) as made, closing(sqlite3.connect(partial)) as copy:
                made.backup(copy)
            partial.replace(kept)
        finally:
            partial.unlink(missing_ok=True)


def stop_with_parent(server) -> None:
    """Ask the server to finish as soon as standard input closes; exit 5 s later in any case."""
    sys.stdin.buffer.read()
    server.should_exit = True
    threading.Event().wait(5)
    os._exit(0)


def collect_beside() -> None:
    """Collect garbage in a thread of its own from now on, never in the server's event loop.

    A cursor among the garbage is reset, which waits for the mutex of its connection. A statement that waits for the
    database's lock holds that mutex, up to 60 s in Prefect. If the loop collected, it would stop for as long, and
    with it the request that has the lock.
    """
    gc.disable()
    gc.collect()
    gc.freeze()  # what is there stays: to look at all of it takes a fifth of a second, in which nobody is served

    def collect() -> None:
        for number in itertools.count(1):
            time.sleep(COLLECT_EVERY_S)
            gc.collect(1 if number % ALL_EVERY else 2)

    threading.Thread(target=collect, name="garbage", daemon=True).start()


def main(folder: str, port: str) -> None:
    """Serve the home `folder` on `port` (0: a free one) until the parent ends."""
    wake_after_parent(os.getppid())
    home = Path(folder)
    # The handle stays open, and the lock held, as long as the process lives.
    lock = open(home / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print((home / "api-url").read_text(), flush=True)
        return
    said = put_aside(home / "prefect.db")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # to take over the port of a killed server
    listener.bind(("127.0.0.1", int(port)))
    environment = settings(home, listener.getsockname()[1], (home / "auth").read_text())
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ.update(environment)
    (home / "api-url").write_text(environment["PREFECT_API_URL"])
    print(environment["PREFECT_API_URL"], said, flush=True)

    if not (home / "prefect.db").exists():
        begin_database(home / "prefect.db")

    import uvicorn  # Prefect reads its settings when it is imported

    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        log_level="warning",
        timeout_keep_alive=60,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    threading.Thread(target=stop_with_parent, args=(server,), daemon=True).start()
    config.load()
    collect_beside()
    server.run(sockets=[listener])
