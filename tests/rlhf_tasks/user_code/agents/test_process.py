"""The process that runs agents: real programs, answered here in the policy's place; every way in which one fails."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil
import pytest

from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import RAW, Choice, Drawing
from prefect_rlhf.rlhf_tasks.user_code.agents.process import STARTING_S, AgentProcess, longest_agents_s
from prefect_rlhf.rlhf_tasks.user_code.agents.streams import Piece
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.process import ENDING_S
from tests.rlhf_tasks.test_environments import grpo_config

pytestmark = pytest.mark.cluster

TESTS = Path(__file__).parents[3]
AGENT = f"""import sys; sys.path.insert(0, {str(TESTS)!r})
from tiny_agent import *
exec(json.loads(sys.stdin.readline()))
"""
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    grpo_config(folder)
    return folder


@pytest.fixture
def begin(folder, tmp_path):
    """Begin the process of agents, each of which runs the code that is its row."""
    (tmp_path / "agent.py").write_text(AGENT)
    begun = []

    def make(reward_memory_bytes=4 * 2**30, **limits):
        agent = {"command": f"{sys.executable} {tmp_path}/agent.py", **limits}
        config = grpo_config(folder, environment=None, agent=agent, reward_memory_bytes=reward_memory_bytes)
        begun.append(AgentProcess(config, config.agent, Drawing(1.0, 1.0)))
        return begun[-1]

    yield make
    for each in begun:
        each.close()


def play(process, *codes):
    """(the episode of each code, all requests), each request answered by its text backwards."""
    episodes = [(sample, json.dumps(code), 7) for sample, code in enumerate(codes)]
    answers, ended, requests = [], {}, []
    until_s = time.monotonic() + WITHIN_S
    while len(ended) < len(codes):
        assert time.monotonic() < until_s, "the agents do not end"
        process.tell(episodes, answers)
        asked, over = process.heard(1.0)
        episodes, answers = [], [(each.number, backwards(each)) for each in asked]
        requests += asked
        ended |= {each.sample: each for each in over}
    return [ended[sample] for sample in range(len(codes))], requests


def backwards(request):
    text = (request.text or request.messages[-1]["content"])[::-1]
    if text == "hcum":
        return {"refused": "too much", "code": "context_length_exceeded"}
    return {
        "choices": [Choice(text, text, "stop", list(text), [-1.0] * len(text))] * request.n,
        "prompt_tokens": 1,
    }


def test_an_agent_gets_its_row_a_key_and_answers_and_says_its_reward(begin):
    ended, requests = play(
        begin(),
        "assert complete('abc') == 'cba'; print('{\"reward\": 2}')",
        "assert post('/reward', {'reward': 3})[0] == 200; print('no line of JSON')",
        "print('{\"reward\": 0.5}\\n\\n'); assert os.environ['AGENT_SEED'] == '7'",
        "assert len(post('/completions', {'prompt': 'abc', 'n': 2})[1]['choices']) == 2",
    )
    assert [each.reward for each in ended] == [2.0, 3.0, 0.5, None]
    assert [each.requests for each in ended] == [1, 0, 0, 2]
    assert [each.fault for each in ended] == [""] * 4
    assert {(each.sample, each.text, each.n, each.most) for each in requests} == {
        (0, "abc", 1, 8),
        (3, "abc", 2, None),
    }


def test_each_failure_is_a_sentence_about_one_episode(begin):
    ended, _ = play(
        begin(max_requests=5, timeout_s=4, reward_memory_bytes=300_000_000),
        "sys.exit('no such door')",
        "os.kill(os.getpid(), 9)",
        "[complete('abc') for _ in range(1000)]",
        "complete('abc'); time.sleep(60)",
        "print('{\"reward\": NaN}')",
        "much = bytearray(b'x' * 400_000_000); time.sleep(60)",
        "sys.exit(post('/completions', {'prompt': 'much'})[1]['error']['message'])",
        "print(10_000_000 * 'x'); print('{\"reward\": 1}')",
    )
    assert [re.sub(r"takes \S+ GB", "takes too much", each.fault) for each in ended] == [
        "exited with status 1: no such door",
        "was ended by signal 9",
        "asked for more than 5 answers, which agent.max_requests allows",
        "did not end in 4 s, which agent.timeout_s sets",
        "gave no reward: the reward nan is no finite number",
        "takes too much of memory; reward_memory_bytes allows 0.3 GB",
        "exited with status 1: too much",
        "",
    ]
    assert ended[-1].reward == 1.0, "though it has printed ten million characters"


def test_memory_that_an_agent_shares_with_what_it_starts_counts_once(begin):
    forks = (
        "if all(os.fork() for _ in range(4)): time.sleep(2); print('{\"reward\": 1}')\nelse: time.sleep(1.5)"
    )
    (ended,), _ = play(
        begin(reward_memory_bytes=500_000_000), f"much = bytearray(b'x' * 200_000_000)\n{forks}"
    )
    assert (ended.fault, ended.reward) == ("", 1.0)


def test_what_is_refused_counts_too_and_no_more_of_it_is_read(begin):
    vain = "[post('/completions', {'prompt': ''}) for _ in range(1000)]"
    (ended,), _ = play(begin(max_requests=5), vain)
    assert ended.fault == "asked for more than 5 answers, which agent.max_requests allows"


def test_a_thousand_requests_at_once_cost_one_episode(begin):
    threads = (
        "from threading import Thread\nfor _ in range(1000): Thread(target=complete, args=('abc',)).start()"
    )
    (many, other), requests = play(begin(), threads, "time.sleep(1); assert complete('ab') == 'ba'")
    assert many.fault == "asked for more than 64 answers, which agent.max_requests allows"
    assert other.fault == ""
    assert len(requests) <= 65


def test_a_key_is_good_while_its_episode_runs(begin, tmp_path):
    log = tmp_path / "key"
    (first,), _ = play(process := begin(), f"open({str(log)!r}, 'w').write(os.environ['OPENAI_API_KEY'])")
    assert first.fault == ""
    old = f"open({str(log)!r}).read()"
    (second,), requests = play(
        process,
        f"assert post('/completions', {{'prompt': 'a'}}, {old})[1]['error']['code'] == 'invalid_api_key'\n"
        f"assert post('/reward', {{'reward': 9}}, {old})[0] == post('/completions', {{}}, 'none')[0] == 401",
    )
    assert (second.fault, second.reward, requests) == ("", None, [])


def test_what_agents_start_ends_with_them_and_the_endpoint_with_its_process(begin, tmp_path):
    log, ready = tmp_path / "started", tmp_path / "ready"
    says = f"open({str(log)!r}, 'w').write(str(os.getpid()) + os.environ['OPENAI_BASE_URL'])"
    stray = f"os.setsid(); [os.close(n) for n in (0, 1, 2)]; {says}; os.rename({str(log)!r}, {str(ready)!r})"
    waits = f"while not os.path.exists({str(ready)!r}): time.sleep(0.01)"
    play(process := begin(), f"if os.fork() == 0:\n    {stray}; time.sleep(60)\n{waits}\nos._exit(0)")
    pid, _, address = ready.read_text().partition("http")
    until_s = time.monotonic() + 5
    while psutil.pid_exists(int(pid)):  # its keeper takes it out of the table of processes
        assert time.monotonic() < until_s, "it runs while the endpoint does"
        time.sleep(0.05)
    process.close()
    with pytest.raises(URLError, match="refused"):
        urlopen(f"http{address}/models", timeout=5)


def test_so_many_agents_run_at_once(begin, tmp_path):
    say = f"open({str(tmp_path / 'log')!r}, 'a').write"
    ended, _ = play(begin(at_once=2), *4 * [f"{say}('+'); time.sleep(0.3); {say}('-')"])
    most, running = 0, 0
    for mark in (tmp_path / "log").read_text():
        running += 1 if mark == "+" else -1
        most = max(most, running)
    assert most == 2
    assert len(ended) == 4


def test_a_program_that_is_not_there_fails_its_episodes(folder):
    config = grpo_config(folder, environment=None, agent={"command": "no-such-program"})
    process = AgentProcess(config, config.agent, Drawing(1.0, 1.0))
    (ended,), _ = play(process, "")
    process.close()
    assert ended.fault.startswith("could not be started: [Errno 2] No such file or directory")


def test_the_process_itself_may_be_lost(begin):
    with pytest.raises(RewardError, match="agents"):
        play(begin(), "os.kill(os.getppid(), 9); time.sleep(60)")


def test_a_process_that_falls_silent_is_late(begin, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.user_code.agents.process.STARTING_S", 3.0)
    process = begin()
    process.tell([(0, json.dumps("complete('abc')"), 7)])
    assert len(process.heard(WITHIN_S)[0]) == 1
    assert process.heard(4.0) == ([], []), "it says that it is there"
    os.kill(process._process.pid, signal.SIGSTOP)
    with pytest.raises(RewardError, match="the process of agents gave no answer in 3 s"):
        process.heard(WITHIN_S)


def test_the_longest_that_agents_take_is_that_of_all_rounds(folder):
    config = grpo_config(folder, environment=None, agent={"command": "a", "at_once": 5, "timeout_s": 7})
    assert longest_agents_s(config) == 4 * (7 + ENDING_S) + STARTING_S
    assert longest_agents_s(grpo_config(folder)) == 0


OPENAI = """
import asyncio, openai
client = openai.OpenAI()
assert [model.id for model in client.models.list()] == ["policy"]
hi = [{"role": "user", "content": "hi"}]
answer = client.chat.completions.create(model="policy", messages=hi, logprobs=True)
assert answer.choices[0].message.content == "ih"
assert [each.logprob for each in answer.choices[0].logprobs.content] == [-1.0, -1.0]
assert answer.usage.completion_tokens == 2
pieces = client.chat.completions.create(model="policy", messages=hi, stream=True)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "ih"
assert client.completions.create(model="policy", prompt="abc", stream=False).choices[0].text == "cba"
call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
add = {"type": "function", "function": {"name": "add", "parameters": parameters}}
asked = [{"role": "user", "content": call[::-1]}]
message = client.chat.completions.create(model="policy", messages=asked, tools=[add]).choices[0].message
assert message.tool_calls[0].function.arguments == '{"a": 1}'
asked += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}]
assert client.chat.completions.create(model="policy", messages=asked, tools=[add]).choices[0].message.content == "ko"

