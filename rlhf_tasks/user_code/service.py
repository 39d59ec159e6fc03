"""A reward that an HTTP service computes: answers are sent as JSON, values come back. Standard library only.

Only the configured address is asked. Its host is resolved once for each try, every address found must be a public one
unless the configuration allows private ones, and the first of these very addresses that can be connected to is asked;
a redirect is refused. Time and size of an answer are bounded, and so are retries.
"""

import asyncio
import http.client
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prefect_rlhf.rlhf_tasks.system.wires import HEADER_VALUE, ending
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.forms import Parameters, Reward

MOST_BYTES = 16 << 20  # of an answer
RETRIES = 3  # of a request that cannot be sent, or whose service is busy
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # between tries; twice as long after each
NOT_FOR_US = (401, 403, 404, 405)  # whatever is asked: the address or the login is at fault
BUSY = 429
_NOT_PUBLIC = [
    ipaddress.ip_network(each)
    for each in ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "fec0::/10", "192.88.99.0/24")
]
"""Addresses that Python takes for global ones: IPv6 that stands for an IPv4 address of whatever kind (RFC 4291,
2765, 6052), of one site (RFC 3879), and of relays between both (RFC 7526)."""
_OURS = {"completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric"}


class RequestError(RewardError):
    """The service fails for one request; for other answers it may not."""


