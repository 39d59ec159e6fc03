"""A small server of completions that speaks SGLang's words. MODE says how it misbehaves."""

import json
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from safetensors.torch import load_file
from torch import uint8

TOKENS = 5
QUEUE_S = 0.25  # of a completion, one after another
KEY = "word"


class CompletionServer(ThreadingHTTPServer):
    """Draws TOKENS tokens that follow from a request's seed and the weights it has loaded.

    mode  how it misbehaves; see `_Handler`
    log   path and body of each request
    """

    daemon_threads = True

    def __init__(self, vocabulary: int, mode: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.vocabulary, self.mode, self.fails = vocabulary, mode, 0
        self.version, self.sum, self.log, self.lock = "default", 0, list[tuple[str, Any]](), Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bodies(self, path: str) -> list[Any]:
        return [body for where, body in self.log if where == path]


class _Handler(BaseHTTPRequestHandler):
    server: CompletionServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._answer(json.loads(self.rfile.read(length) or b"{}"))

    def _answer(self, body: Any) -> None:
        server, mode = self.server, self.server.mode
        with server.lock:
            server.log.append((self.path, body))
            server.fails += mode == "busy" and self.path == "/v1/completions"
        if mode == "key" and self.headers.get("Authorization") != f"Bearer {KEY}":
            return self._send(401, {"error": "no"})
        if mode == "text":
            return self._send(200, "hello")
        if mode == "down" or (mode == "busy" and self.path == "/v1/completions" and server.fails <= 2):
            return self._send(503, {"error": "later"})
        if mode == "refuses" and self.path == "/v1/completions":
            return self._send(400, {"error": "prompt: give a text"})
        if mode == "hang" and self.path == "/v1/completions":
            time.sleep(60)
        if mode == "queue" and self.path == "/v1/completions":
            with server.lock:
                time.sleep(QUEUE_S)
        if mode == "drips":
            return self._drip()
        if mode == "old" and self.path != "/v1/models":
            return self._send(404, {})
        paths = {
            "/v1/models": self._models,
            "/get_model_info": lambda _: {"weight_version": server.version},
            "/update_weights_from_disk": self._take,
            "/v1/completions": self._complete,
        }
        if self.path not in paths:
            return self._send(404, {})
        self._send(200, paths[self.path](body))

    def _send(self, status: int, value: Any) -> None:
        content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _drip(self) -> None:
        """A byte now and then: no single wait is long, the whole answer takes ten seconds and more."""
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        with suppress(OSError):
            for _ in range(100):
                self.wfile.write(b" ")
                time.sleep(0.1)

    def _models(self, _: Any) -> Any:
        owner = "someone" if self.server.mode == "owner" else "sglang"
        names = ["policy", "other"] if self.server.mode == "several" else ["policy"]
        length = 16 if self.server.mode == "short" else 4096
        return {"data": [{"id": name, "owned_by": owner, "max_model_len": length} for name in names]}

    def _take(self, body: Any) -> Any:
        if self.server.mode == "keeps":
            return {"success": False, "message": "out of memory"}
        weights = load_file(Path(body["model_path"]) / "model.safetensors")
        self.server.sum = int(sum(t.view(uint8).long().sum() for t in weights.values()))
        self.server.version = "another" if self.server.mode == "version" else body["weight_version"]
        return {"success": True, "message": ""}

    def _complete(self, body: Any) -> Any:
        server, mode = self.server, self.server.mode
        most = server.vocabulary + (mode == "vocabulary")
        n = min(TOKENS, body["max_tokens"])
        tokens = [(body["seed"] + server.sum + 31 * place) % server.vocabulary for place in range(n)]
        if mode == "vocabulary":
            tokens[-1] = most - 1
        if mode == "changed":
            server.version = "of another run"
        heat = 1.0 if mode == "raw" else body["temperature"] or 1.0
        tops = [{f"token_id:{rank}": -1.0 - rank / heat for rank in range(body["logprobs"])}] * n
        choice: dict[str, Any] = {
            "finish_reason": "abort" if mode == "aborts" else "length",
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"][1:] if mode == "prompt" else body["prompt"],
            "logprobs": {"token_logprobs": [-1.0] * n, "top_logprobs": tops},
        }
        if mode == "no ids":
            del choice["token_ids"]
        if mode == "no logprobs":
            choice["logprobs"] = None
        if mode == "null":
            choice["logprobs"]["token_logprobs"][0] = None
        return {"choices": [choice]}
