"""Servers of tools: asked by either transport, started anew when they end, gone with the process that uses them."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from prefect_rlhf.rlhf_tasks.user_code.environments import EnvironmentProcess
from prefect_rlhf.rlhf_tasks.user_code.episodes import Episode, FailedAnswer
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import Call, calls_of
from prefect_rlhf.rlhf_tasks.user_code.tools.schemas import schemas_of
from prefect_rlhf.rlhf_tasks.user_code.tools.server import MOST_ENDED, ToolError, ToolServer
from tests.rlhf_tasks.user_code.tools.test_episode import call, config_of, contents

pytestmark = pytest.mark.cluster

FILE = str(Path(__file__).parents[3] / "tiny_mcp.py")
NAMES = ["length", "fail", "leave", "sleep", "key"]
WAY = {"points": [{"x": 1, "y": 2}, {"x": 3, "y": 4}]}


def command(*arguments: str) -> str:
    return shlex.join([sys.executable, FILE, *arguments])


def server_of(*arguments: str, **settings: str) -> ToolServer:
    return ToolServer(command(*arguments), None, settings, lambda text: text.replace("hush", "***"))


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server at a port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(shlex.split(command(f"port={port}")), stderr=subprocess.DEVNULL) as process:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


async def both_kinds_of_answers(server: ToolServer) -> None:
    assert await server.call("length", **WAY) == "4.0"
    with pytest.raises(ToolError, match="Error executing tool fail"):
        await server.call("fail", text="x")
    with pytest.raises(ToolError, match="Unknown tool: nothing"):
        await server.call("nothing")


def test_a_server_is_asked_by_its_command(monkeypatch):
    async def run() -> None:
        server = server_of(KEY="hush")
        try:
            await both_kinds_of_answers(server)
            assert await server.call("key") == "hush\n[image]"
        finally:
            await server.close()

    asyncio.run(run())


def test_or_at_its_url_and_a_server_that_has_ended_is_said(url):
    async def run() -> None:
        server = ToolServer((), url, {"Authorization": "Bearer x"}, str)
        try:
            await both_kinds_of_answers(server)
            with pytest.raises(ToolError, match="the server has ended: "):
                await server.call("leave", n=3)
            for _ in range(MOST_ENDED - 2):
                with pytest.raises(ToolError, match="the server has ended: All connection attempts failed"):
                    await server.call("leave", n=0)
            with pytest.raises(
                RewardError, match=f"{url}: it has ended, or was late, {MOST_ENDED} times in a"
            ):
                await server.call("leave", n=0)
        finally:
            await server.close()

    asyncio.run(run())


def test_a_server_that_ends_is_started_anew_until_it_has_ended_too_often_in_a_row(tmp_path):
    begun = tmp_path / "begun"

    async def run() -> None:
        server = server_of("begins=4", str(begun))
        try:
            for _ in range(2):  # a good answer in between begins the count again
                with pytest.raises(ToolError, match=r"has ended: Connection closed \(no memory is left\)"):
                    await server.call("leave", n=3)
                assert await server.call("leave", n=0) == "0"
            with pytest.raises(ToolError, match="no memory is left"):
                await server.call("leave", n=3)
            for _ in range(MOST_ENDED - 2):
                with pytest.raises(ToolError, match="it does not begin again"):
                    await server.call("leave", n=0)
            with pytest.raises(RewardError, match=r"4 times in a row; .*: .*\(it does not begin again\)\.$"):
                await server.call("leave", n=0)
        finally:
            await server.close()

    asyncio.run(run())
    assert not [pid for pid in begun.read_text().split() if psutil.pid_exists(int(pid))]


def test_a_call_that_is_late_ends_the_server_and_the_next_call_starts_another(tmp_path):
    begun = tmp_path / "begun"

    async def run() -> None:
        server = server_of("begins=9", str(begun))
        try:
            await server.call("leave", n=0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await server.call("sleep", seconds=100)
            assert await server.call("leave", n=0) == "0"
        finally:
            await server.close()

    asyncio.run(run())
    pids = begun.read_text().split()
    assert len(pids) == 2
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ends"], r"tiny_mcp.py ends: the server has ended: Connection closed \(the key has expired\)\.$"),
        (["hangs"], "it has not named its tools in 4 s. Correct it or raise reward_timeout_s"),
        (["names=a b"], "it offers a tool named 'a b'; use letters, digits, _ . and -"),
    ],
)
def test_a_server_that_offers_no_tools_is_a_sentence(arguments, sentence):
    with pytest.raises(RewardError, match=sentence):
        asyncio.run(server_of(*arguments).schemas(4.0 if arguments == ["hangs"] else 60.0))


def test_so_is_a_command_that_is_not_there():
    server = ToolServer("no-such-program", None, {}, str)
    with pytest.raises(RewardError, match=r"mcp no-such-program: the server has ended: .*No such file"):
        asyncio.run(server.schemas(60.0))


def entry(*arguments: str, **kwargs: Any) -> dict[str, Any]:
    return {"mcp": {"command": command(*arguments)}, "kwargs": kwargs}


def test_a_run_offers_what_a_server_offers_beside_its_functions_and_answers_calls(monkeypatch):
    monkeypatch.setenv("TINY_KEY", "hush-hush")
    config = config_of("long", entry(KEY={"env": "TINY_KEY"}))
    schemas = schemas_of(config)
    assert [schema["function"]["name"] for schema in schemas] == ["long", *NAMES]
    assert schemas[1]["function"]["description"] == "The length of a way."
    parameters = {schema["function"]["name"]: schema["function"]["parameters"] for schema in schemas}
    text = call("length", '{"points": [{"x": 1, "y": 2}, {"x": 3, "y": 4}], "scale": 0.5}')
    assert calls_of(text, "hermes", parameters) == [Call("length", {**WAY, "scale": 0.5})]
    wrong = call("length", '{"points": [{"x": 1, "y": 2}, {"x": "3", "y": 4}]}')
    process = EnvironmentProcess(config)
    try:
        turns = [text + call("long", '{"a": 1}'), wrong, call("key", "{}")]
        answers = process.answers([Episode(n, {}, 0, [turn]) for n, turn in enumerate(turns)])
        ways, refused, secret = [contents(each) for each in answers]
        assert ways[0] == "2.0"
        assert ways[1].startswith("xxx")
        assert refused[0].startswith("error: the argument 'points[1].x' must be of")
        assert secret == ["***\n[image]"]
        [ended] = process.answers(
            [Episode(0, {}, 0, [call("leave", '{"n": 3}') + call("leave", '{"n": 0}')])]
        )
        assert contents(ended) == [
            "error: ToolError: the server has ended: Connection closed (no memory is left)",
            "0",
        ]
        assert [each["outcome"] for each in ended.observation] == ["failed", ""]
    finally:
        process.close()


def test_no_server_outlives_the_process_of_tools_however_that_ends(tmp_path):
    begun = tmp_path / "begun"
    config = config_of(entry("begins=9", str(begun)))
    schemas_of(config)
    for killed in (False, True):
        process = EnvironmentProcess(config)
        process.answers([Episode(0, {}, 0, [call("leave", '{"n": 0}')])])
        pid = int(begun.read_text().split()[-1])
        assert psutil.pid_exists(pid)
        if killed:
            os.kill(process._parts[0].process.pid or 0, signal.SIGKILL)
            psutil.Process(pid).wait(20)
        process.close()
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("per_episode", [True, False])
def test_each_response_may_have_a_server_of_its_own_from_its_first_call_to_its_end(tmp_path, per_episode):
    begun, ask = tmp_path / "begun", call("leave", '{"n": 0}')
    server = entry("begins=9", str(begun))
    server["mcp"]["per_episode"] = per_episode
    config = config_of(server)
    schemas_of(config)
    begun.unlink()
    process = EnvironmentProcess(config)
    try:
        for texts in ([ask], [ask, ask]):
            answers = process.answers([Episode(n, {}, 0, texts) for n in range(2)])
            assert [contents(each) for each in answers] == [["0"], ["0"]]
        pids = [int(pid) for pid in begun.read_text().split()]
        assert len(pids) == (2 if per_episode else 1)
        process.answers([Episode(0, {}, 0, [ask, ask, "0"])])
        until_s = time.monotonic() + 20
        while sum(map(psutil.pid_exists, pids)) > 1 and time.monotonic() < until_s:
            time.sleep(0.05)
        assert sum(map(psutil.pid_exists, pids)) == 1, "the response that goes on has its server still"
        process.answers([Episode(1, {}, 0, [ask, ask, ask])])
        process.begin()
        while per_episode and any(map(psutil.pid_exists, pids)) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert sum(map(psutil.pid_exists, pids)) == (0 if per_episode else 1)
    finally:
        process.close()


def test_a_server_that_ends_in_every_call_stops_the_run_or_costs_its_sample(tmp_path):
    turns = [(MOST_ENDED + 1) * call("leave", '{"n": 3}'), "3"]
    episodes = [Episode(n, {}, 0, [turn]) for n, turn in enumerate(turns)]
    for skips in (False, True):
        process = EnvironmentProcess(config_of(entry(), on_reward_error="skip" if skips else "stop"))
        try:
            if skips:
                lost, other = process.answers(episodes)
                assert isinstance(lost, FailedAnswer)
                assert "times in a row" in lost.reason
                assert not isinstance(other, FailedAnswer)
            else:
                with pytest.raises(RewardError, match="times in a row"):
                    process.answers(episodes)
        finally:
            process.close()


def test_so_do_servers_of_single_responses_that_all_end_in_a_call():
    server = entry()
    server["mcp"]["per_episode"] = True
    process = EnvironmentProcess(config_of(server))
    try:
        for n in range(MOST_ENDED - 1):
            process.answers([Episode(n, {}, 0, [call("leave", '{"n": 3}')])])
        with pytest.raises(RewardError, match=f"{MOST_ENDED} times in a row"):
            process.answers([Episode(MOST_ENDED, {}, 0, [call("leave", '{"n": 3}')])])
    finally:
        process.close()


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"tools: two are named 'length'\. Rename one of them"):
        schemas_of(config_of(entry(), entry("begins=99", os.devnull)))


@pytest.mark.parametrize(
    ("tool", "sentence"),
    [
        ({}, "give either function or mcp, found neither"),
        ({"mcp": {}}, "give either command or url, found neither"),
        ({"mcp": {"command": "a", "url": "http://a/"}}, "give either command or url, found both"),
        ({"mcp": {"command": "a"}, "kwargs": {"K": {"block": "b"}}}, "kwargs.K names a Prefect block, but"),
        ({"mcp": {"command": "a"}, "kwargs": {"K": 3}}, "kwargs.K=3 is no text"),
    ],
)
def test_an_entry_is_a_function_or_a_server(tool, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config_of(tool)
