"""A server of OpenAI's completions: asked over HTTP, given weights from a folder. Standard library only.

What is asked for is what vLLM and SGLang both know: prompts as token ids, `return_token_ids`, `logprobs`, `seed`,
`stop_token_ids`, `min_tokens`, `ignore_eos`, `logit_bias`. How each takes new weights is in `DIALECTS`, by the name
under which `/v1/models` says that it owns the model. Only the configured address is asked; no redirect is followed.
"""

import http.client
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prefect_rlhf.rlhf_tasks.parallel.generate.beside import STALL_S, GenerationFault
from prefect_rlhf.rlhf_tasks.system.wires import ending

MOST_BYTES = 256 << 20  # of an answer
RETRIES, FIRST_PAUSE_S = 3, 0.5  # of a request that could not be answered; each pause is twice the last
SMALL_S = 30.0  # for a connection, and for an answer that takes no work
BUSY = 429
NEVER = (
    -100.0
)  # what is added to the logit of a token that must not be drawn: the least that OpenAI's API takes
PROBED = 5  # most probable tokens that a probe reads


class Answer(NamedTuple):
    """What was drawn after a prompt. reason: "length" where it is cut off"""

    tokens: list[int]
    logprobs: list[float]
    reason: str


class Dialect(NamedTuple):
    """How a server takes weights, and says which it has.

    take     (server, folder, name of these weights)
    current  the name of its weights, or None where it does not say
    hint     what to do where it lacks this
    """

    take: Callable[["Completions", str, str], None]
    current: Callable[["Completions"], str | None]
    hint: str


