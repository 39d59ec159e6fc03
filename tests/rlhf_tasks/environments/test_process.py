"""The helper process of environments: answers in any order of arrival, every way in which one can fail."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.environments.episodes import Answer, Episode
from rlhf_tasks.environments.process import EnvironmentProcess
from rlhf_tasks.rewards.forms import RewardError

pytestmark = pytest.mark.cluster

CODE = '''
import asyncio, os, time
from pathlib import Path

class Room:
    """Answers with the number of the turn; the later the sample, the sooner."""

    def __init__(self, first_s=0.0, log=None):
        self.first_s, self.log = first_s, log

    def reset(self, row, seed):
        self.row, self.seed, self.turns = row, seed, 0

    async def step(self, text):
        self.turns += 1
        await asyncio.sleep(self.first_s if self.row["n"] == 0 else 0)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{self.row['n']} {text}\\n")
        return f"{text}:{self.turns}:{self.seed}", self.row["n"] / 2, text == "end"

class Failing:
    def __init__(self, how):
        self.how = how

    def reset(self, row, seed):
        self.n = row["n"]
        return "begin" if self.how == "begins" else None

    def step(self, text):
        if self.n != 1:
            return "on", 0, False
        return getattr(self, self.how)()

    def raises(self):
        raise KeyError("no such door")

    def leaves(self):
        os._exit(3)

    def hangs(self):
        while True:
            time.sleep(0.01)

    def none(self):
        return None

    def two(self):
        return "on", 1.0

    def number(self):
        return 7, 1.0, False

    def infinite(self):
        return "on", float("inf"), False

    def words(self):
        return "on", "much", False

    def unclear(self):
        return "on", 1.0, "no"

class Waiting(Failing):
    async def step(self, text):
        if self.n == 1:
            await asyncio.sleep(1000)
        return "on", 0, False

class Mute:
    def reset(self, row, seed):
        pass

def silent():
    return Mute()

numbers = [1]
'''


@pytest.fixture
def start(tmp_path) -> Iterator[Any]:
    """Start the process of environments, named in `rooms.py`."""
    (tmp_path / "rooms.py").write_text(CODE)
    (tmp_path / "unsound.py").write_text("import a_module_that_is_not_there\n")
    started: list[EnvironmentProcess] = []

    def make(name: str, processes: int = 1, timeout_s: float = 100.0, **kwargs: Any) -> EnvironmentProcess:
        factory = name if ":" in name else f"{tmp_path}/rooms.py:{name}"
        document = {
            "type": "rollout",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "reward_processes": processes,
            "environment": {"factory": factory, "kwargs": kwargs, "turn_timeout_s": timeout_s},
        }
        started.append(EnvironmentProcess(make_config(document)))
        return started[-1]

    yield make
    for process in started:
        process.close()


def episodes(*texts: str, samples=(0, 1, 2, 3)) -> list[Episode]:
    return [Episode(n, {"n": n}, 100 + n, texts) for n in samples]


@pytest.mark.parametrize("processes", [1, 3])
def test_answers_come_in_the_order_of_the_samples_whichever_is_first(start, tmp_path, processes):
    log = tmp_path / "log"
    process = start("Room", processes, first_s=0.4, log=str(log))
    assert process.answers(episodes("a")) == [Answer(f"a:1:{100 + n}", n / 2, False) for n in range(4)]
    assert log.read_text().split("\n")[3] == "0 a", "the first sample was answered last"
    found = process.answers(episodes("a", "end", samples=(0, 2)))
    assert found == [Answer(f"end:2:{100 + n}", n / 2, True) for n in (0, 2)]
    assert process.answers(episodes("b"))[0] == Answer("b:1:100", 0.0, False), "a new batch begins anew"


def test_a_process_that_is_killed_from_outside_is_given_all_turns_again(start, tmp_path):
    log = tmp_path / "log"
    process = start("Room", log=str(log))
    process.answers(episodes("a", samples=(1,)))
    [keeper] = [child for child in psutil.Process().children() if "environments" in " ".join(child.cmdline())]
    os.kill(keeper.children(recursive=True)[-1].pid, signal.SIGKILL)
    assert process.answers(episodes("a", "b", samples=(1,))) == [Answer("b:2:101", 0.5, False)]
    assert log.read_text().split() == ["1", "a", "1", "a", "1", "b"]


SENTENCES = {
    "raises": ("step raised KeyError: 'no such door' at {file}:36.", 1),
    "leaves": ("step ended its process with exit status 3.", 1),
    "none": ("step returned None. Return (observation, reward, done).", 1),
    "two": ("step returned ('on', 1.0). Return (observation, reward, done).", 1),
    "number": ("step returned the observation 7: not a text.", 1),
    "infinite": ("step returned the reward inf: not a finite number.", 1),
    "words": ("step returned the reward 'much': not a finite number.", 1),
    "unclear": ("step returned done='no': neither True nor False.", 1),
    "begins": ("reset returned 'begin'. What the policy reads first is the row's prompt: return nothing.", 0),
}


@pytest.mark.parametrize("how", SENTENCES)
def test_an_environment_that_fails_is_named_with_its_sample(start, tmp_path, how):
    sentence, sample = SENTENCES[how]
    file = tmp_path / "rooms.py"
    with pytest.raises(RewardError) as caught:
        start("Failing", how=how).answers(episodes("a"))
    assert str(caught.value) == f"environment {file}:Failing: {sentence.format(file=file)}"
    assert caught.value.place == sample


@pytest.mark.parametrize("name", ["Failing", "Waiting"])
def test_an_environment_that_never_answers_is_named_with_the_line_where_it_is(start, tmp_path, name):
    with pytest.raises(RewardError) as caught:
        start(name, timeout_s=3.0, how="hangs").answers(episodes("a"))
    line = CODE[: CODE.index("time.sleep" if name == "Failing" else "asyncio.sleep(1000)")].count("\n") + 1
    assert str(caught.value) == (
        f"environment {tmp_path}/rooms.py:{name}: step gave no answer in 3 s at {tmp_path}/rooms.py:{line}. "
        "Mend it or raise environment.turn_timeout_s."
    )
    assert caught.value.place == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Hall", "has no 'Hall'. Name a class or a function."),
        ("numbers", "'numbers' is neither a class nor a function."),
        ("silent", "Mute has no method 'step'. Give it reset(row, seed) and step(text)."),
        ("Failing", "making it raised TypeError"),
        (
            "unsound",
            "importing it raised ModuleNotFoundError: No module named 'a_module_that_is_not_there' at",
        ),
    ],
)
def test_what_is_no_environment_is_named(start, tmp_path, name, sentence):
    factory = f"{tmp_path}/unsound.py:Room" if name == "unsound" else name
    with pytest.raises(RewardError, match="environment") as caught:
        start(factory).answers(episodes("a"))
    assert sentence in str(caught.value)
