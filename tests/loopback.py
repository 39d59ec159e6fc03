"""HTTP servers on loopback that stand for services elsewhere."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any, TypeVar

S = TypeVar("S", bound=HTTPServer)


@contextmanager
def served(server: S) -> Iterator[S]:
    """A server that answers until the end."""
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Service(ThreadingHTTPServer):
    """Answers what is posted: JSON, by JSON.

    says   (a request's body) -> what is answered
    asked  the requests in order: `path`, `login` (the header Authorization) and what the body has
    """

    def __init__(self, says: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.says, self.asked, self.came = says, list[dict[str, Any]](), Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def wait_for(self, n: int) -> None:
        """Until n requests have come; fails after a minute."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.asked) >= n, 60), f"{len(self.asked)} requests came"


class _Handler(BaseHTTPRequestHandler):
    server: Service  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.came:
            self.server.asked.append({"path": self.path, "login": self.headers.get("Authorization"), **body})
            self.server.came.notify_all()
        data = json.dumps(self.server.says(body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...
