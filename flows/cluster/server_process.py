"""Process entry point: one Prefect server for one run folder, which ends when its parent does.

Usage: python -P server_process.py HOME [PORT]

HOME is the server's own PREFECT_HOME; its file `auth` holds the login. The process takes PORT, by default a free
one, on loopback, writes its address to HOME/api-url, prints it as one line, and serves until its standard input
closes: the kernel closes that pipe however the parent dies. One server per HOME (flock): a second one prints
the address of the first, and exits. A data base that cannot be used is put aside; the line then says so after the
address.
"""

import fcntl
import os
import socket
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

LOCKED_S = 10.0  # nobody else writes to the data base: who holds its lock for so long will not let go


def settings(home: Path, port: int, auth: str) -> dict[str, str]:
    """The server's environment: nothing of the user's own Prefect profile, locked down, no telemetry."""
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
    """Why a data base cannot be used; empty when it can, or is not there."""
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
    """Rename a data base that cannot be used, with its log; one sentence about it, or nothing."""
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


def stop_with_parent(server) -> None:
    """Let the server finish as soon as standard input closes; leave for good 5 s later."""
    sys.stdin.buffer.read()
    server.should_exit = True
    threading.Event().wait(5)
    os._exit(0)


def main(home: Path, port: int) -> None:
    """Serve `home` on `port` (0: a free one) until the parent ends."""
    # The handle stays open, and the lock held, as long as the process lives.
    lock = open(home / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print((home / "api-url").read_text(), flush=True)
        return
    said = put_aside(home / "prefect.db")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a server that was killed
    listener.bind(("127.0.0.1", port))
    environment = settings(home, listener.getsockname()[1], (home / "auth").read_text())
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ.update(environment)
    (home / "api-url").write_text(environment["PREFECT_API_URL"])
    print(environment["PREFECT_API_URL"], said, flush=True)

    import uvicorn  # Prefect reads its settings when it is imported

    server = uvicorn.Server(
        uvicorn.Config(
            "prefect.server.api.server:create_app",
            factory=True,
            log_level="warning",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=2,
        )
    )
    threading.Thread(target=stop_with_parent, args=(server,), daemon=True).start()
    server.run(sockets=[listener])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