async def together():
    several = openai.AsyncOpenAI()
    texts = ["abc", "de", "f"]
    answers = await asyncio.gather(*(several.completions.create(model="policy", prompt=text) for text in texts))
    assert [answer.choices[0].text for answer in answers] == ["cba", "ed", "f"]

asyncio.run(together())
for wrong, kind in (("temperature", openai.BadRequestError), ("key", openai.AuthenticationError)):
    try:
        if wrong == "key":
            openai.OpenAI(api_key="old").models.list()
        else:
            client.chat.completions.create(model="policy", messages=hi, temperature=0.5)
        raise SystemExit(f"{wrong} was taken")
    except kind:
        pass
try:
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "much"}])
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded"
print('{"reward": 1}')
"""


def test_the_openai_client_is_answered(begin, monkeypatch):
    monkeypatch.setattr(
        "prefect_rlhf.rlhf_tasks.user_code.agents.process.format_of", lambda template: "hermes"
    )
    (ended,), requests = play(begin(), OPENAI)
    assert (ended.fault, ended.reward) == ("", 1.0)
    told = next(each.messages for each in requests if each.messages and each.messages[-1]["role"] == "tool")
    assert told[1][RAW] == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert told[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


STREAMS = """
import openai
client = openai.OpenAI()
hi = [{"role": "user", "content": "hello"}]
usage = {"include_usage": True}
stream = iter(client.chat.completions.create(
    model="policy", messages=hi, stream=True, logprobs=True, stream_options=usage))
