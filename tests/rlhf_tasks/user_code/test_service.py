"""Rewards that an HTTP service computes: a real server, and every way in which one can fail."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess
from prefect_rlhf.rlhf_tasks.user_code.service import MOST_BYTES, Service, is_public
from tests.judged import SUMS
from tests.loopback import served


class Server(ThreadingHTTPServer):
    """A service that does what the path says.

    asked  the bodies and headers that it got
    left   set when a client has hung up before it had the whole answer
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock, self.left = threading.Lock(), threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append({"path": self.path, "headers": dict(self.headers), **body})
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            tries = len(server.asked)
        getattr(self, f"do_{self.path.strip('/')}")(body, tries)
        with server.lock:
            server.at_once -= 1

    def say(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_score(self, body: dict, tries: int) -> None:
        time.sleep(0.05)
        truths = body["columns"]["ground_truth"]
        values = [1.0 if t in c else None for t, c in zip(truths, body["completions"], strict=True)]
        self.say(200, {"rewards": values})

    def do_openrlhf(self, body: dict, tries: int) -> None:
        values = [float(any(number in query for number in "71")) for query in body["query"]]
        values[1] = 0.0
        self.say(200, {"rewards": values, "scores": values, "extra_logs": {}})

    def do_busy_twice(self, body: dict, tries: int) -> None:
        self.say(503 if tries < 3 else 200, [0.5] * len(body["completions"]))

    def do_down(self, body: dict, tries: int) -> None:
        self.say(500, b"it is down")

    def do_refuses(self, body: dict, tries: int) -> None:
        self.say(401, b"who are\nyou?")

    def do_redirects(self, body: dict, tries: int) -> None:
        self.say(307, b"", Location="http://169.254.169.254/latest/meta-data")

    def do_short(self, body: dict, tries: int) -> None:
        self.say(200, {"rewards": [1.0]})

    def do_nan(self, body: dict, tries: int) -> None:
        self.say(200, b'{"rewards": [0, NaN, 1]}')

    def do_huge(self, body: dict, tries: int) -> None:
        self.say(200, f"[1{'0' * 4000}, 0, 0]".encode())

    def do_text(self, body: dict, tries: int) -> None:
        self.say(200, b"very good")

    def do_long(self, body: dict, tries: int) -> None:
        self.say(200, b"[" + b" " * (MOST_BYTES + 10))

    def do_refuses_sums(self, body: dict, tries: int) -> None:
        sums = any("10 + 5" in prompt for prompt in body["prompts"])
        self.say(422 if sums else 200, b"no sums" if sums else [1.0] * len(body["completions"]))

    def do_drips_on_sums(self, body: dict, tries: int) -> None:
        if any("10 + 5" in prompt for prompt in body["prompts"]):
            self.do_drips(body, tries)
        else:
            self.say(200, [1.0] * len(body["completions"]))

    def do_drips(self, body: dict, tries: int) -> None:
        """A byte now and then: no single wait is long, the whole answer takes ten seconds and more."""
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        for _ in range(100):
            try:
                self.wfile.write(b" ")
                self.wfile.flush()
            except OSError:
                self.server.left.set()
                return
            time.sleep(0.1)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def service() -> Iterator[Server]:
    with served(Server()) as server:
        yield server


@pytest.fixture
def server(service: Server) -> Server:
    service.asked.clear()
    service.left.clear()
    service.most_at_once = 0
    return service


def config_of(url: str, timeout_s: float = 60.0, **settings: Any) -> Any:
    return make_config(
        {
            "type": "ppo",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "total_iterations": 1,
            "rewards": [{"url": url, "allow_private": True, **settings}],
            "reward_timeout_s": timeout_s,
        }
    )


def in_process(url: str, **settings: Any) -> list[Any]:
    process = RewardProcess(config_of(url, **settings))
    try:
        return next(iter(process.submit(SUMS).result(timeout=110).values.values()))
    finally:
        process.close()


def judged(url: str, request_timeout_s: float = 30.0, **settings: Any) -> list[Any]:
    """One request, in this process: what goes wrong does not depend on where it is asked."""
    reward = config_of(url, **settings).rewards[0]
    called = Service(
        reward.name,
        reward.url,
        {},
        reward.answers_per_request,
        request_timeout_s,
        reward.allow_private,
    ).reward()
    answered = asyncio.run(called.function(prompts=["p"] * 3, completions=["c"] * 3))
    values = called.values(answered, range(3), SUMS)
    for value in values:
        if isinstance(value, RewardError):
            raise value
    return values


def test_a_service_of_openrlhf_gets_queries_prompts_and_labels(server: Server):
    assert in_process(server.url("openrlhf"), body="openrlhf") == [1.0, 0.0, 1.0]
    (asked,) = server.asked
    assert asked["query"] == [
        prompt + answer for prompt, answer in zip(SUMS.prompt_texts, SUMS.completions, strict=True)
    ]
    assert asked["prompts"] == SUMS.prompt_texts
    assert set(asked) == {"path", "headers", "query", "prompts", "labels"}


def test_a_service_gets_prompts_answers_and_columns_in_parts_and_their_order_is_kept(
    server: Server, monkeypatch: Any, capfd: Any
):
    monkeypatch.setenv("MY_LOGIN", "Bearer canary")
    headers = {"Authorization": {"env": "MY_LOGIN"}}
    values = in_process(server.url("score"), answers_per_request=2, concurrency=1, headers=headers)
    assert values == [1.0, None, 1.0]
    first, second = sorted(server.asked, key=lambda one: -len(one["completions"]))
    assert first["prompts"] == SUMS.prompts[:2]
    assert second["completions"] == SUMS.completions[2:]
    assert first["columns"] == {"ground_truth": ["7", "15"], "task": ["add", "add"]}
    assert first["headers"]["Authorization"] == "Bearer canary"
    assert first["headers"]["Host"] == f"127.0.0.1:{server.server_port}"
    assert server.most_at_once == 1, "concurrency: 1"


def test_a_fault_of_a_service_ends_the_judging_with_its_sentence(server: Server):
    with pytest.raises(RewardError, match=r"refuses the request with status 401: who are you\?\.$"):
        in_process(server.url("refuses"))


def test_a_busy_service_is_asked_again_and_one_that_is_down_is_given_up(server: Server, monkeypatch: Any):
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.user_code.service.FIRST_PAUSE_S", 0.01)
    assert judged(server.url("busy_twice")) == [0.5] * 3
    server.asked.clear()
    with pytest.raises(RewardError, match=r"/down answers with status 500 \(4 tries\)"):
        judged(server.url("down"))
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("redirects", r"redirects to http://169\.254\.169\.254/latest/meta-data, which is not followed"),
        ("short", "returned 1 values for 3 answers"),
        ("nan", "returned nan: not a finite number"),
        ("huge", r"returned 10+ \.\.\.: not a finite number"),
        ("text", "does not answer with JSON"),
        ("long", "answers with more than 16,777,216 bytes"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_at_once(server: Server, path: str, sentence: str):
    with pytest.raises(RewardError, match=sentence):
        judged(server.url(path))
    assert len(server.asked) == 1


def test_a_slow_service_has_its_time_and_no_more(server: Server):
    with pytest.raises(RewardError, match=r"/drips gave no answer in 0\.5 s, half of"):
        judged(server.url("drips"), request_timeout_s=0.5)
    assert len(server.asked) == 1
    assert server.left.wait(60), "the whole answer was waited for"


def test_nobody_there_is_named(monkeypatch: Any):
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.user_code.service.FIRST_PAUSE_S", 0.01)
    with pytest.raises(RewardError, match=r"cannot be reached: Connection refused \(4 tries\)"):
        judged("http://127.0.0.1:9/x")
    with pytest.raises(RewardError, match=r"cannot be found: "):
        judged("http://nobody.invalid/x")


def test_a_host_is_asked_at_the_first_of_its_addresses_that_answers(server: Server, monkeypatch: Any):
    """As where localhost is ::1 first, and the service listens on 127.0.0.1 only."""
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.user_code.service.FIRST_PAUSE_S", 0.01)
    places = [(address, server.server_port) for address in ("127.0.0.2", "127.0.0.1")]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert judged(f"http://two.test:{server.server_port}/busy_twice") == [0.5] * 3


def test_an_address_in_a_private_network_is_refused_before_anything_is_sent(server: Server):
    for host in ("127.0.0.1", "localhost"):
        url = f"http://{host}:{server.server_port}/score"
        with pytest.raises(RewardError, match=r"on this machine or in a private network\. Set allow_private"):
            judged(url, allow_private=False)
    assert server.asked == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        *((address, False) for address in ("10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((address, False) for address in ("127.0.0.1", "0.0.0.0", "100.64.0.1", "224.0.0.1", "240.0.0.1")),
        *(
            (address, False)
            for address in ("::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "2002:a00:1::")
        ),
        *((address, False) for address in ("64:ff9b::a00:1", "::10.0.0.1", "::ffff:0:10.0.0.1", "fec0::1")),
    ],
)
def test_what_a_public_address_is(address: str, public: bool):
    assert is_public(address) is public


@pytest.mark.parametrize("login", ["canary-1\n", "canary-1\u20ac", "canary-1\r\nHost: x"])
def test_a_header_that_cannot_be_sent_is_named_without_its_value(
    server: Server, monkeypatch: Any, login: str
):
    monkeypatch.setenv("MY_LOGIN", login)
    with pytest.raises(RewardError, match=r"the value of the header Authorization has a line break") as fault:
        in_process(server.url("score"), headers={"Authorization": {"env": "MY_LOGIN"}})
    assert "canary-1" not in str(fault.value) + fault.value.traceback


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "http://", "http://user:word@host/x", "https://host/#x", "x:y", "http://h:99999/"]
)
def test_only_http_urls_without_a_login_are_accepted(url: str):
    with pytest.raises(ConfigError, match=r"^rewards\.0\.url: "):
        config_of(url)


def test_a_service_is_named_by_its_path_or_host():
    assert config_of("https://host.org/v1/judge?x=1").rewards[0].name == "judge"
    assert config_of("https://host.org").rewards[0].name == "host_org"


@pytest.mark.parametrize(
    ("path", "settings", "skipped", "sentence"),
    [
        ("refuses_sums", {"answers_per_request": 1}, {1}, "refuses the request with status 422: no sums"),
        ("refuses_sums", {"answers_per_request": 2}, {1}, "refuses the request with status 422: no sums"),
        ("drips_on_sums", {"answers_per_request": 1, "timeout_s": 4.0}, {1}, "gave no answer in 2 s"),
        ("nan", {}, {1}, "returned nan: not a finite number"),
    ],
)
def test_the_answers_of_a_request_that_fails_are_skipped_where_the_run_says_so(
    server: Server, path: str, settings: dict, skipped: set[int], sentence: str
):
    config = config_of(server.url(path), **settings)
    process = RewardProcess(config.model_copy(update={"on_reward_error": "skip"}))
    try:
        judged = process.submit(SUMS).result(timeout=110)
    finally:
        process.close()
    assert set(judged.faults) == skipped
    assert all(sentence in fault.reason for fault in judged.faults.values())
    values = judged.values[path]
    assert {place for place, value in enumerate(values) if value is None} == skipped


@pytest.mark.parametrize("path", ["short", "redirects"])
def test_a_service_that_does_not_speak_our_language_stops_the_run_also_then(server: Server, path: str):
    config = config_of(server.url(path))
    process = RewardProcess(config.model_copy(update={"on_reward_error": "skip"}))
    try:
        with pytest.raises(RewardError, match=r"returned 1 values for 3|redirects to"):
            process.submit(SUMS).result(timeout=110)
    finally:
        process.close()