class _Again(Exception):
    """A try has failed, another may succeed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address that is asked by POST.

    who        begins a sentence about it: `reward 'judge'`
    headers    with their secrets resolved
    timeout_s  seconds of a request; `timeout_of` says in a sentence what sets them
    """

    who: str
    url: str
    headers: Mapping[str, str]
    timeout_s: float
    timeout_of: str
    allow_private: bool

    def refuse_headers(self) -> None:
        """Raises RewardError for a header that cannot be sent."""
        for header, value in self.headers.items():
            if not HEADER_VALUE.fullmatch(str(value)):  # not shown: it may be a secret
                raise RewardError(
                    f"{self.who}: the value of the header {header} has a line break or another character "
                    "that no header may have. Remove it where the value is set."
                )

    async def answer(self, body: Mapping[str, Any]) -> Any:
        """The JSON that a body is answered with. Raises RewardError, RequestError among them."""
        thread = ThreadPoolExecutor(1, "service")  # its own: asyncio's has too few for many requests at once
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, self._ask, body)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, body: Mapping[str, Any]) -> Any:
        """What the service answers to a request. Raises RewardError, RequestError among them."""
        content = json.dumps(body, default=str).encode()
        fault: Exception | None = None
        for tried in range(RETRIES + 1):
            try:
                return self._posted(content)
            except _Again as failure:
                fault = failure
            if tried < RETRIES:
                time.sleep(min(FIRST_PAUSE_S * 2**tried, LONGEST_PAUSE_S))
        raise RequestError(f"{self.who}: {self.url} {fault} ({RETRIES + 1} tries).")

    def _posted(self, content: bytes) -> Any:
        """The JSON that a POST is answered with. Raises RewardError, RequestError where its time is over, and
        _Again."""
        url = urlsplit(self.url)
        host, port = url.hostname or "", url.port or {"http": 80, "https": 443}[url.scheme]
        until_s = time.monotonic() + self.timeout_s
        addresses = self._resolved(host, port)
        try:
            with _connected(addresses, port, until_s) as plain:
                plain.settimeout(self.timeout_s)
                with ending(plain, until_s):
                    wire = plain
                    if url.scheme == "https":
                        wire = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
                    with wire:
                        response, answer = self._exchanged(wire, content)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() < until_s and not isinstance(error, TimeoutError):
                raise _Again(f"cannot be reached: {_reason(error)}") from None
            raise RequestError(  # another try would find no time
                f"{self.who}: {self.url} gave no answer in {self.timeout_s:g} s, {self.timeout_of}. "
                "Raise that if the service is only slow."
            ) from None
        return self._checked(response, answer)

    def _exchanged(self, wire: socket.socket, content: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        url = urlsplit(self.url)
        connection = http.client.HTTPConnection(url.hostname or "")
        connection.sock = wire
        ours = {"Content-Type": "application/json", "Host": url.netloc}
        path = url.path + (url.query and f"?{url.query}")
        connection.request("POST", path or "/", content, {**ours, **self.headers, "Connection": "close"})
        response = connection.getresponse()
        answer = response.read(MOST_BYTES + 1)
        if response.length and len(answer) <= MOST_BYTES:
            raise http.client.IncompleteRead(answer, response.length)
        return response, answer

    def _checked(self, response: http.client.HTTPResponse, answer: bytes) -> Any:
        who, status = f"{self.who}: {self.url}", response.status
        if status == BUSY or status >= 500:
            raise _Again(f"answers with status {status}")
        if 300 <= status < 400:
            place = response.headers.get("location", "nowhere")
            raise RewardError(
                f"{who} redirects to {shortened(place, 200)}, which is not followed. Name the address itself."
            )
        if status != http.client.OK:
            said = shortened(" ".join(answer[:400].decode(errors="replace").split()), 200)
            refusal = f"{who} refuses the request with status {status}: {said or 'no reason given'}."
            raise RewardError(refusal) if status in NOT_FOR_US else RequestError(refusal)
        if len(answer) > MOST_BYTES:
            raise RequestError(f"{who} answers with more than {MOST_BYTES:,} bytes.")
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise RequestError(f"{who} does not answer with JSON.") from None

    def _resolved(self, host: str, port: int) -> list[str]:
        """The addresses of a host. Raises RewardError where one is private and not allowed, and _Again."""
        try:
            resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise _Again(f"cannot be found: {_reason(error)}") from None
        addresses = [str(place[0]) for *_, place in resolved]
        for address in addresses:
            if not self.allow_private and not is_public(address):
                raise RewardError(
                    f"{self.who}: {self.url} is at {address}, on this machine or in a private network. "
                    "Set allow_private: true if that is meant."
                )
        return addresses


@dataclass(frozen=True, slots=True)
class Service:
    """The settings of a service, as in `RewardConfig`, with the headers' secrets resolved."""

    name: str
    url: str
    headers: Mapping[str, str]
    answers_per_request: int
    request_timeout_s: float
    allow_private: bool
    body: str = "own"
    per: str = "sequence"

    def reward(self) -> Reward:
        """The service as an async reward, each call of which is one request.

        Raises RewardError for a header that cannot be sent.
        """
        endpoint = Endpoint(
            f"reward {self.name!r}",
            self.url,
            self.headers,
            self.request_timeout_s,
            "half of reward_timeout_s",
            self.allow_private,
        )
        endpoint.refuse_headers()

        async def judge(prompts: list[Any], completions: list[Any], **columns: Any) -> Any:
            columns = {name: values for name, values in columns.items() if name not in _OURS}
            return await endpoint.answer({"prompts": prompts, "completions": completions, "columns": columns})

        async def judge_as_openrlhf(queries: list[str], prompts: list[str], labels: list[Any]) -> Any:
            return await endpoint.answer({"query": queries, "prompts": prompts, "labels": labels})

        function = judge if self.body == "own" else judge_as_openrlhf
        parameters = Parameters.of(function)
        return Reward(
            self.name,
            self.url,
            function,
            parameters,
            parameters.form(self.url, ()),
            {},
            file="",
            answers_per_call=self.answers_per_request,
            per=self.per,
        )


def _connected(addresses: Sequence[str], port: int, until_s: float) -> socket.socket:
    """A connection to the first address that takes it: localhost may have two, and the service listen on the second.

    Raises OSError, that of the last address.
    """
    fault = OSError("it has no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), max(until_s - time.monotonic(), 0.001))
        except OSError as error:
            fault = error
    raise fault


def is_public(address: str) -> bool:
    """Whether an IP address is reachable through the Internet: neither private, local, shared nor reserved."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    if any(ip in network for network in _NOT_PUBLIC):
        return False
    return ip.is_global and not ip.is_multicast and (inner is None or is_public(str(inner)))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
