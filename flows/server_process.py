"""Process entry point: one Prefect server for one run folder, which ends when its parent does.

Usage: python -P server_process.py HOME

HOME is the server's own PREFECT_HOME; its file `auth` holds the login. The process picks a free port on
loopback, writes its address to HOME/api-url, prints it as one line, and serves until its standard input
closes: the kernel closes that pipe however the parent dies. One server per HOME (flock): a second one prints
the address of the first, and exits.
"""

import fcntl
import os
import socket
import sys
import threading
from pathlib import Path


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


def stop_with_parent(server) -> None:
    """Let the server finish as soon as standard input closes; leave for good 5 s later."""
    sys.stdin.buffer.read()
    server.should_exit = True
    threading.Event().wait(5)
    os._exit(0)


def main(home: Path) -> None:
    # The handle stays open, and the lock held, as long as the process lives.
    lock = open(home / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print((home / "api-url").read_text(), flush=True)
        return
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    environment = settings(home, listener.getsockname()[1], (home / "auth").read_text())
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ.update(environment)
    (home / "api-url").write_text(environment["PREFECT_API_URL"])
    print(environment["PREFECT_API_URL"], flush=True)

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
    main(Path(sys.argv[1]))
