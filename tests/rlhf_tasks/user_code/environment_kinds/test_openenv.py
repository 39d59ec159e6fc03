"""A client of ours and a server of OpenEnv's on loopback."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from prefect_rlhf.rlhf_tasks.user_code.episodes import Episode
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
START_S = 120.0


@pytest.fixture
def server(installed, tmp_path):
    """The URL of a guessing game."""
    installed("openenv")
    port = tmp_path / "port"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("guessing_server.py")), str(port)]
    )
    until_s = time.monotonic() + START_S
    while not port.exists() and process.poll() is None and time.monotonic() < until_s:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port.read_text()}"
    process.kill()
    process.wait()


def test_an_episode_has_a_session_of_its_own_with_the_rows_seed(server, table, rows):
    made = rows(f"openenv:{server}", 8)
    assert {row["prompt"][0]["content"] for row in made} == {"guess: "}
    game = table(f"openenv:{server}")
    first = [game.play(row, "2")[0] for row in made]
    assert {each[0] for each in first} == {"right", "higher", "lower"}, "seeds 0 to 7 draw each number"
    together = game.process.answers([Episode(n, row, 7, ["2"]) for n, row in enumerate(made)])
    assert [tuple(each) for each in together] == first
    number = {"lower": "1", "right": "2", "higher": "3"}
    for row, (hint, *_) in zip(made, first, strict=True):
        assert game.play(row, "0", number[hint])[-1] == ("right", 1.0, True)
        assert game.play(row, "0", "0")[-1] == ("higher", 0.0, True)


def test_sessions_of_episodes_that_were_not_ended_are_given_back(server, table, rows):
    (row,) = rows(f"openenv:{server}", 1)
    game = table(f"openenv:{server}")
    for _ in range(6):  # 6 * 100 episodes of 512 sessions
        answers = game.process.answers([Episode(n, row, 7, ["0"]) for n in range(100)])
        assert {tuple(each) for each in answers} == {("higher", 0.0, False)}


def test_an_action_that_the_server_refuses_is_answered(server, table):
    (answer,) = table(f"openenv:{server}").play({"prompt": "guess: "}, '{"word": "2"}')
    assert answer == ("error: Server error: Invalid message (code: VALIDATION_ERROR)", 0.0, False)


def test_a_field_that_no_action_has_and_a_server_that_is_not_there_are_one_sentence(server, table):
    with pytest.raises(RewardError, match=r"has no field 'guess'; it has metadata, text"):
        table(f"openenv:{server}", action="guess").play({"prompt": "?"}, "2")
    with pytest.raises(RewardError, match=r"Connection refused"):
        table("openenv:http://127.0.0.1:9").play({"prompt": "?"}, "2")