first = next(stream)
assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "o")
assert complete("go on") == "no og"  # only now the policy ends the other answer
*rest, end, used = stream
assert "".join(each.choices[0].delta.content or "" for each in rest) == "lleh"
assert [len(each.choices[0].logprobs.content) for each in (first, *rest)] == [1, 4]
assert end.choices[0].finish_reason == "stop"
assert used.usage.completion_tokens == 5
with client.completions.create(model="policy", prompt="leave", stream=True) as stream:
    assert next(iter(stream)).choices[0].text == "e"  # it hangs up
assert complete("go on") == "no og"
pieces = client.completions.create(model="policy", prompt="abc", stream=True)
assert "".join(each.choices[0].text for each in pieces) == "cba"
try:
    client.completions.create(model="policy", prompt="much", stream=True)
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded"
else:
    raise SystemExit("what is refused is no stream")
print('{"reward": 1}')
"""


def test_the_openai_client_reads_an_answer_that_is_not_over(begin):
    """An answer that is streamed ends when another was asked for: its first character is there before."""
    process, held, ended = begin(), [], []
    episodes, until_s = [(0, json.dumps(STREAMS), 7)], time.monotonic() + WITHIN_S
    answers, pieces = [], []
    while not ended:
        assert time.monotonic() < until_s, "the agent does not end"
        process.tell(episodes, answers, pieces)
        asked, ended = process.heard(1.0)
        answers, pieces, episodes = [], [], []
        for request in asked:
            answer = (request.number, backwards(request))
            if request.stream and "choices" in answer[1]:
                (choice,) = answer[1]["choices"]
                pieces.append((request.number, Piece(0, choice.text[0], "", choice.tokens[:1], [-1.0])))
                held.append(answer)
            else:
                answers.append(answer)
            if not request.stream or request.text == "abc":
                answers += held
                held.clear()
    assert [(each.fault, each.reward) for each in ended] == [("", 1.0)]
