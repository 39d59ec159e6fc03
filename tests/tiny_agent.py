"""The agents of tests' runs: `python tiny_agent.py NAME [SECONDS]`. Standard library only, so they start at once."""

import json
import os
import sys
import time
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

SEED = int(os.environ["AGENT_SEED"])


def post(path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
    """(HTTP status, JSON) of a request to the endpoint."""
    request = Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}"},
    )
    try:
        with urlopen(request) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def complete(text: str, **fields: Any) -> str:
    """What the policy says after a text."""
    status, answer = post("/completions", {"prompt": text, "max_tokens": 8, **fields})
    assert status == 200, answer
    return answer["choices"][0]["text"]


def streamed(text: str, **fields: Any) -> list[str]:
    """What the policy says after a text, in its pieces, as they come."""
    body = {"prompt": text, "max_tokens": 8, "stream": True, "logprobs": 1, **fields}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = Request(os.environ["OPENAI_BASE_URL"] + "/completions", json.dumps(body).encode(), headers)
    with urlopen(request) as answer:
        lines = [line.removeprefix(b"data: ").strip() for line in answer if line.strip()]
    assert lines.pop() == b"[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert [each["finish_reason"] for each in choices[:-1]] == [None] * (len(choices) - 1)
    tokens = [token for each in choices if each["logprobs"] for token in each["logprobs"]["tokens"]]
    assert len(tokens) <= fields.get("max_tokens", 8)
    return [each["text"] for each in choices[:-1]]


def streams(row: dict[str, Any], wait_s: float) -> None:
    """Echo, by streams. Its reward is the number of pieces."""
    text, pieces = row["prompt"], 0
    for _ in range(1 + SEED % 3):
        said = streamed(text)
        pieces += len(said)
        length = len("".join(said))
        text += f"{''.join(said)}<{length}>"
    print(json.dumps({"reward": pieces}))


def stops_streams(row: dict[str, Any], wait_s: float) -> None:
    """Each answer ends before a letter of its own, of which no piece has any."""
    text = row["prompt"]
    for letter in "aeio"[: 2 + SEED % 3]:
        said = "".join(streamed(text, stop=[letter, letter.upper(), " "], max_tokens=12))
        assert not {letter, letter.upper(), " "} & set(said), said
        text += f"{said}{letter}."
    print(json.dumps({"reward": 1}))


def echo(row: dict[str, Any], wait_s: float) -> None:
    """Answers with how long each turn was, for as many turns as the seed says, as tiny_environment.py does."""
    text, reward, turns = row["prompt"], 0.0, 1 + SEED % 3
    for left in reversed(range(turns)):
        said = complete(text)
        time.sleep(wait_s * left)
        reward += len(said) / 16 - (row["answer"] in said)
        text += f"{said}<{len(said)}>"
    print(json.dumps({"reward": reward}))


def branches(row: dict[str, Any], wait_s: float) -> None:
    """Asks two things of the prompt, and goes on with the first, twice."""
    first = complete(row["prompt"])
    other = complete(row["prompt"] + "!", max_tokens=3)
    complete(f"{row['prompt']}{first}?", max_tokens=4, n=2)
    print(json.dumps({"reward": len(first + other) / 16}))


def moody(row: dict[str, Any], wait_s: float) -> None:
    """Echo, but most episodes fail, in as many ways as there are."""
    moods = [fails, silent, words, greedy, many, slow, echo, echo]
    moods[SEED // 3 % len(moods)](row, wait_s)


def fails(row: dict[str, Any], wait_s: float) -> None:
    complete(row["prompt"])
    sys.exit("no such door")


def silent(row: dict[str, Any], wait_s: float) -> None:
    complete(row["prompt"])


def words(row: dict[str, Any], wait_s: float) -> None:
    complete(row["prompt"])
    print('{"reward": "much"}')


def greedy(row: dict[str, Any], wait_s: float) -> None:
    post("/completions", {"prompt": row["prompt"], "temperature": 0.2})
    status, answer = post("/completions", {"prompt": row["prompt"], "max_tokens": 10_000})
    sys.exit(f"{status} {answer['error']['code']}")


def many(row: dict[str, Any], wait_s: float) -> None:
    for _ in range(1000):
        complete(row["prompt"], max_tokens=1)


def slow(row: dict[str, Any], wait_s: float) -> None:
    complete(row["prompt"])
    time.sleep(600)


def stops(row: dict[str, Any], wait_s: float) -> None:
    """Refuses a text that lacks tokens which were drawn before that which ended it."""
    letters = [chr(code) for code in range(32, 127)][::3][:32]
    for _ in range(4):
        body = {"prompt": row["prompt"], "max_tokens": 16, "logprobs": 1, "stop": letters}
        (choice,) = post("/completions", body)[1]["choices"]
        before = "".join(choice["logprobs"]["tokens"][:-1])
        said, drawn = ([each for each in text if each.isascii()] for text in (choice["text"], before))
        assert said[: len(drawn)] == drawn, choice  # others may be half a character
    print(json.dumps({"reward": 1}))


def mixes(row: dict[str, Any], wait_s: float) -> None:
    """Each answer ends before a letter of its own."""
    text = row["prompt"]
    for letter in "aeio"[: 2 + SEED % 3]:
        said = complete(text, stop=[letter, letter.upper(), " "], max_tokens=12)
        assert not {letter, letter.upper(), " "} & set(said), said
        text += f"{said}{letter}."
    print(json.dumps({"reward": len(text) / 16}))


def leaves(row: dict[str, Any], wait_s: float) -> None:
    """Ends while an answer that it has asked for is drawn."""
    complete(row["prompt"], max_tokens=2)
    asks = Thread(target=complete, args=(row["prompt"] + "!",), kwargs={"max_tokens": 40}, daemon=True)
    asks.start()
    time.sleep(wait_s)
    assert asks.is_alive(), "the answer is there"
    print(json.dumps({"reward": 1}), flush=True)
    os._exit(0)


def long(row: dict[str, Any], wait_s: float) -> None:
    """Says how it is refused."""
    for size in (10_000, 3_000_000):
        print(post("/completions", {"prompt": size * "x"})[1]["error"]["message"], file=sys.stderr)
    print(json.dumps({"reward": complete(row["prompt"], max_tokens=1) and 1}))


def chats(row: dict[str, Any], wait_s: float) -> None:
    """Answers each call of a tool, for at most three turns."""
    integers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    add = {"type": "function", "function": {"name": "add", "parameters": {"properties": integers}}}
    messages = list(row["prompt"])
    for _ in range(3):
        body = {"messages": messages, "tools": [add], "max_tokens": 6}
        status, answer = post("/chat/completions", body)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            result = str(sum(json.loads(call["function"]["arguments"]).values()))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print(json.dumps({"reward": len(messages)}))


if __name__ == "__main__":
    globals()[sys.argv[1]](json.loads(sys.stdin.readline()), float(([*sys.argv, 0][2:] or [0])[0]))
