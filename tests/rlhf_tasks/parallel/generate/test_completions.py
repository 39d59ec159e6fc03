"""A server of completions: what it must be able to do is found out before a run, and each fault has its sentence."""

import math
import threading
import time
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.parallel.generate import completions
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import GenerationFault
from prefect_rlhf.rlhf_tasks.parallel.generate.completions import Answer, Completions
from tests.loopback import served
from tests.rlhf_tasks.parallel.generate.completion_server import KEY, TOKENS, CompletionServer

VOCABULARY = 17
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_tokens": 0, "stop_token_ids": [2], "stop": []}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(completions, "FIRST_PAUSE_S", 0.01)


def test_a_server_that_can_do_it_passes_and_answers_with_the_tokens_of_a_seed():
    with served(CompletionServer(VOCABULARY)) as server:
        client = Completions(f"{server.url}/v1/", None, None, 1.0)
        client.examine(VOCABULARY, 64)
        answer, _ = client.complete([3, 4], 10, 9, SAMPLING)
        assert answer == Answer(
            [(10 + 31 * i) % VOCABULARY for i in range(TOKENS)], [-1.0] * TOKENS, "length"
        )
        body = server.bodies("/v1/completions")[-1]
    assert (body["model"], body["prompt"], body["seed"], body["max_tokens"]) == ("policy", [3, 4], 10, 9)
    assert body["top_k"] == -1, "0 is no number of tokens"
    assert body["ignore_eos"]
    assert body["stop_token_ids"] == [2]


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("key", "refuses the key .status 401.. Correct api_key_env"),
        ("text", "/v1/models does not answer with a JSON object"),
        ("owner", "a server of 'someone', and only those of vllm and sglang are known"),
        ("several", "has several models, but policy, other. Correct model"),
        ("short", "takes 16 tokens of a sequence, and the run draws up to 64"),
        ("old", "has no /get_model_info. Install SGLang"),
        ("no ids", "returns no token ids"),
        ("no logprobs", "returns no log-probability for each token"),
        ("null", "returns log-probabilities that are none"),
        ("prompt", "has read a prompt of 7 other tokens than the 8 it was given"),
        ("aborts", "ends a response of 1 tokens by 'abort'"),
        ("raw", "as they are before the temperature. Start vLLM with --logprobs-mode processed_logprobs"),
        ("refuses", "refuses the request with status 400: .*give a text"),
        ("down", r"does not answer: status 503.* \(4 tries\)"),
    ],
)
def test_what_a_server_cannot_do_is_one_sentence_each_time(mode: str, said: str):
    with served(CompletionServer(VOCABULARY, mode)) as server:
        for _ in range(2):
            with pytest.raises(GenerationFault, match=said) as raised:
                Completions(server.url, None, None, 1.0).examine(VOCABULARY, 64)
            assert "\n" not in str(raised.value)


def test_a_model_that_is_not_there_is_named_with_those_that_are():
    with (
        served(CompletionServer(VOCABULARY)) as server,
        pytest.raises(GenerationFault, match="no model 'mine', but policy"),
    ):
        Completions(server.url, "mine", None, 1.0).meet()


def test_nobody_there_and_a_key():
    with pytest.raises(GenerationFault, match=r"does not answer: Connection refused \(4 tries\)"):
        Completions("http://127.0.0.1:9", None, None, 1.0).meet()
    with served(CompletionServer(VOCABULARY, "key")) as server:
        Completions(server.url, None, KEY, 1.0).examine(VOCABULARY, 64)


def test_a_busy_server_is_asked_again():
    with served(CompletionServer(VOCABULARY, "busy")) as server:
        answer, _ = Completions(server.url, None, None, 1.0).complete([1], 0, 9, SAMPLING)
        assert len(answer.tokens) == TOKENS
        assert len(server.bodies("/v1/completions")) == 3


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("keeps", "does not take the weights of /none: out of memory"),
        ("version", "has weights another, and was given 7-abc"),
    ],
)
def test_weights_that_are_not_taken(mode: str, said: str, monkeypatch: pytest.MonkeyPatch):
    from tests.rlhf_tasks.parallel.generate import completion_server

    monkeypatch.setattr(completion_server, "load_file", lambda path: {})
    with served(CompletionServer(VOCABULARY, mode)) as server, pytest.raises(GenerationFault, match=said):
        Completions(server.url, None, None, 1.0).take("/none", "7-abc")


@pytest.mark.parametrize(
    ("patience", "aborts", "said"), [(0.005, False, "gave no answer in"), (1.0, True, "was ended")]
)
def test_a_server_that_hangs_has_a_deadline_and_a_request_can_be_ended(
    patience: float, aborts: bool, said: str
):
    with served(CompletionServer(VOCABULARY, "hang")) as server:
        client: Any = Completions(server.url, None, None, 1.0)
        client.meet()
        client._patience = patience
        if aborts:
            threading.Timer(0.5, client.abort).start()
        began_s = time.monotonic()
        with pytest.raises(GenerationFault, match=said):
            client.complete([1], 0, 2, SAMPLING, within_s=math.inf if aborts else 120.0)
        assert time.monotonic() - began_s < 20


def test_a_server_that_answers_byte_by_byte_does_not_prolong_a_deadline():
    with served(CompletionServer(VOCABULARY, "drips")) as server:
        began_s = time.monotonic()
        with pytest.raises(GenerationFault, match="/v1/models gave no answer in 1 s"):
            Completions(server.url, None, None, 1 / 30).examine(VOCABULARY, 64)
        assert time.monotonic() - began_s < 6