class Completions:
    """The server at an address.

    model     its name there; None: the only one
    key       of the API; None: none
    patience  factor of all waits
    Its methods may be called from several threads. They raise GenerationFault.
    """

    def __init__(self, url: str, model: str | None, key: str | None, patience: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._wanted, self._patience = model, patience
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._open: set[Callable[[], None]] = set()  # what ends each request
        self._lock = threading.Lock()
        self._aborted = False
        self._card: Mapping[str, Any] = {}
        self._dialect: Dialect | None = None

    def meet(self) -> Mapping[str, Any]:
        """What the server says about the model; from then on it can be asked."""
        cards = self.get("/v1/models").get("data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise GenerationFault(f"{self.url} does not list its models as OpenAI's API does. Correct url.")
        names = [card["id"] for card in cards]
        wanted = self._wanted if self._wanted is not None else names[0] if len(names) == 1 else None
        if wanted not in names:
            said = f"no model {wanted!r}" if wanted else "several models"
            raise GenerationFault(f"{self.url} has {said}, but {', '.join(map(str, names))}. Correct model.")
        self._card = cards[names.index(wanted)]
        owner = str(self._card.get("owned_by"))
        if owner not in DIALECTS:
            raise GenerationFault(
                f"{self.url} is a server of {owner!r}, and only those of {' and '.join(DIALECTS)} are known to take "
                "weights from a folder. Name one of these."
            )
        self._dialect = DIALECTS[owner]
        return self._card

    def take(self, folder: str, name: str) -> None:
        """Load the weights of a folder, that the server sees under the same path, and keep nothing that others have
        computed."""
        self._known().take(self, folder, name)
        if (current := self.current()) not in (name, None):
            raise GenerationFault(f"{self.url} has weights {current}, and was given {name}")

    def current(self) -> str | None:
        """The name of the weights that the server has."""
        return self._known().current(self)

    def complete(
        self,
        prompt: Sequence[int],
        seed: int,
        most: int,
        sampling: Mapping[str, Any],
        top: int = 1,
        within_s: float = math.inf,
    ) -> tuple[Answer, list[list[float]]]:
        """A response to a prompt, and the log-probabilities of the `top` most probable tokens at each place.

        sampling  temperature, top_k, top_p, min_tokens, stop_token_ids, stop, logit_bias
        within_s  as `post` has it. Many requests wait in the server's queue: who sends them leaves it out, and
                  decides when to `abort` them
        """
        self._known()
        answered = self.post(
            "/v1/completions",
            {
                **sampling,
                "top_k": sampling.get("top_k") or -1,
                "model": self._card["id"],
                "prompt": list(prompt),
                "seed": seed,
                "max_tokens": most,
                "logprobs": top,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,  # of vLLM: no two tokens of top_logprobs look alike
                "ignore_eos": True,  # its stop ids are among those of the run
                "include_stop_str_in_output": True,  # vLLM's word, and SGLang's
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
            within_s,
        )
        return self._answer(answered, prompt, most)

    def _answer(
        self, answered: Mapping[str, Any], prompt: Sequence[int], most: int
    ) -> tuple[Answer, list[list[float]]]:
        try:
            (choice,) = answered["choices"]
            tokens, read, reason = (
                choice.get("token_ids"),
                choice.get("prompt_token_ids"),
                choice["finish_reason"],
            )
            said = choice.get("logprobs") or {}
            logprobs, tops = said.get("token_logprobs"), said.get("top_logprobs") or []
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._unfit("does not answer with one choice, as OpenAI's API does") from None
        if not tokens or not all(isinstance(token, int) for token in tokens):
            raise self._unfit("returns no token ids (return_token_ids)")
        if read is not None and list(read) != list(prompt):
            raise self._unfit(
                f"has read a prompt of {len(read)} other tokens than the {len(prompt)} it was given"
            )
        if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
            raise self._unfit("returns no log-probability for each token (logprobs)")
        if not all(isinstance(each, int | float) and -math.inf < each <= 1e-3 for each in logprobs):
            raise self._unfit("returns log-probabilities that are none")
        if len(tokens) > most or reason not in ("stop", "length"):
            raise self._unfit(f"ends a response of {len(tokens)} tokens by {reason!r}")
        return Answer(tokens, logprobs, reason), [list(each.values()) for each in tops if each]

    def _unfit(self, what: str) -> GenerationFault:
        return GenerationFault(
            f"{self.url} {what}. Choose a server that does, such as vLLM or SGLang of today."
        )

    def examine(self, vocabulary: int, most_tokens: int) -> None:
        """Raise GenerationFault where the server cannot draw for a run, before anything depends on it: also where its
        log-probabilities are those before temperature, of which a second temperature would change nothing.

        most_tokens  of a sequence
        """
        room = self.meet().get("max_model_len")
        if isinstance(room, int) and room < most_tokens:
            raise GenerationFault(
                f"{self.url} takes {room:,} tokens of a sequence, and the run draws up to {most_tokens:,}. Raise its "
                "limit, or lower data.max_prompt_tokens or sampling.max_completion_length."
            )
        self.current()
        prompt = [token % vocabulary for token in range(1, 9)]
        first, second = (
            self.complete(prompt, 0, 1, {"temperature": temperature}, PROBED, STALL_S)[1][:1]
            for temperature in (1, 2)
        )
        if not first or not second or min(len(first[0]), len(second[0])) < 2:
            raise self._unfit("returns no log-probabilities of the most probable tokens (logprobs)")
        n = min(len(first[0]), len(second[0]), PROBED)  # tokens of the same text may be one
        spans = [
            likely[0] - likely[n - 1] for likely in (sorted(of[0], reverse=True) for of in (first, second))
        ]
        if not 1.5 < spans[0] / max(spans[1], 1e-9) < 3:  # twice, but for rounding
            raise GenerationFault(
                f"{self.url} returns log-probabilities as they are before the temperature. Start vLLM with "
                "--logprobs-mode processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB."
            )

    def is_on_cpus(self) -> bool:
        """Whether it is a vLLM server without GPUs."""
        if self._known() is not DIALECTS["vllm"]:
            return False
        return "device_config=cpu" in str(self.get("/server_info").get("vllm_config"))

    def abort(self) -> None:
        """From another thread: end every request. The server notices, and drops what it draws for them."""
        with self._lock:
            self._aborted = True
            for end in self._open:
                end()

    def _known(self) -> Dialect:
        if self._dialect is None:
            self.meet()
        assert self._dialect is not None
        return self._dialect

    def get(self, path: str) -> dict[str, Any]:
        return self._answered("GET", path, None, SMALL_S)

    def post(self, path: str, body: Mapping[str, Any] | None, within_s: float) -> dict[str, Any]:
        """The JSON object that a POST is answered with; {} where the answer is empty."""
        return self._answered("POST", path, None if body is None else json.dumps(body).encode(), within_s)

    def _answered(self, method: str, path: str, content: bytes | None, within_s: float) -> dict[str, Any]:
        until_s, reason = time.monotonic() + within_s * self._patience, ""
        for tried in range(RETRIES + 1):
            try:
                return self._once(method, path, content, until_s)
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                if time.monotonic() >= until_s:
                    within_s *= self._patience
                    raise GenerationFault(f"{self.url}{path} gave no answer in {within_s:.0f} s") from None
            if self._aborted:
                raise GenerationFault(f"{self.url}{path}: the request was ended")
            if tried < RETRIES:
                time.sleep(FIRST_PAUSE_S * 2**tried)
        raise GenerationFault(
            f"{self.url}{path} does not answer: {reason} ({RETRIES + 1} tries). Start it, or correct url."
        )

    def _once(self, method: str, path: str, content: bytes | None, until_s: float) -> dict[str, Any]:
        """Raises OSError and HTTPException where another try may succeed."""
        url, left_s = urlsplit(self.url), until_s - time.monotonic()
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port)
        plain = socket.create_connection(
            (connection.host, connection.port), min(max(left_s, 0.001), SMALL_S * self._patience)
        )
        plain.settimeout(None)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a body follows its headers at once
        with plain, ending(plain, until_s) as end:
            with self._lock:
                if self._aborted:
                    raise GenerationFault(f"{self.url}{path}: the request was ended")
                self._open.add(end)
            try:
                connection.sock = plain
                if url.scheme == "https":
                    connection.sock = ssl.create_default_context().wrap_socket(
                        plain, server_hostname=url.hostname
                    )
                connection.request(method, url.path + path, content, self._headers)
                response = connection.getresponse()
                answer = response.read(MOST_BYTES + 1)
            finally:
                with self._lock:
                    self._open.discard(end)
                connection.close()
        if time.monotonic() >= until_s or (response.length and len(answer) <= MOST_BYTES):
            raise http.client.IncompleteRead(answer, response.length)
        return self._read(path, response.status, answer)

    def _read(self, path: str, status: int, answer: bytes) -> dict[str, Any]:
        if status == BUSY or status >= 500:
            raise http.client.HTTPException(f"status {status}: {_said(answer)}")
        if status in (401, 403):
            raise GenerationFault(f"{self.url}{path} refuses the key (status {status}). Correct api_key_env.")
        if status == 404 and self._dialect is not None and path != "/v1/completions":
            raise GenerationFault(f"{self.url} has no {path}. {self._dialect.hint}")
        if status != http.client.OK:
            raise GenerationFault(
                f"{self.url}{path} refuses the request with status {status}: {_said(answer)}"
            )
        if len(answer) > MOST_BYTES:
            raise GenerationFault(f"{self.url}{path} answers with more than {MOST_BYTES:,} bytes")
        try:
            value = json.loads(answer or b"{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise GenerationFault(f"{self.url}{path} does not answer with a JSON object. Correct url.")
        return value


def _said(answer: bytes) -> str:
    words = " ".join(answer[:600].decode(errors="replace").split())
    return "".join(c for c in words if c.isprintable())[:300] or "no reason given"


def _vllm_takes(server: Completions, folder: str, name: str) -> None:
    """In its developers' mode, which is what reinforcement learning needs (vllm/entrypoints/serve/dev, rl/online)."""
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}, STALL_S)
    if server.post("/reset_prefix_cache", None, STALL_S).get("success") is not True:
        raise GenerationFault(f"{server.url} keeps keys and values of older weights")
    server.post("/update_weight_version", {"new_version": name}, SMALL_S)


def _sglang_takes(server: Completions, folder: str, name: str) -> None:
    """It drops its cached keys and values itself (docs.sglang.io, "SGLang for RL Systems")."""
    body = {"model_path": folder, "weight_version": name, "flush_cache": True}
    answer = server.post("/update_weights_from_disk", body, STALL_S)
    if answer.get("success") is not True:
        raise GenerationFault(f"{server.url} does not take the weights of {folder}: {answer.get('message')}")


def _weight_version(path: str) -> Callable[[Completions], str | None]:
    return lambda server: server.get(path).get("weight_version")


DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(_vllm_takes, _weight_version("/weight_info"), "Start vLLM with VLLM_SERVER_DEV_MODE=1."),
    "sglang": Dialect(_sglang_takes, _weight_version("/get_model_info"), "Install SGLang 0.5 or later."),
}
"""Owner of the model -> how its server takes weights."""
